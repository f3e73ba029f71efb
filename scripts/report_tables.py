"""The tables of docs/results.md, from measurements. Pure text; `report.py` puts it into the page.

A function takes the reports by name (see `report.COMMANDS`) and returns Markdown. What an older report does not hold
is an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Reports = Mapping[str, Mapping[str, Any]]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def number(value: float | None, places: int = 2, unit: str = "") -> str | None:
    """A figure with that many decimals, or nothing."""
    return None if value is None else f"{value:.{places}f}{unit}"


def bold_best(values: Sequence[float | None]) -> list[str | None]:
    """Figures, the largest in bold."""
    best = max((value for value in values if value is not None), default=None)
    return [f"**{value:.2f}**" if value is not None and value == best else number(value) for value in values]


def label(mode: str) -> str:
    """What a drafter of benchmarks/experiments is called: 'fused 2' -> 'draft model, k = 2'."""
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
        "llama.cpp": f"{mode}, no speculation",
    }
    return names.get(kind, mode)


def facts(reports: Reports) -> str:
    """Machine, commit, date and versions."""
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
    return table(["", ""], rows)


def modes(reports: Reports) -> str:
    """One row for each way to decode."""
    greedy, sampled = reports["modes"]["modes"], reports.get("modes-t1", {}).get("modes", {})
    faster = bold_best([figures["over_plain"] for figures in greedy.values()])
    faster_sampled = bold_best([sampled.get(name, {}).get("over_plain") for name in greedy])
    rows = [
        (
            label(name),
            number(figures.get("tokens_per_second"), 0),
            faster[place],
            faster_sampled[place],
            number(figures.get("tau")),
            number(figures.get("ms_per_round")),
            " ".join(f"{share:.2f}".lstrip("0") for share in figures.get("acceptance_by_position", ())),
        )
        for place, (name, figures) in enumerate(greedy.items())
    ]
    head = [
        "mode",
        "tokens/s",
        "speedup",
        "at temperature 1",
        "acceptance length",
        "ms per round",
        "accepted, by position",
    ]
    return table(head, rows)


def chat(reports: Reports) -> str:
    """The chat model: every side, greedy, and our modes at temperature 0.7."""
    greedy, sampled = (reports.get(name, {}).get("modes", {}) for name in ("chat", "chat-t07"))
    faster = bold_best([figures.get("decode_over_plain") for figures in greedy.values()])
    rows = [
        (
            label(name),
            number(figures["tokens_per_second"], 0),
            number(figures.get("over_plain")),
            faster[place],
            number(sampled.get(name, {}).get("decode_over_plain")),
            number(figures.get("tau")),
            number(figures.get("ms_per_round"), 1),
            " ".join(f"{share:.2f}".lstrip("0") for share in figures.get("acceptance_by_position", ())),
        )
        for place, (name, figures) in enumerate(greedy.items())
    ]
    head = [
        "mode",
        "tokens/s, prefill included",
        "speedup",
        "without prefill",
        "the same at temperature 0.7",
        "acceptance length",
        "ms per round",
        "accepted, by position",
    ]
    return table(head, rows)


def categories(reports: Reports) -> str:
    """The chat model by category of prompts: speedup without prefill, and acceptance length."""
    measured = reports["chat"]["categories"]
    modes = [name for name in next(iter(measured.values())) if name != "plain"]
    rows = []
    for category, found in measured.items():
        faster = bold_best([found[mode].get("decode_over_plain") for mode in modes])
        cells = [f"{ratio} ({number(found[mode].get('tau'))})" for mode, ratio in zip(modes, faster, strict=True)]
        rows.append((category, number(found["plain"]["decode_tokens_per_second"], 0), *cells))
    return table(["category", "plain, tokens/s", *map(label, modes)], rows)


def rules(reports: Reports) -> str:
    """Match beside rejection sampling, for every k and temperature."""
    rows = []
    for name, temperature in (("rules", 0.7), ("rules-t1", 1)):
        measured = reports.get(name, {}).get("modes", {})
        for mode, match in measured.items():
            if (reject := measured.get(f"{mode} reject")) is None:
                continue
            lost = number(100 * (1 - match["tau"] / reject["tau"]), 1, " %")
            pair = [cell for row in (match, reject) for cell in (number(row["tau"]), number(row["over_plain"]))]
            rows.append((temperature, mode.removeprefix("pair "), *pair, lost))
    head = [
        "temperature",
        "k",
        "match: acceptance length",
        "speedup",
        "reject: acceptance length",
        "speedup",
        "price",
    ]
    return table(head, rows)


def sampling(reports: Reports) -> str:
    """What a kind of sampling costs beside greedy decoding."""
    rows = [
        (name, number(row["ms"], 2, " ms"), number(100 * (row["over_greedy"] - 1), 1, " %"))
        for name, row in reports["sampling"]["kinds"].items()
    ]
    return table(["sampling", "time of a token", "over greedy"], rows)


def targets(reports: Reports) -> str:
    """One row for each target and k."""
    rows = []
    for name, title in (("pair", "16 M (demo pair), real text"), ("30m", "30 M"), ("110m", "110 M")):
        measured = reports.get(name, {}).get("modes", {})
        for mode, fused in measured.items():
            if not mode.startswith("fused"):
                continue
            host = [number(fused.get("outside_us"), 0, " us"), number(100 * fused.get("outside_share", 0), 1, " %")]
            rows.append(
                (
                    title,
                    mode.split("=")[1],
                    number(fused["speed_up"]),
                    number(measured.get(mode.replace("fused", "two steps"), {}).get("speed_up")),
                    number(fused.get("tokens_per_round")),
                    ", ".join(filter(None, host)),
                    number(fused.get("of_formula_as_counted")),
                )
            )
            title = ""  # once, above the rows of the other k
    head = ["target", "k", "speedup", "in two graphs", "acceptance length", "host time of a round", "of the formula"]
    return table(head, rows)


def equality(reports: Reports) -> str:
    """How often tokens differed where they must not."""
    rows: list[Sequence[object]] = []
    for name, temperature in (("modes", 0), ("modes-t1", 1)):
        measured = reports.get(name, {}).get("modes", {})
        counts = [row["texts_unlike_plain"] for row in measured.values() if "texts_unlike_plain" in row]
        if counts:
            texts = reports[name]["prompts"] * (len(counts) - 1)  # one of them is plain decoding itself
            rows.append((f"every mode with plain decoding, temperature {temperature}", f"{texts} texts", sum(counts)))
    for backend, row in reports.get("disagreements", {}).get("widths", {}).items():
        pair = f"`verify[5]` with `decode[1]`, backend `{backend}`"
        rows.append((pair, f"{row['tokens']} tokens", row["disagreements"]))
    for what, row in reports.get("disagreements", {}).get("backends", {}).items():
        rows.append((f"`native` with `eager`, {what}", f"{row['tokens']} tokens", row["disagreements"]))
    return table(["compared", "number", "different"], rows)


def plan_speed(reports: Reports) -> str:
    """Errors of predictions of the planner, and each that is above what is allowed."""
    one = reports["plan-speed"]
    head = ("predicted", "cells", "median error", "largest error", "cells above 10 %")
    rows = []
    for name, key in (("tokens per second", "speed_error"), ("times plain decoding", "speedup_error")):
        missed = one[f"{key}_misses"]
        largest = f"{one[f'largest_{key}']:.1%}"
        said = f"{len(missed)}: {'; '.join(missed)}" if missed else "none"
        rows.append((name, one["predicted_cells"], f"{one[f'median_{key}']:.1%}", largest, said))
    return table(head, rows) + f"\n\n{one['timed_cells']} cells were timed; backend {one['backend']}, {one['amp']}."


# Name in the page: the measurements that the table shows (those there are), and what makes it.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Reports], str]]] = {
    "facts": ((), facts),
    "modes": (("modes",), modes),
    "chat": (("chat", "chat-t07"), chat),
    "categories": (("chat",), categories),
    "rules": (("rules", "rules-t1"), rules),
    "sampling": (("sampling",), sampling),
    "targets": (("pair", "30m", "110m"), targets),
    "plan_speed": (("plan-speed",), plan_speed),
    "equality": (("modes", "modes-t1", "disagreements"), equality),
}
