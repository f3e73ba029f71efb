"""Report of an experiment: one self-contained HTML page, and the same as Markdown.

Rows are also written as Parquet and JSON lines. The figures are computed in `definitions.py`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.core.errors import StorageError
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.experiments.definitions import Acceptance, Draft
from paceline.experiments.statistics import length_interval, speedup_interval
from paceline.experiments.store import CellResult, Row, Store, flat_rows

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:13px;margin:1rem 0;display:block;overflow-x:auto}
td,th{border-bottom:1px solid #ddd;padding:.25rem .6rem;text-align:left;white-space:nowrap}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}}"""

Table = tuple[str, list[str], list[list[str]]]
"""Heading, column names, and rows."""


def html_report(name: str, results: Sequence[CellResult]) -> str:
    parts = [f"<h1>{html.escape(name)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in _facts(results))]
    if warnings := _warnings(results):
        parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in warnings) + "</ul>")
    for heading, columns, rows in _tables(results):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{html.escape(heading)}</h2><table><tr>{head}</tr>{body}</table>")
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
    yield from _positions([result for result in good if any(row["num_drafts"] for row in result.rows)])
    categories = sorted({name for result in good for name in _by_category(result)})
    if len(categories) > 1:
        table = []
        for result in good:
            groups = _by_category(result)
            cells = [f"{length_interval(groups[name]).value:.2f}" if name in groups else "" for name in categories]
            table.append([_label(result), *cells])
        yield "Mean acceptance length by category", ["drafter", *categories], table
    parts = ("prefill", "draft", "verify", "host")
    seconds = [[_label(r), *(f"{r.totals[f'{part}_seconds']:.2f}" for part in parts)] for r in good]
    yield "Seconds by part; a draft in one graph with its target counts as verify", ["drafter", *parts], seconds
    if failed := [result for result in results if result.error is not None]:
        yield "Failed", ["cell", "error"], [[_label(result), str(result.error)] for result in failed]


def _positions(results: Sequence[CellResult]) -> Iterator[Table]:
    placed = [(_label(result), acceptance_of(result.rows).positions) for result in results]
    depth = max((len(places) for _, places in placed), default=0)
    for what, shares in (
        ("of all drafts", [[place.unconditional for place in places] for _, places in placed]),
        ("of those right up to here", [[place.conditional for place in places] for _, places in placed]),
    ):
        table = [
            [label, *(f"{share:.3f}" for share in row), *[""] * (depth - len(row))]
            for (label, _), row in zip(placed, shares, strict=True)
        ]
        if depth:
            yield f"Acceptance by position, {what}", ["drafter", *map(str, range(1, depth + 1))], table


def write_reports(store: Store, name: str, results: Sequence[CellResult]) -> list[Path]:
    """Write ``report.md`` and ``report.html``, or raise StorageError."""
    return [
        store.write("report.md", markdown_report(name, results)),
        store.write("report.html", html_report(name, results)),
    ]


def _label(result: CellResult) -> str:
    names = result.names
    parts = [str(names["drafter"]), *([] if names["k"] is None else [f"k={names['k']}"])]
    parts += [str(names["sampling"]), f"batch {names['batch_size']}"]
    parts += [str(names["acceptor"])] if names["acceptor"] != "match" else []
    return ", ".join(parts)


def _by_category(result: CellResult) -> dict[str, list[Row]]:
    categories: dict[str, list[Row]] = {}
    for row in result.rows:
        categories.setdefault(row["category"], []).append(row)
    return categories


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
