"""Things that change no text, beyond the matrix: its batch, its place in the queue, narrower graphs.

And where equality needs one width of graphs, or is that of a seed alone; and what logits processors see.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.sampling import row_seed
from tests.decoder.tiny import Workshop, fresh
from tests.equality.settings import (
    NEW,
    PROMPTS,
    SETTINGS,
    Growing,
    Setting,
    assert_rolled_back,
    plain,
    run,
    stumbling,
    texts,
)


@cache
def expected(workshop: Workshop, backend: str, setting: str) -> list[list[int]]:
    """Plain decoding, one token at a time."""
    return plain(workshop.decoder(backend=backend), SETTINGS[setting])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_text_does_not_depend_on_the_batch_it_is_in(workshop: Workshop, backend: str, setting: str) -> None:
    draft, target = workshop.pair(backend=backend, slots=1)
    generator, known = SpeculativeGenerator(draft, target, k=4), expected(workshop, backend, setting)
    assert texts(run(generator, SETTINGS[setting])) == known  # four requests queue for one slot
    for row, prompt in enumerate(PROMPTS):
        alone = {**SETTINGS[setting], "seed": row_seed(int(str(SETTINGS[setting].get("seed", 0))), row)}
        assert texts(run(generator, alone, prompts=[prompt])) == [known[row]]


def test_settings_seeds_and_formats_give_different_texts(workshop: Workshop) -> None:
    seen = [expected(workshop, "eager", setting) for setting in SETTINGS]
    seen += [plain(workshop.decoder(), {**SETTINGS["cool"], "seed": 12})]
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    seen = [plain(workshop.decoder(amp=amp), SETTINGS["cool"], new=100) for amp in ("f32", "bf16", "f16")]
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize(("backend", "setting"), [("eager", "greedy"), ("native", "hot and cut")])
def test_rounds_without_a_proposal_may_take_a_narrower_graph(workshop: Workshop, backend: str, setting: str) -> None:
    target, known = workshop.decoder(backend=backend), expected(workshop, backend, setting)

    def now_and_then(tokens: list[int]) -> list[int]:
        return stumbling(known)(tokens) if len(tokens) % 4 else []

    for draft in (workshop.decoder("draft", backend=backend), now_and_then):
        generator = SpeculativeGenerator(draft, target, k=4, exact=False)
        assert texts(run(generator, SETTINGS[setting])) == known
        one = [[*PROMPTS[0]]]  # one request: when it is not drafted for, nobody is
        assert texts(run(generator, SETTINGS[setting], prompts=one)) == known[:1]
    assert ("verify", 1) in {(key.kind, key.rows) for key, _ in target._steps}


def test_decoding_reaches_the_last_position(workshop: Workshop) -> None:
    draft, target = workshop.pair()
    known = plain(target, SETTINGS["cool"], new=1000)
    assert {len(text) for text in known} == {target.n_positions}
    for k in (1, 8):
        assert texts(run(SpeculativeGenerator(draft, target, k=k), SETTINGS["cool"], new=1000)) == known


def test_a_model_that_drafts_for_itself_is_always_accepted(workshop: Workshop) -> None:
    target = workshop.decoder()
    own = fresh(workshop.checkpoint("target"), batch_size=4)
    for setting in SETTINGS.values():
        for k in (1, 4):
            statistics = run(SpeculativeGenerator(own, target, k=k), setting, new=k * 5 + 1).statistics
            assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("amp", "k"), [("bf16", 4), ("f16", 1)])
def test_eager_keeps_the_tokens_at_one_width(workshop: Workshop, amp: str, k: int, setting: str) -> None:
    """Near-ties are common in 16 bits. On the native kernels all widths give the same bits: the matrix has them."""
    draft, target = workshop.pair(amp=amp)
    known = plain(target, SETTINGS[setting], width=k + 1)
    for source in (draft, "ngram", stumbling(known)):
        assert texts(run(SpeculativeGenerator(source, target, k=k), SETTINGS[setting])) == known  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_rejection_gives_the_same_text_for_the_same_seed(workshop: Workshop, backend: str, setting: str) -> None:
    draft, target = workshop.pair(backend=backend)
    generator = SpeculativeGenerator(draft, target, k=4, acceptor="reject")
    once, twice = (run(generator, SETTINGS[setting]) for _ in range(2))
    assert texts(once) == texts(twice)
    assert_rolled_back(once)
    if setting != "greedy":
        other = run(generator, {**SETTINGS[setting], "seed": 99})
        assert texts(other) != texts(once)


# A processor with a memory must see one text at a time: a batch would interleave them.
ONE = PROMPTS[:1]


@pytest.mark.parametrize(("k", "setting"), list(zip([1, 2, 8], SETTINGS, strict=True)))
def test_a_stateful_processor_gives_the_same_tokens(workshop: Workshop, k: int, setting: str) -> None:
    def asked() -> Setting:
        """With a processor that starts afresh."""
        more = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "logits_processor": [Growing()]}
        return {**SETTINGS[setting], **more}

    target = workshop.decoder()
    known = plain(target, asked(), prompts=ONE)
    assert texts(run(SpeculativeGenerator(stumbling(known), target, k=k), asked(), prompts=ONE)) == known


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
