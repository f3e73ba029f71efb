"""The pictures of a report, as SVG texts that need nothing from anywhere. Not here: which figures they show.

Needs matplotlib (the extra ``plots``).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigurationError
from paceline.experiments.statistics import length_interval, speedup_interval
from paceline.experiments.store import CellResult, Row
from paceline.experiments.tables import acceptance_of


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a report: a heading, what it shows in a sentence, and the SVG."""

    heading: str
    caption: str
    svg: str


Draw = Callable[[Any], None]


def pictures(results: Sequence[CellResult]) -> list[Picture]:
    """All pictures that these cells have figures for.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    good = [result for result in results if result.error is None]
    drafted = [result for result in good if any(row["num_drafts"] for row in result.rows)]
    if not drafted:
        return []
    pictures = [
        _picture(
            "Acceptance by position, unconditional",
            "Drafts whose token at this position was accepted, over all drafts.",
            lambda axes: _positions(axes, drafted, lambda place: place.unconditional),
        ),
        _picture(
            "Acceptance by position, conditional",
            "Of the drafts that were right up to here, those whose token at this position was accepted.",
            lambda axes: _positions(axes, drafted, lambda place: place.conditional),
        ),
        _picture(
            "Accepted tokens of a draft",
            "Share of drafts of which so many tokens were accepted.",
            lambda axes: _histogram(axes, drafted),
        ),
        _picture(
            "Mean acceptance length by category",
            "The target's own token included; bars: 95 % bootstrap intervals over prompts.",
            lambda axes: _by_category(axes, drafted),
        ),
        _picture(
            "Cost of a round",
            "Seconds of a cell by where they went. Draft and target in one graph count as verifying.",
            lambda axes: _costs(axes, good),
        ),
        _picture(
            "Throughput against interactivity",
            "Tokens per second of the whole batch against those of one user; every point is a cell.",
            lambda axes: _throughput(axes, good),
        ),
    ]
    for heading, caption, name in (
        ("Mean acceptance length against temperature", "Bars: 95 % intervals over prompts.", "temperature"),
        ("Speed-up against depth", "Over plain decoding, in turns on the same prompts; bars: 95 % intervals.", "k"),
        ("Speed-up against batch size", "Over plain decoding at the same batch size.", "batch_size"),
    ):
        lines = _lines(drafted, name)
        if any(len(points) > 1 for points in lines.values()):
            pictures.append(_picture(heading, caption, _line_plot(lines, name)))
    return pictures


def _picture(heading: str, caption: str, draw: Draw) -> Picture:
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("pictures need matplotlib: pip install 'paceline[experiments]'") from error
    with matplotlib.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "path", "font.size": 9}):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return Picture(heading, caption, svg[svg.index("<svg") :])


def label(result: CellResult, *, without: str = "") -> str:
    """A cell in a legend, without what is on the axis."""
    names = result.names
    parts = [str(names["drafter"])]
    parts += [f"k={names['k']}"] if names["k"] is not None and without != "k" else []
    parts += [str(names["sampling"])] if without != "temperature" else []
    parts += [f"batch {names['batch_size']}"] if without != "batch_size" else []
    parts += [str(names["acceptor"])] if names["acceptor"] != "match" else []
    return ", ".join(parts)


def _positions(axes: Any, results: Sequence[CellResult], figure: Callable[[Any], float]) -> None:
    for result in results:
        places = acceptance_of(result.rows).positions
        axes.plot(range(1, len(places) + 1), [figure(place) for place in places], marker="o", ms=3, label=label(result))
    axes.set(xlabel="position in the draft", ylabel="accepted", ylim=(0, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _histogram(axes: Any, results: Sequence[CellResult]) -> None:
    for result in results:
        counts = acceptance_of(result.rows).histogram
        axes.plot(
            range(len(counts)), [n / max(1, sum(counts)) for n in counts], drawstyle="steps-mid", label=label(result)
        )
    axes.set(xlabel="accepted tokens", ylabel="share of drafts")
    axes.xaxis.get_major_locator().set_params(integer=True)


def by_category(result: CellResult) -> dict[str, list[Row]]:
    """Rows of a cell by their category."""
    categories: dict[str, list[Row]] = {}
    for row in result.rows:
        categories.setdefault(row["category"], []).append(row)
    return categories


def _by_category(axes: Any, results: Sequence[CellResult]) -> None:
    names = sorted({name for result in results for name in by_category(result)})
    for number, result in enumerate(results):
        groups = by_category(result)
        shown = [(i, length_interval(groups[name])) for i, name in enumerate(names) if name in groups]
        places = [i + (number / max(1, len(results)) - 0.5) * 0.6 for i, _ in shown]
        values = [one.value for _, one in shown]
        errors = [[v.value - v.low for _, v in shown], [v.high - v.value for _, v in shown]]
        axes.errorbar(places, values, yerr=errors, fmt="o", ms=3, lw=1, label=label(result))
    axes.set(ylabel="mean acceptance length", xticks=range(len(names)), xticklabels=names)


def _costs(axes: Any, results: Sequence[CellResult]) -> None:
    left = [0.0] * len(results)
    for name in ("prefill_seconds", "draft_seconds", "verify_seconds", "host_seconds"):
        values = [float(result.totals[name]) for result in results]
        axes.barh(range(len(results)), values, left=left, label=name.removesuffix("_seconds"))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set(xlabel="seconds", yticks=range(len(results)))
    axes.set_yticklabels([label(result) for result in results], fontsize=6)
    axes.invert_yaxis()


def _throughput(axes: Any, results: Sequence[CellResult]) -> None:
    for result in results:
        speed = result.totals["tokens_per_second"]
        axes.plot([speed / int(str(result.names["batch_size"]))], [speed], "o", ms=4, label=label(result))
    axes.set(xlabel="tokens per second of one user", ylabel="tokens per second in all")


Lines = Mapping[str, Sequence[tuple[float, float, float, float]]]


def _lines(results: Sequence[CellResult], name: str) -> Lines:
    """Points (x, value, low, high) of cells that differ in nothing but ``name``."""
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for result in results:
        x = result.names[name]
        one = length_interval(result.rows) if name == "temperature" else speedup_interval(result)
        if one is None or x is None or not str(x).replace(".", "", 1).isdigit():
            continue
        lines.setdefault(label(result, without=name), []).append((float(str(x)), one.value, one.low, one.high))
    return {key: sorted(points) for key, points in lines.items()}


def _line_plot(lines: Lines, name: str) -> Draw:
    def draw(axes: Any) -> None:
        for key, points in lines.items():
            x, value, low, high = zip(*points, strict=True)
            below = [v - one for v, one in zip(value, low, strict=True)]
            above = [one - v for v, one in zip(value, high, strict=True)]
            axes.errorbar(x, value, yerr=[below, above], marker="o", ms=3, lw=1, capsize=2, label=key)
        axes.set(xlabel=name.replace("_", " "), ylabel="length" if name == "temperature" else "speed-up")
        if name != "temperature":
            axes.axhline(1, color="grey", lw=0.7, ls=":")

    return draw
