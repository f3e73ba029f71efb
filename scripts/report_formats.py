"""Tables of docs/results.md about formats of weights, latency, long texts and the server; pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from report_tables import Reports, label, number, table

SHAPES = {
    "30m": "30 M",
    "110m": "110 M",
    "1.1b": "1.1 B",
    "smollm2": "SmolLM2-135M",
}
"""As benchmarks/formats.py names them, and as the page does."""

_CALLS = {"decode1": "`decode[1]`", "verify5": "`verify[5]`", "verify9": "`verify[9]`", "prefill": "prefill, 256"}


def formats(reports: Reports) -> str:
    """Milliseconds of each call by shape and format, llama.cpp beside us; and the ratios that the aims are about."""
    rows: list[Sequence[object]] = []
    for shape, title in SHAPES.items():
        report = reports.get(f"formats-{shape}")
        for form, times in {} if report is None else report["ms"].items():
            ratios = report["ratios"].get(form, {}) if report else {}
            rows.append(
                (
                    title,
                    form,
                    *(number(times.get(call)) for call in _CALLS),
                    number(ratios.get("decode1_over_read")),
                    number(ratios.get("verify5_over_decode1")),
                    number(ratios.get("decode1_over_bf16")),
                )
            )
    head = [
        "model",
        "format",
        *_CALLS.values(),
        "`decode[1]` over reading",
        "`verify[5]` over `decode[1]`",
        "over bf16",
    ]
    return table(head, rows)


def latency(reports: Reports) -> str:
    """Seconds to the whole text by length of the prompt, and the speed-up over plain decoding."""
    report = reports["latency"]
    lengths = list(next(iter(report["modes"].values())))
    rows = [(label(mode), *(_latency(row[length]) for length in lengths)) for mode, row in report["modes"].items()]
    return table(["mode", *(f"from {length} tokens" for length in lengths)], rows)


def _latency(row: Mapping[str, Any]) -> str:
    return f"{row['seconds']:.2f} s ({row['speed_up']:.2f} x)" + ("" if row["same_tokens"] else ", other tokens")


def perplexity(reports: Reports) -> str:
    """Of every format."""
    rows = [
        (row["format"], number(row["perplexity"]), number(row["weights_mb"], 0, " MB"))
        if "perplexity" in row
        else (row["format"], row["refused"], None)
        for row in reports["perplexity"]["perplexity"]
    ]
    return table(["format", "perplexity", "weights"], rows)


def long(reports: Reports) -> str:
    """Time and memory against the length of a prompt, and llama.cpp's time."""
    rows = [
        (
            f"{row['positions']:.0f}",
            number(row["prefill_s"], 2, " s"),
            number(row["prefill_tokens_per_s"], 0),
            number(row.get("llama_cpp_s"), 2, " s"),
            number(row["prefill_s"] / row["llama_cpp_s"] if row.get("llama_cpp_s") else None),
            number(row["prompt_mb"], 0, " MB"),
            number(row["cache_mb"], 0, " MB"),
        )
        for row in reports["long"]["long"]
    ]
    head = ["positions", "prompt", "tokens/s", "llama.cpp", "ours over it", "memory besides weights and cache"]
    return table([*head, "keys and values"], rows)


def load(reports: Reports) -> str:
    """Peak memory and seconds of loads, from every kind of file into every format."""
    rows = [
        (
            row["stored"],
            row["held"],
            number(row["weights_mb"], 0, " MB"),
            number(row["peak"]),
            f"{row['seconds']:.2f} s",
        )
        for row in reports["load"]["load"]
    ]
    return table(["stored as", "held as", "weights", "peak over the weights", "time"], rows)


def serve(reports: Reports) -> str:
    """Tokens a second of the server and of the engine alone by draft length and load, the first token, and processor
    time; and how long running streams wait while long prompts are read.
    """
    rows: list[Sequence[object]] = []
    by_length = "k" in reports["serve"]["rows"][0]
    for row in reports["serve"]["rows"]:
        median, worst = row["first_token_s"]
        spent = ", ".join(f"{kind} {micros:.0f}" for kind, micros in row["cpu_us_per_token"].items())
        alone = (f"{row['offline']:.0f}", number(row["ratio"])) if row["offline"] else ("-", "-")
        speeds = (f"{row['tokens_per_s']:.0f}", *alone)
        length = ("no drafter" if row["k"] == "plain" else f"k = {row['k']}",) if by_length else ()
        rows.append((*length, row["load"], *speeds, f"{median:.2f} s, {worst:.2f} s", spent, row["failed"]))
    head = [
        *(["draft length"] if by_length else []),
        "load",
        "tokens/s",
        "engine alone",
        "ratio",
        "first token: median, 99th of 100",
        "us of processor a token",
        "failed",
    ]
    gaps = reports["serve"].get("gaps")
    return table(head, rows) + ("" if gaps is None else "\n\n" + _gaps(gaps))


def _gaps(gaps: Mapping[str, Any]) -> str:
    """The longest pauses of streams that get a message for every round."""
    row = (
        f"{gaps['prompt_tokens']} tokens",
        gaps["prompts"],
        *(f"{1000 * gaps[name]:.0f} ms" for name in ("alone_s", "quiet_s", "beside_s")),
    )
    head = ["long prompts", "read", "first token, alone", "longest pause of a stream", "beside long prompts"]
    return table(head, [row])
