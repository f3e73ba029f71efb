"""The charts of docs/results.md and docs/study.md, as SVG files that read well on light and on dark pages.

Text is drawn as paths, the background is transparent, and the same measurements give the same file. Every file carries
a digest of what it shows, so that `report.py --check` sees a stale chart without drawing it again. Needs matplotlib
(extra `dev`) only to draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from report_tables import Reports, label

INK = "#7f8790"  # grey with enough contrast on white and on a dark page
GAIN, LOSS, PLAIN, SAMPLED = "#3f8fd2", "#c9822c", "#8b949e", "#7cc0a5"
COLORS = (GAIN, LOSS, "#4fa37f", "#a06cc4", PLAIN, "#c75d6b")
TARGET = "SmolLM2-135M-Instruct"
"""The target of the charts of the study."""

Shown = Mapping[str, Any]


def family(mode: str) -> str:
    """The family of a mode; the chart shows the fastest setting of each."""
    kind, _, how = mode.partition(" ")
    if "+" in mode:
        return "list"
    large_tree = "dynamic" in how or (kind == "medusa" and int(how.removeprefix("tree-")) > 4)
    return f"{kind}, large tree" if large_tree else kind


def fastest(speeds: Mapping[str, float]) -> list[str]:
    """The fastest mode of each family, the slowest first."""
    best: dict[str, str] = {}
    for name in speeds:
        best[family(name)] = max(best.get(family(name), name), name, key=speeds.__getitem__)
    return sorted(best.values(), key=speeds.__getitem__)


def speed(axes: Any, shown: Shown) -> None:
    """Bars: the fastest setting of every way to draft, greedy, and the same setting at temperature 1."""
    greedy = {name: figures["over_plain"] for name, figures in shown["modes"]["modes"].items()}
    sampled = shown.get("modes-t1", {}).get("modes", {})
    names = fastest(greedy)
    for place, name in enumerate(names):
        value = greedy[name]
        color = PLAIN if name == "plain" else GAIN if value >= 1 else LOSS
        axes.barh(place + 0.17, value, height=0.42, color=color)
        axes.text(value + 0.015, place + 0.17, f"{value:.2f}", va="center", color=INK, fontsize=9)
        if name in sampled and name != "plain":
            value = sampled[name]["over_plain"]
            axes.barh(place - 0.2, value, height=0.22, color=SAMPLED)
            axes.text(value + 0.015, place - 0.2, f"{value:.2f}", va="center", color=INK, fontsize=7.5)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.set_xlim(0, 1.12 * max(greedy.values()))
    axes.set_xlabel("speedup over plain decoding (thin bars: temperature 1)")


def chat(axes: Any, shown: Shown) -> None:
    """Bars: tokens per second of the chat model, ours and others'."""
    speeds = {name: figures["tokens_per_second"] for name, figures in shown["chat"]["modes"].items()}
    names = fastest(speeds)
    for place, name in enumerate(names):
        theirs = name.startswith("transformers")
        axes.barh(place, speeds[name], color=PLAIN if theirs or name == "plain" else GAIN)
        axes.text(speeds[name] + 1, place, f"{speeds[name]:.0f}", va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.set_xlim(0, 1.12 * max(speeds.values()))
    axes.set_xlabel("tokens/s, prefill included")


def depths(axes: Any, shown: Shown) -> None:
    """Lines: tokens per round by depth, whole for the lowest temperature and dashed for the highest."""
    traces = shown["traces"]
    ends = [traces[0], *traces[-1:]] if len(traces) > 1 else traces
    for trace, line in zip(ends, ("-", "--"), strict=False):
        for (name, known), color in zip(trace["depths"].items(), COLORS, strict=False):
            points = sorted((int(k), value) for k, value in known.items())
            axes.plot(*zip(*points, strict=True), line, marker="o", color=color, label=name if line == "-" else None)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    warm = f"; dashed: T = {traces[-1]['temperature']:g}" if len(traces) > 1 else ""
    axes.set_xlabel(f"k, drafted tokens per round (whole lines: greedy{warm})")
    axes.set_ylabel("tokens per round")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def kinds(axes: Any, shown: Shown) -> None:
    """Bars: tokens per round of the chains by kind of prompt, greedy."""
    trace = shown["traces"][0]
    names = list(trace["depths"])
    width = 0.8 / len(names)
    for place, (name, color) in enumerate(zip(names, COLORS, strict=False)):
        values = [trace["drafters"][name]["by_category"][kind] for kind in trace["categories"]]
        at = [index - 0.4 + (place + 0.5) * width for index in range(len(values))]
        axes.bar(at, values, width=width * 0.9, color=color, label=name)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(trace["categories"])), trace["categories"])
    axes.set_ylabel("tokens per round, greedy")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, ncols=len(names))


# File: what draws it, its size in inches, and the measurements it shows (the first is needed).
CHARTS: dict[str, tuple[Callable[[Any, Shown], None], tuple[float, float], tuple[str, ...]]] = {
    "speed.svg": (speed, (7.2, 3.6), ("modes", "modes-t1")),
    "chat.svg": (chat, (7.2, 3.2), ("chat",)),
    "study-depths.svg": (depths, (7.2, 3.4), ("traces",)),
    "study-kinds.svg": (kinds, (7.2, 3.6), ("traces",)),
}


def due(reports: Reports, study: Shown) -> dict[str, Shown]:
    """Charts that can be drawn, with what they show."""
    names = ("temperature", "depths", "drafters", "categories")
    traces = [{name: one[name] for name in names} for one in study["traces"] if one["target"] == TARGET]
    known = {**reports, **({"traces": traces} if traces else {})}
    shown = {file: {need: known[need] for need in needs if need in known} for file, (_, _, needs) in CHARTS.items()}
    return {file: found for file, found in shown.items() if CHARTS[file][2][0] in found}


def digest(shown: Shown) -> str:
    """Hash of the measurements and of this file."""
    content = json.dumps(shown, sort_keys=True) + Path(__file__).read_text()
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def stale(charts: Mapping[str, Shown], folder: Path) -> list[str]:
    """Charts that are missing or show something else."""
    marks = {folder / file: digest(shown) for file, shown in charts.items()}
    return [path.name for path, mark in marks.items() if not path.is_file() or mark not in path.read_text()]


def draw(charts: Mapping[str, Shown], folder: Path) -> None:
    """Write the charts."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: dict[str, Any] = {"svg.fonttype": "path", "svg.hashsalt": "paceline", "font.size": 10}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    for file, shown in charts.items():
        function, size, _ = CHARTS[file]
        with matplotlib.rc_context(style):
            figure, axes = pyplot.subplots(figsize=size, layout="constrained")
            function(axes, shown)
            axes.spines[["top", "right"]].set_visible(False)
            metadata = {"Date": None, "Title": file, "Description": f"figures {digest(shown)}"}
            figure.savefig(folder / file, transparent=True, metadata=metadata)
            pyplot.close(figure)
