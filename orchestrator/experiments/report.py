"""The report of an experiment: one HTML page that needs nothing from anywhere, and the same as Markdown.

Not here: pictures (`plots.py`), and the figures themselves (`definitions.py`, `tables.py`).
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.experiments.plots import Picture, by_category, label, pictures
from paceline.experiments.statistics import length_interval, speedup_interval
from paceline.experiments.store import CellResult, Store
from paceline.experiments.tables import acceptance_of

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:13px;margin:1rem 0;display:block;overflow-x:auto}
td,th{border-bottom:1px solid #ddd;padding:.25rem .6rem;text-align:left;white-space:nowrap}
figure{margin:1.5rem 0}svg{max-width:100%;height:auto}.lossy{color:#b00}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}svg{background:#fff}}"""

Table = tuple[str, list[str], list[list[str]]]
"""A heading, names of columns, and rows."""


def html_report(name: str, results: Sequence[CellResult]) -> str:
    """The page. Pictures are inline where matplotlib is installed, which is said where it is not."""
    drawn, missing = _drawn(results)
    parts = [f"<h1>{html.escape(name)}</h1>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in (*_facts(results), *missing)]
    if warnings := _warnings(results):
        parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in warnings) + "</ul>")
    for heading, columns, rows in _tables(results):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{html.escape(heading)}</h2><table><tr>{head}</tr>{body}</table>")
    parts += [
        f"<figure><h2>{html.escape(p.heading)}</h2>{p.svg}<figcaption>{html.escape(p.caption)}</figcaption></figure>"
        for p in drawn
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def markdown_report(name: str, results: Sequence[CellResult]) -> str:
    """The same without pictures."""
    lines = [f"# {name}", ""]
    for fact in _facts(results):
        lines += [fact, ""]
    lines += [f"- {line}" for line in _warnings(results)]
    for heading, columns, rows in _tables(results):
        lines += ["", f"## {heading}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _drawn(results: Sequence[CellResult]) -> tuple[list[Picture], list[str]]:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return [], ["There are no pictures, because matplotlib is not installed: pip install 'paceline[experiments]'."]
    return pictures(results), []


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
            "depend on that; times do, and speed-ups, whose two sides took turns, less so."
        )


def _warnings(results: Sequence[CellResult]) -> list[str]:
    lines = dict.fromkeys(line for result in results for line in result.warnings)
    lossy = {str(r.names["acceptor"]) for r in results if r.error is None and not r.totals["lossless"]}
    if lossy:
        lines[f"LOSSY: with {', '.join(sorted(lossy))} texts do not follow the target's distribution"] = None
    unlike = [r for r in results if any(row["same_tokens_as_plain"] is False for row in r.rows)]
    for result in (r for r in unlike if r.names["acceptor"] == "match"):
        lines[f"texts of {label(result)} are not those of plain decoding: report this, with the configuration"] = None
    return list(lines)


def _tables(results: Sequence[CellResult]) -> Iterator[Table]:
    good = [result for result in results if result.error is None]
    rows = []
    for result in good:
        figures, speed = acceptance_of(result.rows), speedup_interval(result)
        rows.append(
            [
                str(result.names["target"]),
                label(result),
                str(result.names["prompt_set"]),
                str(length_interval(result.rows)),
                f"{figures.draft_acceptance_rate:.3f}",
                f"{figures.conditional_acceptance_rate:.3f}",
                f"{result.totals['tokens_per_second']:.1f}",
                "" if speed is None else str(speed),
            ]
        )
    names = ["target", "drafter", "prompts", "mean acceptance length", "accepted of drafted", "of tested", "tokens/s"]
    yield "Cells", [*names, "speed-up"], rows
    categories = sorted({name for result in good for name in by_category(result)})
    if len(categories) > 1:
        table = []
        for result in good:
            groups = by_category(result)
            cells = [f"{length_interval(groups[name]).value:.2f}" if name in groups else "" for name in categories]
            table.append([label(result), *cells])
        yield "Mean acceptance length by category", ["drafter", *categories], table
    if failed := [result for result in results if result.error is not None]:
        yield "Failed", ["cell", "error"], [[label(result), str(result.error)] for result in failed]


def write_reports(store: Store, name: str, results: Sequence[CellResult]) -> list[Path]:
    """``report.md`` and ``report.html``.

    Raises:
        StorageError: one cannot be written.
    """
    return [
        store.write("report.md", markdown_report(name, results)),
        store.write("report.html", html_report(name, results)),
    ]
