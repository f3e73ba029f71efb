"""Report of an experiment: one self-contained HTML page, and the same as Markdown.

Charts are SVG and need matplotlib (the extra ``plots``). Rows are also written as Parquet and JSON lines. The figures
are computed in `definitions.py`.
"""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.core.errors import StorageError
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.experiments.definitions import Acceptance, Draft
from paceline.experiments.statistics import length_interval, speedup_interval
from paceline.experiments.store import CellResult, Row, Store, flat_rows

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:13px;margin:1rem 0;display:block;overflow-x:auto}
td,th{border-bottom:1px solid #ddd;padding:.25rem .6rem;text-align:left;white-space:nowrap}
figure{margin:1.5rem 0}svg{max-width:100%;height:auto}.lossy{color:#b00}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}svg{background:#fff}}"""

Table = tuple[str, list[str], list[list[str]]]
"""Heading, column names, and rows."""


def html_report(name: str, results: Sequence[CellResult]) -> str:
    """The page. Pictures are inline where matplotlib is installed, which is said where it is not."""
    drawn, facts = list[tuple[str, str, str]](), list(_facts(results))
    if find_spec("matplotlib") is None:
        facts.append("There are no pictures, because matplotlib is not installed: pip install 'paceline[experiments]'.")
    else:
        drawn += _pictures(results)
    parts = [f"<h1>{html.escape(name)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in facts)]
    if warnings := _warnings(results):
        parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in warnings) + "</ul>")
    for heading, columns, rows in _tables(results):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{html.escape(heading)}</h2><table><tr>{head}</tr>{body}</table>")
    parts += [
        f"<figure><h2>{html.escape(heading)}</h2>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
        for heading, caption, svg in drawn
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def markdown_report(name: str, results: Sequence[CellResult]) -> str:
    lines = [f"# {name}", ""]
    for fact in _facts(results):
        lines += [fact, ""]
    lines += [f"- {line}" for line in _warnings(results)]
    for heading, columns, rows in _tables(results):
        lines += ["", f"## {heading}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _facts(results: Sequence[CellResult]) -> Iterator[str]:
    if not results:
        return
    source = results[0].provenance
    yield (
        f"paceline {source.get('paceline_version')} at {source.get('git_commit') or 'no commit'}, torch "
        f"{source.get('torch')}, {source.get('processor')}, {source.get('cores')} cores, {source.get('time')}."
    )
    loads = [float(str(result.provenance["load"])) for result in results if "load" in result.provenance]
    cores = int(str(source.get("cores") or 1))
    if loads and max(loads) > cores + 0.5:
        yield (
            f"The machine was busy: its load was up to {max(loads):.1f} on {cores} cores. Counts of tokens do not "
            "depend on that; times do, and speedups, whose two sides took turns, less so."
        )


def _warnings(results: Sequence[CellResult]) -> list[str]:
    lines = dict.fromkeys(line for result in results for line in result.warnings)
    lossy = {str(r.names["acceptor"]) for r in results if r.error is None and not r.totals["lossless"]}
    if lossy:
        lines[f"LOSSY: with {', '.join(sorted(lossy))} texts do not follow the target's distribution"] = None
    unlike = [r for r in results if any(row["same_tokens_as_plain"] is False for row in r.rows)]
    for result in (r for r in unlike if r.names["acceptor"] == "match"):
        lines[f"texts of {_label(result)} are not those of plain decoding: report this, with the configuration"] = None
    return list(lines)


def _tables(results: Sequence[CellResult]) -> Iterator[Table]:
    good = [result for result in results if result.error is None]
    rows = []
    for result in good:
        figures, speed = acceptance_of(result.rows), speedup_interval(result)
        rows.append(
            [
                str(result.names["target"]),
                _label(result),
                str(result.names["prompt_set"]),
                str(length_interval(result.rows)),
                f"{figures.draft_acceptance_rate:.3f}",
                f"{figures.conditional_acceptance_rate:.3f}",
                f"{result.totals['tokens_per_second']:.1f}",
                "" if speed is None else str(speed),
            ]
        )
    names = ["target", "drafter", "prompts", "mean acceptance length", "accepted of drafted", "of tested", "tokens/s"]
    yield "Cells", [*names, "speedup"], rows
    categories = sorted({name for result in good for name in by_category(result)})
    if len(categories) > 1:
        table = []
        for result in good:
            groups = by_category(result)
            cells = [f"{length_interval(groups[name]).value:.2f}" if name in groups else "" for name in categories]
            table.append([_label(result), *cells])
        yield "Mean acceptance length by category", ["drafter", *categories], table
    if failed := [result for result in results if result.error is not None]:
        yield "Failed", ["cell", "error"], [[_label(result), str(result.error)] for result in failed]


def write_reports(store: Store, name: str, results: Sequence[CellResult]) -> list[Path]:
    """Write ``report.md`` and ``report.html``, or raise StorageError."""
    return [
        store.write("report.md", markdown_report(name, results)),
        store.write("report.html", html_report(name, results)),
    ]


Draw = Callable[[Any], None]


def _pictures(results: Sequence[CellResult]) -> Iterator[tuple[str, str, str]]:
    """Heading, caption and SVG of all charts that these cells have figures for."""
    good = [result for result in results if result.error is None]
    drafted = [result for result in good if any(row["num_drafts"] for row in result.rows)]
    if not drafted:
        return
    charts: list[tuple[str, str, Draw]] = [
        (
            "Acceptance by position, unconditional",
            "Drafts whose token at this position was accepted, over all drafts.",
            lambda axes: _positions(axes, drafted, lambda place: place.unconditional),
        ),
        (
            "Acceptance by position, conditional",
            "Of the drafts that were right up to here, those whose token at this position was accepted.",
            lambda axes: _positions(axes, drafted, lambda place: place.conditional),
        ),
        (
            "Accepted tokens of a draft",
            "Share of drafts of which so many tokens were accepted.",
            lambda axes: _histogram(axes, drafted),
        ),
        (
            "Mean acceptance length by category",
            "The target's own token included; bars: 95 % bootstrap intervals over prompts.",
            lambda axes: _by_category(axes, drafted),
        ),
        (
            "Cost of a round",
            "Seconds of a cell by where they went. Draft and target in one graph count as verifying.",
            lambda axes: _costs(axes, good),
        ),
        (
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
            charts.append((heading, caption, _line_plot(lines, name)))
    yield from ((heading, caption, _svg(draw)) for heading, caption, draw in charts)


def _svg(draw: Draw) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

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
    return svg[svg.index("<svg") :]


def _label(result: CellResult, *, without: str = "") -> str:
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
        figures = [figure(place) for place in places]
        axes.plot(range(1, len(places) + 1), figures, marker="o", ms=3, label=_label(result))
    axes.set(xlabel="position in the draft", ylabel="accepted", ylim=(0, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _histogram(axes: Any, results: Sequence[CellResult]) -> None:
    for result in results:
        counts = acceptance_of(result.rows).histogram
        axes.plot(
            range(len(counts)), [n / max(1, sum(counts)) for n in counts], drawstyle="steps-mid", label=_label(result)
        )
    axes.set(xlabel="accepted tokens", ylabel="share of drafts")
    axes.xaxis.get_major_locator().set_params(integer=True)


def by_category(result: CellResult) -> dict[str, list[Row]]:
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
        axes.errorbar(places, values, yerr=errors, fmt="o", ms=3, lw=1, label=_label(result))
    axes.set(ylabel="mean acceptance length", xticks=range(len(names)), xticklabels=names)


def _costs(axes: Any, results: Sequence[CellResult]) -> None:
    left = [0.0] * len(results)
    for name in ("prefill_seconds", "draft_seconds", "verify_seconds", "host_seconds"):
        values = [float(result.totals[name]) for result in results]
        axes.barh(range(len(results)), values, left=left, label=name.removesuffix("_seconds"))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set(xlabel="seconds", yticks=range(len(results)))
    axes.set_yticklabels([_label(result) for result in results], fontsize=6)
    axes.invert_yaxis()


def _throughput(axes: Any, results: Sequence[CellResult]) -> None:
    for result in results:
        speed = result.totals["tokens_per_second"]
        axes.plot([speed / int(str(result.names["batch_size"]))], [speed], "o", ms=4, label=_label(result))
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
        lines.setdefault(_label(result, without=name), []).append((float(str(x)), one.value, one.low, one.high))
    return {key: sorted(points) for key, points in lines.items()}


def _line_plot(lines: Lines, name: str) -> Draw:
    def draw(axes: Any) -> None:
        for key, points in lines.items():
            x, value, low, high = zip(*points, strict=True)
            below = [v - one for v, one in zip(value, low, strict=True)]
            above = [one - v for v, one in zip(value, high, strict=True)]
            axes.errorbar(x, value, yerr=[below, above], marker="o", ms=3, lw=1, capsize=2, label=key)
        axes.set(xlabel=name.replace("_", " "), ylabel="length" if name == "temperature" else "speedup")
        if name != "temperature":
            axes.axhline(1, color="grey", lw=0.7, ls=":")

    return draw


def write_rows(folder: Path, results: Sequence[CellResult]) -> list[Path]:
    """Write ``results.jsonl``, and ``results.parquet`` if pyarrow is installed, or raise StorageError. -> the files"""
    rows = list(flat_rows(results))
    lines = folder / "results.jsonl"
    save_bytes(lines, [(json.dumps(row, default=str) + "\n").encode() for row in rows])
    parquet = folder / "results.parquet"
    return [lines, parquet] if rows and _write_parquet(parquet, rows) else [lines]


def _write_parquet(path: Path, rows: Sequence[Row]) -> bool:
    """Whether pyarrow is installed to write it."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return False
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns["k"] = [None if k is None else str(k) for k in columns["k"]]  # a number, several or "auto"
    buffer = pyarrow.BufferOutputStream()
    try:
        parquet.write_table(pyarrow.table(columns), buffer)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise StorageError(f"{path}: the folder cannot be created ({error}); give another one") from error
    save_bytes(path, [buffer.getvalue().to_pybytes()])
    return True


def acceptance_of(rows: Sequence[Row]) -> Acceptance:
    parts = [
        Acceptance(
            tuple(Draft(*pair) for pair in zip(row["per_step_drafted"], row["per_step_accepted"], strict=True)),
            row["num_rounds"],
            row["new_tokens"],
        )
        for row in rows
    ]
    return Acceptance.pooled(parts)


def summary(result: CellResult) -> Row:
    if result.error is not None:
        return {**result.names, "error": result.error}
    figures = acceptance_of(result.rows)
    same = [row["same_tokens_as_plain"] for row in result.rows if row["same_tokens_as_plain"] is not None]
    return {
        **result.names,
        "prompts": len(result.rows),
        "mean_acceptance_length": round(figures.mean_acceptance_length, 3),
        "tokens_per_round": round(figures.tokens_per_round, 3),
        "draft_acceptance_rate": round(figures.draft_acceptance_rate, 3),
        "tokens_per_second": round(result.totals["tokens_per_second"], 1),
        "speedup": None if result.totals["speedup"] is None else round(result.totals["speedup"], 3),
        "texts_unlike_plain": len(same) - sum(same) if same else None,
        "lossless": result.totals["lossless"],
        "error": None,
    }
