"""Families of every choice on two ranks: the tokens of the whole model. With drafters: the equality matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.decoder.families import FAMILIES, NEAR, network
from tests.decoder.tiny import load

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 2, [5, 5]]  # of unequal length; the longer one is longer than a sliding window
SETTINGS: list[dict[str, object]] = [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NEAR])
def test_a_family_on_two_ranks_keeps_the_tokens(tmp_path: Path, name: str) -> None:
    network(name).save_pretrained(tmp_path)
    found = []
    for degree in (1, 2):
        decoder = load(tmp_path, batch_size=2, context_length_estimate=[16], tp_degree=degree)
        found.append([decoder.sample(PROMPTS, max_new_tokens=8, **asked).tolist() for asked in SETTINGS])  # type: ignore[arg-type, union-attr]
        if degree > 1:
            decoder.close()
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
