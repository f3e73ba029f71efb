"""The charts of docs/study.md, as SVG files; `report_charts.py` has their look, and those of docs/results.md.

Every file carries a digest of what it shows, so that `study_page.py --check` sees a stale chart without drawing it
again. Needs matplotlib (extra `plots`) only to draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from report_charts import INK

COLORS = ("#3f8fd2", "#c9822c", "#4fa37f", "#a06cc4", "#8b949e", "#c75d6b")
TARGET = "SmolLM2-135M-Instruct"
FILES = {"study-depths.svg": (7.2, 3.4), "study-kinds.svg": (7.2, 3.6)}

Figures = Mapping[str, Any]


def shown(figures: Figures) -> list[dict[str, Any]]:
    """What the charts need of the traces of the target, the lowest temperature first."""
    names = ("temperature", "depths", "drafters", "categories")
    return [{name: one[name] for name in names} for one in figures["traces"] if one["target"] == TARGET]


def digest(figures: Figures) -> str:
    """Of the figures and of this file."""
    content = json.dumps(shown(figures), sort_keys=True) + Path(__file__).read_text()
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def stale(figures: Figures, folder: Path) -> list[str]:
    """Charts that are missing or show something else."""
    mark = digest(figures)
    there = [name for name in FILES if (folder / name).is_file()]
    return [name for name in FILES if name not in there or mark not in (folder / name).read_text()]


def draw(figures: Figures, folder: Path) -> None:
    """Write both, where the target has traces."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    traces = shown(figures)
    style: dict[str, Any] = {"svg.fonttype": "path", "svg.hashsalt": "paceline", "font.size": 10}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    for (file, size), function in zip(FILES.items(), (_depths, _kinds), strict=True):
        with matplotlib.rc_context(style):
            figure, axes = pyplot.subplots(figsize=size, layout="constrained")
            function(axes, traces)
            axes.spines[["top", "right"]].set_visible(False)
            metadata = {"Date": None, "Title": file, "Description": f"figures {digest(figures)}"}
            figure.savefig(folder / file, transparent=True, metadata=metadata)
            pyplot.close(figure)


def _depths(axes: Any, traces: list[dict[str, Any]]) -> None:
    """Lines: tokens a round by depth, whole for the lowest temperature and dashed for the highest."""
    ends = [traces[0], *traces[-1:]] if len(traces) > 1 else traces
    for trace, line in zip(ends, ("-", "--"), strict=False):
        for (name, known), color in zip(trace["depths"].items(), COLORS, strict=False):
            points = sorted((int(k), value) for k, value in known.items())
            axes.plot(*zip(*points, strict=True), line, marker="o", color=color, label=name if line == "-" else None)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    warm = f"; dashed: T = {traces[-1]['temperature']:g}" if len(traces) > 1 else ""
    axes.set_xlabel(f"k, drafted tokens a round (whole lines: greedy{warm})")
    axes.set_ylabel("tokens a round")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def _kinds(axes: Any, traces: list[dict[str, Any]]) -> None:
    """Bars: tokens a round of the chains by kind of prompt, greedy."""
    trace = traces[0]
    names = list(trace["depths"])
    width = 0.8 / len(names)
    for place, (name, color) in enumerate(zip(names, COLORS, strict=False)):
        values = [trace["drafters"][name]["by_category"][kind] for kind in trace["categories"]]
        at = [index - 0.4 + (place + 0.5) * width for index in range(len(values))]
        axes.bar(at, values, width=width * 0.9, color=color, label=name)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(trace["categories"])), trace["categories"])
    axes.set_ylabel("tokens a round, greedy")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, ncols=len(names))
