"""Rounds of the slots in use, compiled by XLA: no token changes while requests join, leave and move."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.decoder import batched
from tests.decoder.tiny import Workshop


@pytest.mark.parametrize("mode", [mode for mode in batched.MODES if "static" not in mode])
def test_batch_buckets_keep_the_tokens_of_one_graph(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Those of one graph by XLA, and of plain decoding, eager."""
    batched.check_buckets(workshop, mode, tmp_path, monkeypatch, backend="xla")
