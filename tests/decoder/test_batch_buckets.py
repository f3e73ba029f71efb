"""Rounds of the slots in use: graphs for 1, 2 and 4 of four slots, which change no token."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from paceline import SpeculativeGenerator
from tests.decoder import batched
from tests.decoder.tiny import Workshop


@pytest.mark.parametrize("mode", batched.MODES)
def test_tokens_are_those_of_one_graph_for_all_slots(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Requests join and leave, so that rounds take more slots and fewer; every text is also that of plain decoding."""
    whole, made = (
        batched.generator(workshop, mode, tmp_path / str(len(buckets)), backend="eager", buckets=buckets)
        for buckets in ([4], [1, 2, 4])
    )
    plain = SpeculativeGenerator(None, workshop.decoder(), k=0)
    seen = batched.watch(monkeypatch, made.target)
    for setting in batched.SETTINGS:
        wanted = batched.texts(whole, setting)
        assert wanted == batched.texts(plain, setting)
        seen.clear()
        assert batched.texts(made, setting) == wanted
        assert [lines for lines, _ in seen] == [batched.bucket(seated) for _, seated in seen]
        runs = [size for size, _ in groupby(lines for lines, _ in seen)]
        assert runs[0] == 4 and runs[-3:] == [1, 2, 1]
