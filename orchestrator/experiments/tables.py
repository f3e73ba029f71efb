"""Results as tables: Parquet and JSON lines of all rows, and summaries of cells. Not here: pictures, and statistics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import StorageError
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.experiments.definitions import Acceptance, Draft
from paceline.experiments.store import CellResult, Row, flat_rows


def write_rows(folder: Path, results: Sequence[CellResult]) -> list[Path]:
    """``results.jsonl``, and ``results.parquet`` where pyarrow is installed. -> what was written

    Raises:
        StorageError: one of them cannot be written.
    """
    rows = list(flat_rows(results))
    lines = folder / "results.jsonl"
    save_bytes(lines, [(json.dumps(row, default=str) + "\n").encode() for row in rows])
    parquet = folder / "results.parquet"
    return [lines, parquet] if rows and _write_parquet(parquet, rows) else [lines]


def _write_parquet(path: Path, rows: Sequence[Row]) -> bool:
    """Whether pyarrow is there to write it."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return False
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns["k"] = [None if value is None else str(value) for value in columns["k"]]  # a number, a ladder or "auto"
    buffer = pyarrow.BufferOutputStream()
    try:
        parquet.write_table(pyarrow.table(columns), buffer)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise StorageError(f"{path} cannot be made: {error}") from error
    save_bytes(path, [buffer.getvalue().to_pybytes()])
    return True


def acceptance_of(rows: Sequence[Row]) -> Acceptance:
    """The acceptance of some rows together."""
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
    """One row of a cell: its names, and its figures or its error."""
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
