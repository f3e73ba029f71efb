"""Logits processors see what plain decoding shows them, so drafting changes no token under any of them."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import LogitsProcessorList

from paceline import SpeculativeGenerator
from tests.decoder.tiny import Workshop
from tests.equality.settings import NEW, PROCESSORS, PROMPTS, SETTINGS, Growing, Setting, plain, run, stumbling, texts

# A processor with a memory must see one text at a time: a batch would interleave them.
ONE = PROMPTS[:1]


@pytest.mark.parametrize(("k", "setting"), list(zip([1, 2, 8], SETTINGS, strict=True)))
def test_a_stateful_processor_gives_the_same_tokens(workshop: Workshop, k: int, setting: str) -> None:
    target, make = workshop.decoder(), PROCESSORS["both and one with a memory"]
    asked: Setting = {**SETTINGS[setting], **make()}
    known = plain(target, asked, prompts=ONE)
    again: Setting = {**SETTINGS[setting], **make()}  # it starts afresh
    assert texts(run(SpeculativeGenerator(stumbling(known), target, k=k), again, prompts=ONE)) == known


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_processor_is_called_once_for_every_token_and_never_on_a_rejected_text(
    workshop: Workshop, backend: str
) -> None:
    draft, target = workshop.pair(backend=backend)
    seen = Growing()
    result = run(
        SpeculativeGenerator(draft, target, k=4), {**SETTINGS["cool"], "logits_processor": [seen]}, prompts=ONE
    )
    text = texts(result)[0]
    assert 0 < result.statistics.num_accepted_tokens < result.statistics.num_draft_tokens
    assert seen.seen == [text[: len(ONE[0]) + i] for i in range(NEW)]


@pytest.mark.parametrize(("by", "setting"), list(zip(["id", "string", "criterion"], SETTINGS, strict=True)))
def test_processors_see_nothing_after_the_end_of_a_text(workshop: Workshop, by: str, setting: str) -> None:
    """Two texts, one after the other, and one processor that remembers what it saw of both."""
    target, prompts = workshop.decoder(slots=1), PROMPTS[:2]
    known = plain(target, {**SETTINGS[setting], "logits_processor": [Growing()]}, prompts=prompts)
    stop = known[0][len(prompts[0]) + 3]  # inside of the first window
    at = Ends(stop)
    ending: Setting = {
        "id": {"eos_token_id": [stop]},
        "string": {"stop_strings": f"<{stop}>", "tokenizer": Spelled()},
        "criterion": {"stopping_criteria_list": [at]},
    }[by]
    alone = plain(target, {**SETTINGS[setting], **ending, "logits_processor": [Growing()]}, prompts=prompts)
    assert len(alone[0]) < len(known[0])
    asked_alone, at.seen = at.seen, []

    def oracle(tokens: list[int]) -> list[int]:
        text = next((text for text in known + alone if text[: len(tokens)] == tokens), tokens)
        return text[len(tokens) :]

    asked: Setting = {**SETTINGS[setting], **ending, "logits_processor": [Growing()]}
    result = run(SpeculativeGenerator(oracle, target, k=4), asked, prompts=prompts)
    assert texts(result) == alone and at.seen == asked_alone
    assert result.statistics.num_accepted_tokens > 0


class Ends:
    """A stopping criterion that ends a text with an id, and writes down what it is shown."""

    def __init__(self, token: int) -> None:
        self._token, self.seen = token, list[list[int]]()

    def __call__(self, ids: torch.Tensor, scores: object) -> bool:
        self.seen.append(ids[0].tolist())
        return self.seen[-1][-1] == self._token


class Spelled:
    """A tokenizer that names ids."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def test_a_list_of_processors_is_applied_in_order(workshop: Workshop) -> None:
    target = workshop.decoder()
    together = LogitsProcessorList([Growing()])
    known = plain(target, {"logits_processor": [Growing()]}, prompts=ONE)
    assert plain(target, {"logits_processor": together}, prompts=ONE) == known
