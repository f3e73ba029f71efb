"""Rounds of the slots in use, compiled by XLA: no token changes while requests join, leave and move."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import SpeculativeGenerator
from tests.decoder import batched
from tests.decoder.tiny import Workshop


@pytest.mark.parametrize("mode", [mode for mode in batched.MODES if "static" not in mode])
def test_tokens_are_those_of_one_graph_for_all_slots(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Those of one graph by XLA, and of plain decoding, eager; a round computes no more slots than it has to."""
    whole, made = (
        batched.generator(workshop, mode, tmp_path / str(len(buckets)), backend="xla", buckets=buckets)
        for buckets in ([4], [1, 2, 4])
    )
    plain = SpeculativeGenerator(None, workshop.decoder(), k=0)
    seen = batched.watch(monkeypatch, made.target)
    for setting in batched.SETTINGS:
        wanted = batched.texts(plain, setting)
        assert batched.texts(whole, setting) == wanted
        seen.clear()
        assert batched.texts(made, setting) == wanted
        assert [lines for lines, _ in seen] == [batched.bucket(seated) for _, seated in seen]
