"""Bugs of other implementations of speculative decoding, tested on this one.

Seen in transformers 5.24.0's assisted generation: criteria and stop strings are asked once a block, and a draft model
is changed for good. In openvino-genai 2026.4.1.0: `min_new_tokens` fails with an end inside a block; and with a draft,
sampling is off the target's law from the second token on (`tests/target`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeGenerator
from tests.fakes import TableDecoder, near, table
from tests.fakes_models import load, network, saved

V = 12
TARGET = table(V, seed=3, spread=1.5)
DRAFT = near(TARGET, seed=4, spread=0.3)


def pair(acceptor: str = "match", *, slots: int = 1, draft: torch.Tensor = DRAFT) -> SpeculativeGenerator:
    return SpeculativeGenerator(
        TableDecoder(draft, slots=slots), TableDecoder(TARGET, slots=slots), k=4, acceptor=acceptor
    )


@pytest.mark.parametrize("drawn", [False, True])
def test_a_criterion_is_called_for_every_token_with_a_near_perfect_draft(drawn: bool) -> None:
    def seen(made: SpeculativeGenerator) -> tuple[list[list[int]], list[int]]:
        texts: list[list[int]] = []

        def criterion(ids: torch.Tensor, _: object) -> bool:
            texts.append(ids[0].tolist())
            return len(texts) == 11

        asked: dict[str, Any] = {"do_sample": drawn, "seed": 5, "max_new_tokens": 30, "eos_token_id": []}
        return texts, made.sample([[1, 2]], stopping_criteria_list=[criterion], **asked)[0].tolist()

    texts, text = seen(pair())
    assert [len(one) for one in texts] == list(range(3, 14)) and text == texts[-1]
    assert (texts, text) == seen(SpeculativeGenerator(None, TableDecoder(TARGET)))


@pytest.mark.parametrize("drawn", [False, True])
def test_min_tokens_suppresses_an_end_id_inside_a_block(drawn: bool) -> None:
    """The draft proposes the end everywhere, also after the minimum number of tokens."""
    asked: dict[str, Any] = {"do_sample": drawn, "seed": 2, "max_new_tokens": 20, "eos_token_id": 7, "min_tokens": 6}
    eager = DRAFT.clone()
    eager[..., 7] += 4
    plain = SpeculativeGenerator(None, TableDecoder(TARGET)).sample([[1, 2]], **asked).tolist()
    for draft in (DRAFT, eager):
        assert pair(draft=draft).sample([[1, 2]], **asked).tolist() == plain
    assert 7 not in plain[0][2:8]


def test_speculation_leaves_the_draft_model_unchanged(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(40)}
    draft, target = (load(saved(network(layers=1), tmp_path / name, words=words)) for name in ("draft", "target"))
    before = {name: value.clone() for name, value in draft.body.named_parameters()}
    said = (draft.config, draft.options)
    made = SpeculativeGenerator(draft, target, k=3, acceptor="reject")
    asked: dict[str, Any] = {"top_k": 3, "temperature": 0.7, "repetition_penalty": 1.3, "min_tokens": 2}
    made.sample([[1, 2]], do_sample=True, max_new_tokens=8, eos_token_id=5, stop_strings=None, **asked)
    assert (draft.config, draft.options) == said
    after = dict(draft.body.named_parameters())
    assert before and all(torch.equal(value, after[name]) for name, value in before.items())
