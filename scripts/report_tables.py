"""The tables of docs/results.md and benchmarks/results/README.md, from measurements. `report.py` puts them in.

A function takes the reports by name (see `report.COMMANDS`) and returns Markdown. What an older report does not hold
is an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Reports = Mapping[str, Mapping[str, Any]]

SHAPES = {"30m": "30 M", "110m": "110 M", "1.1b": "1.1 B", "smollm2": "SmolLM2-135M"}
"""Models as benchmarks/formats.py names them, and as the page does."""


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell. ``head``: names of the columns, between bars."""
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def number(value: float | None, places: int = 2, unit: str = "") -> str | None:
    """A figure with that many decimals, or nothing."""
    return None if value is None else f"{value:.{places}f}{unit}"


def bold_best(values: Sequence[float | None]) -> list[str | None]:
    """Figures, the largest in bold."""
    best = max((value for value in values if value is not None), default=None)
    return [f"**{value:.2f}**" if value is not None and value == best else number(value) for value in values]


def label(mode: str) -> str:
    """Display name of a drafter of benchmarks/experiments: 'fused 2' -> 'draft model, k = 2'."""
    kind, _, how = mode.partition(" ")
    shape, _, size = how.partition(":")
    if "+" in mode:
        return " + ".join(label(part.strip()) for part in mode.split("+"))
    names = {
        "plain": "plain decoding",
        "ngram": f"n-gram, k = {how}",
        "suffix": f"suffix, k = {how}",
        "answers": f"suffix with earlier answers, k = {how.partition(' ')[0]}",
        "pair": f"draft model, k = {how}, two graphs",
        "fused": f"draft model, k = {how}",
        "medusa": f"Medusa, tree of {how.removeprefix('tree-')}",
        "eagle3": f"EAGLE-3, k = {size}" if shape == "chain" else f"EAGLE-3, dynamic tree {size}",
        "transformers": f"{mode}, no speculation",
    }
    return names.get(kind, mode)


def facts(reports: Reports) -> str:
    if not reports:
        return "Not measured yet."
    first = next(iter(reports.values()))
    machine = first["machine"]
    dates = sorted({report["date"] for report in reports.values()})
    rows = [
        ("machine", f"{machine['cores']} cores of an {machine['cpu']}, {machine['memory_gb']} GB of memory"),
        ("instructions", machine["instructions"]),
        ("commit", first["commit"]),
        ("date", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in first["versions"].items())),
    ]
    return table("|", rows)


def _positions(figures: Mapping[str, Any]) -> str:
    return " ".join(f"{share:.2f}".lstrip("0") for share in figures.get("acceptance_by_position", ()))


def modes(reports: Reports) -> str:
    greedy, sampled = reports["modes"]["modes"], reports.get("modes-t1", {}).get("modes", {})
    faster = bold_best([figures["over_plain"] for figures in greedy.values()])
    warm = bold_best([sampled.get(name, {}).get("over_plain") for name in greedy])
    rows = [
        (label(name), number(one.get("tokens_per_second"), 0), faster[place], warm[place], number(one.get("tau")),
         number(one.get("ms_per_round")), _positions(one))
        for place, (name, one) in enumerate(greedy.items())
    ]  # fmt: skip
    head = "mode | tokens/s | speedup | at temperature 1 | acceptance length | ms per round | accepted, by position"
    return table(head, rows)


def chat(reports: Reports) -> str:
    """The chat model: every side, greedy, and our modes at temperature 0.7."""
    greedy, sampled = (reports.get(name, {}).get("modes", {}) for name in ("chat", "chat-t07"))
    faster = bold_best([figures.get("decode_over_plain") for figures in greedy.values()])
    rows = [
        (label(name), number(one["tokens_per_second"], 0), number(one.get("over_plain")), faster[place],
         number(sampled.get(name, {}).get("decode_over_plain")), number(one.get("tau")),
         number(one.get("ms_per_round"), 1), _positions(one))
        for place, (name, one) in enumerate(greedy.items())
    ]  # fmt: skip
    head = "mode | tokens/s, prefill included | speedup | without prefill | the same at temperature 0.7"
    return table(head + " | acceptance length | ms per round | accepted, by position", rows)


def categories(reports: Reports) -> str:
    """The chat model by category of prompts: speedup without prefill, and acceptance length."""
    measured = reports["chat"]["categories"]
    names = [name for name in next(iter(measured.values())) if name != "plain"]
    rows = []
    for category, found in measured.items():
        faster = bold_best([found[name].get("decode_over_plain") for name in names])
        cells = [f"{ratio} ({number(found[name].get('tau'))})" for name, ratio in zip(names, faster, strict=True)]
        rows.append((category, number(found["plain"]["decode_tokens_per_second"], 0), *cells))
    return table(" | ".join(["category", "plain, tokens/s", *map(label, names)]), rows)


def rules(reports: Reports) -> str:
    """Match compared with rejection sampling, for every k and temperature."""
    rows = []
    for name, temperature in (("rules", 0.7), ("rules-t1", 1)):
        measured = reports.get(name, {}).get("modes", {})
        for mode, match in measured.items():
            if (reject := measured.get(f"{mode} reject")) is not None:
                lost = number(100 * (1 - match["tau"] / reject["tau"]), 1, " %")
                pair = [cell for row in (match, reject) for cell in (number(row["tau"]), number(row["over_plain"]))]
                rows.append((temperature, mode.removeprefix("pair "), *pair, lost))
    head = "temperature | k | match: acceptance length | speedup | reject: acceptance length | speedup | price"
    return table(head, rows)


def sampling(reports: Reports) -> str:
    rows = [
        (name, number(row["ms"], 2, " ms"), number(100 * (row["over_greedy"] - 1), 1, " %"))
        for name, row in reports["sampling"]["kinds"].items()
    ]
    return table("sampling | time of a token | over greedy", rows)


def equality(reports: Reports) -> str:
    """How often texts differed where they must not."""
    rows = []
    for name, temperature in (("modes", 0), ("modes-t1", 1)):
        measured = reports.get(name, {}).get("modes", {})
        counts = [row["texts_unlike_plain"] for row in measured.values() if "texts_unlike_plain" in row]
        if counts:
            texts = reports[name]["prompts"] * (len(counts) - 1)  # one of them is plain decoding itself
            rows.append((f"every mode with plain decoding, temperature {temperature}", f"{texts} texts", sum(counts)))
    return table("compared | number | different", rows)


def formats(reports: Reports) -> str:
    """Milliseconds of each call by shape and format, compared with llama.cpp; and the ratios of the goals."""
    rows = []
    for shape, title in SHAPES.items():
        report = reports.get(f"formats-{shape}", {"ms": {}, "ratios": {}})
        for form, times in report["ms"].items():
            ratios = report["ratios"].get(form, {})
            calls = (times.get(call) for call in ("decode1", "verify5", "verify9", "prefill"))
            over = (ratios.get(name) for name in ("decode1_over_read", "verify5_over_decode1", "decode1_over_bf16"))
            rows.append((title, form, *map(number, calls), *map(number, over)))
    head = "model | format | `decode[1]` | `verify[5]` | `verify[9]` | prefill, 256 | `decode[1]` over reading"
    return table(head + " | `verify[5]` over `decode[1]` | over bf16", rows)


def latency(reports: Reports) -> str:
    measured = reports["latency"]["modes"]
    lengths = list(next(iter(measured.values())))
    rows = [(label(mode), *(_latency(row[length]) for length in lengths)) for mode, row in measured.items()]
    return table(" | ".join(["mode", *(f"from {length} tokens" for length in lengths)]), rows)


def _latency(row: Mapping[str, Any]) -> str:
    return f"{row['seconds']:.2f} s ({row['speed_up']:.2f} x)" + ("" if row["same_tokens"] else ", other tokens")


def perplexity(reports: Reports) -> str:
    rows = [
        (row["format"], number(row["perplexity"]), number(row["weights_mb"], 0, " MB"))
        if "perplexity" in row
        else (row["format"], row["refused"], None)
        for row in reports["perplexity"]["perplexity"]
    ]
    return table("format | perplexity | weights", rows)


def long(reports: Reports) -> str:
    """Time and memory against the length of a prompt, and llama.cpp's time."""
    rows = []
    for row in reports["long"]["long"]:
        theirs = row.get("llama_cpp_s")
        times = number(row["prefill_s"], 2, " s"), number(row["prefill_tokens_per_s"], 0), number(theirs, 2, " s")
        sizes = (number(row[name], 0, " MB") for name in ("prompt_mb", "cache_mb"))
        rows.append((f"{row['positions']:.0f}", *times, number(row["prefill_s"] / theirs if theirs else None), *sizes))
    head = "positions | prompt | tokens/s | llama.cpp | ours over it | memory besides weights and cache"
    return table(head + " | keys and values", rows)


def load(reports: Reports) -> str:
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
    return table("stored as | held as | weights | peak over the weights | time", rows)


def serve(reports: Reports) -> str:
    """Tokens per second of the server and of the bare engine by draft length and load, the first token, and processor
    time; and how long running streams wait during the prefill of long prompts.
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
    head = "draft length | " if by_length else ""
    head += (
        "load | tokens/s | engine alone | ratio | first token: median, 99th of 100 | us of processor a token | failed"
    )
    gaps = reports["serve"].get("gaps")
    return table(head, rows) + ("" if gaps is None else "\n\n" + _gaps(gaps))


def _gaps(gaps: Mapping[str, Any]) -> str:
    """The longest pauses of streams that get a message for every round."""
    seconds = (f"{1000 * gaps[name]:.0f} ms" for name in ("alone_s", "quiet_s", "beside_s"))
    head = "long prompts | read | first token, alone | longest pause of a stream | beside long prompts"
    return table(head, [(f"{gaps['prompt_tokens']} tokens", gaps["prompts"], *seconds)])


# Name in the page: the measurements that the table shows (those there are), and what makes it.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Reports], str]]] = {
    "facts": ((), facts),
    "modes": (("modes",), modes),
    "chat": (("chat", "chat-t07"), chat),
    "categories": (("chat",), categories),
    "rules": (("rules", "rules-t1"), rules),
    "sampling": (("sampling",), sampling),
    "equality": (("modes", "modes-t1"), equality),
    "latency": (("latency",), latency),
    "formats": (tuple(f"formats-{shape}" for shape in SHAPES), formats),
    "perplexity": (("perplexity",), perplexity),
    "long": (("long",), long),
    "load": (("load",), load),
    "serve": (("serve",), serve),
}
