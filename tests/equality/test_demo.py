"""The demo pair of examples/pycode, compiled: trained weights have other near-ties than random ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from tests import shipped
from tests.equality.settings import SETTINGS, assert_rolled_back, plain, run, texts
from tests.fakes_models import generated

NEW = 48
Pair = tuple[SamplingDecoder, SamplingDecoder]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The first of them, of unequal lengths."""
    found = shipped.prompts(slice(4), longest=None)
    assert len({len(ids) for ids in found}) > 1
    return found


@pytest.fixture(scope="module")
def pairs(compile_cache: None) -> dict[str, Pair]:
    """Draft and target in both formats, as compiled for two slots."""
    shape: dict[str, Any] = {"batch_size": 2, "n_positions": 256, "context_length_estimate": 64}
    made: dict[str, Pair] = {}
    for amp in ("f32", "bf16"):
        draft, target = (
            AutoDecoder.from_pretrained(shipped.FOLDER / role, amp=amp, **shape) for role in ("draft", "target")
        )
        draft.on_graph = target.on_graph = lambda _event: None
        made[amp] = (draft, target)
    return made


@pytest.mark.parametrize(("amp", "setting"), [("f32", "greedy"), ("f32", "hot and cut"), ("bf16", "cool")])
def test_the_demo_pair_changes_no_token(
    pairs: dict[str, Pair], prompts: list[list[int]], amp: str, setting: str
) -> None:
    draft, target = pairs[amp]
    known = plain(target, SETTINGS[setting], width=5 if amp == "f32" else 1, prompts=prompts, new=NEW)
    for source in (draft, "ngram") if amp == "f32" else (draft,):  # each graph of eight layers takes long to compile
        result = run(SpeculativeGenerator(source, target, k=4), SETTINGS[setting], prompts=prompts, new=NEW)
        assert texts(result) == known
        assert_rolled_back(result)


def test_greedy_tokens_equal_hugging_face(pairs: dict[str, Pair], prompts: list[list[int]]) -> None:
    model = LlamaForCausalLM.from_pretrained(shipped.FOLDER / "target", dtype=torch.float32)
    expected = [generated(model, prompt, max_new_tokens=NEW) for prompt in prompts[:3]]
    assert plain(pairs["f32"][1], {}, width=5, prompts=prompts[:3], new=NEW) == expected
