"""The charts of README and docs/results.md, as SVG files that read well on light and on dark pages.

Text is drawn as paths, the background is transparent, and the same measurements give the same file. Every file carries
a digest of what it shows, so that `report.py --check` sees a stale chart without drawing it again. Needs matplotlib
(extra `plots`) only to draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from report_tables import Reports, label

INK = "#7f8790"  # grey with enough contrast on white and on a dark page
GAIN, LOSS, PLAIN, SAMPLED = "#3f8fd2", "#c9822c", "#8b949e", "#7cc0a5"


def family(mode: str) -> str:
    """What a mode is one setting of; the chart shows the fastest setting of each."""
    kind, _, how = mode.partition(" ")
    if "+" in mode:
        return "list"
    large_tree = "dynamic" in how or (kind == "medusa" and int(how.removeprefix("tree-")) > 4)
    return f"{kind}, large tree" if large_tree else kind


def speed(axes: Any, reports: Reports) -> None:
    """Bars: the fastest setting of every way to draft, greedy, and the same setting at temperature 1."""
    greedy = {name: figures["over_plain"] for name, figures in reports["modes"]["modes"].items()}
    sampled = reports.get("modes-t1", {}).get("modes", {})
    fastest: dict[str, str] = {}
    for name, value in greedy.items():
        best = fastest.setdefault(family(name), name)
        fastest[family(name)] = name if value > greedy[best] else best
    names = sorted(fastest.values(), key=greedy.__getitem__)
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


def chat(axes: Any, reports: Reports) -> None:
    """Bars: tokens per second of the chat model, ours and others'."""
    speeds = {name: figures["tokens_per_second"] for name, figures in reports["chat"]["modes"].items()}
    fastest: dict[str, str] = {}
    for name, value in speeds.items():
        best = fastest.setdefault(family(name), name)
        fastest[family(name)] = name if value > speeds[best] else best
    names = sorted(fastest.values(), key=speeds.__getitem__)
    for place, name in enumerate(names):
        theirs = name.startswith(("transformers", "llama.cpp"))
        axes.barh(place, speeds[name], color=PLAIN if theirs or name == "plain" else GAIN)
        axes.text(speeds[name] + 1, place, f"{speeds[name]:.0f}", va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.set_xlim(0, 1.12 * max(speeds.values()))
    axes.set_xlabel("tokens/s, prefill included")


def targets(axes: Any, reports: Reports) -> None:
    """Lines: speed-up by k for targets of three sizes."""
    for name, title, color in (
        ("pair", "16 M (demo pair), real text", "#c9822c"),
        ("30m", "30 M, synthetic acceptance 0.8", "#4fa37f"),
        ("110m", "110 M, synthetic acceptance 0.8", "#3f8fd2"),
    ):
        measured = reports.get(name, {}).get("modes", {})
        points = [(int(m.split("=")[1]), f["speed_up"]) for m, f in measured.items() if m.startswith("fused")]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=color, label=title)
        for k, value in points:
            place = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{value:.2f}", (k, value), color=INK, fontsize=8, **place)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("k, drafted tokens per round")
    axes.set_ylabel("speedup")
    axes.margins(x=0.08, y=0.15)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


# File: what draws it, the measurements it shows (the first is needed), and its size in inches.
CHARTS = {
    "speed.svg": (speed, ("modes", "modes-t1"), (7.2, 3.6)),
    "chat.svg": (chat, ("chat",), (7.2, 3.2)),
    "targets.svg": (targets, ("pair", "30m", "110m"), (7.2, 3.2)),
}


def due(reports: Reports) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Charts that can be drawn, with what they show."""
    shown = {file: {name: reports[name] for name in names if name in reports} for file, (_, names, _) in CHARTS.items()}
    return {file: found for file, found in shown.items() if CHARTS[file][1][0] in found}


def digest(shown: Mapping[str, object]) -> str:
    """Of the measurements and of this file."""
    content = json.dumps(shown, sort_keys=True) + Path(__file__).read_text()
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def stale(reports: Reports, folder: Path) -> list[str]:
    """Charts that are missing or show something else."""
    charts = {folder / file: digest(shown) for file, shown in due(reports).items()}
    return [path.name for path, mark in charts.items() if not path.is_file() or mark not in path.read_text()]


def draw(reports: Reports, folder: Path) -> None:
    """Write every chart whose measurements are there."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: dict[str, Any] = {"svg.fonttype": "path", "svg.hashsalt": "paceline", "font.size": 10}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    for file, shown in due(reports).items():
        function, _, size = CHARTS[file]
        with matplotlib.rc_context(style):
            figure, axes = pyplot.subplots(figsize=size, layout="constrained")
            function(axes, shown)
            axes.spines[["top", "right"]].set_visible(False)
            metadata = {"Date": None, "Title": file, "Description": f"measurements {digest(shown)}"}
            figure.savefig(folder / file, transparent=True, metadata=metadata)
            pyplot.close(figure)
