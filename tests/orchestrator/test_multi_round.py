"""Several fused rounds in one call: the same rounds, the same tokens, and fewer calls from the host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import SpeculativeGenerator
from paceline.core.types import RoundReport
from paceline.engine import rounds
from paceline.engine.batch import MAX_CONSECUTIVE_ROUNDS
from paceline.outputs import GenerationResult
from paceline.target.verifier import CompiledVerifier
from tests import sampled
from tests.fakes import Checked, TableDecoder, near, table
from tests.fakes_text import Pieces

V = 12
TARGET = table(V, seed=3, spread=2.0)
DRAFT = near(TARGET, seed=4, spread=0.5)


def run(generator: SpeculativeGenerator, prompts: list[list[int]], seconds: float, **asked: object) -> GenerationResult:
    """A run with ``seconds`` for rounds in a row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "MULTI_ROUND_BUDGET_S", seconds)
        return sampled.run(generator, prompts, **asked)


def counts(done: GenerationResult) -> tuple[object, ...]:
    """All that a result holds but times."""
    s = done.statistics
    places = (s.num_draft_tokens_per_pos, s.num_accepted_tokens_per_pos)
    return done.sequences.tolist(), done.lengths, done.finish_reasons, s.num_rounds, s.new_tokens, places


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[RoundReport]]:
    """Fused rounds that the host received, call by call."""
    heard: list[list[RoundReport]] = []
    fused = CompiledVerifier.fused

    def listening(*given: object, **more: object) -> object:
        commit, reports = fused(*given, **more)  # type: ignore[arg-type]
        heard.append(reports)
        return commit, reports

    monkeypatch.setattr(CompiledVerifier, "fused", listening)
    return heard


@given(st.data())
def test_tokens_do_not_depend_on_the_rounds_per_call(data: st.DataObject) -> None:
    """Slots that wait, are free, end with an id or a length, draft nothing; buckets; drafts of short context."""
    slots, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    kv_buckets = data.draw(st.sampled_from([(64,), (16, 24, 64)]))
    short = data.draw(st.sampled_from([kv_buckets, (20,)]))
    prompt = st.lists(st.integers(0, V - 1), min_size=1, max_size=9)
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=4))
    asked: dict[str, object] = {
        "max_new_tokens": data.draw(st.integers(1, 60)),
        "eos_token_id": data.draw(st.lists(st.integers(0, V - 1), max_size=2)),
        "use_speculation": [data.draw(st.booleans()) for _ in prompts],
        "do_sample": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 9)),
    }

    def made() -> SpeculativeGenerator:
        draft = TableDecoder(DRAFT, slots=slots, kv_buckets=short)
        return Checked(draft, TableDecoder(TARGET, slots=slots, kv_buckets=kv_buckets), k=k)

    single, many = (run(made(), prompts, seconds, **asked) for seconds in (0.0, 60.0))
    assert counts(many) == counts(single)
    plain = TableDecoder(TARGET, slots=slots, kv_buckets=kv_buckets).sample(prompts, return_dict=True, **asked)  # type: ignore[arg-type]
    assert many.sequences.tolist() == plain.sequences.tolist()  # type: ignore[union-attr]


def test_rounds_per_call_are_limited(calls: list[list[RoundReport]]) -> None:
    target = TableDecoder(TARGET, kv_buckets=(256,))
    run(SpeculativeGenerator(TableDecoder(DRAFT, kv_buckets=(256,)), target, k=1), [[1]], 60.0, max_new_tokens=200)
    assert max(len(one) for one in calls) == MAX_CONSECUTIVE_ROUNDS


@pytest.mark.parametrize(
    "asked",
    [
        {"stop_strings": ["zz"], "tokenizer": Pieces([bytes([97 + i]) for i in range(V)])},
        {"stopping_criteria_list": [lambda *_: False]},
    ],
)
def test_token_observers_are_called_after_every_round(calls: list[list[RoundReport]], asked: dict[str, object]) -> None:
    generator = SpeculativeGenerator(TableDecoder(DRAFT), TableDecoder(TARGET), k=2)
    run(generator, [[1, 2, 3]], 60.0, max_new_tokens=30, **asked)
    assert calls and {len(one) for one in calls} == {1}


def test_an_end_id_ends_the_multi_round(calls: list[list[RoundReport]]) -> None:
    logits = table(60, seed=3)
    asked = {"max_new_tokens": 50, "do_sample": True}
    generator = SpeculativeGenerator(TableDecoder(near(logits, seed=4, spread=0.5)), TableDecoder(logits), k=2)
    text = run(generator, [[1, 2, 3]], 60.0, eos_token_id=[], **asked).sequences[0, 3:].tolist()
    last = next(token for place, token in enumerate(text) if place > 19 and token not in text[:place])
    calls.clear()
    done = run(generator, [[1, 2, 3]], 60.0, eos_token_id=[last], **asked)
    assert done.finish_reasons == ["stop"] and done.sequences[0, 3:].tolist() == text[: text.index(last) + 1]
    assert len(calls) == 1 and last in calls[0][-1].tokens[0]


def test_an_idle_slot_ends_no_multi_round(calls: list[list[RoundReport]]) -> None:
    """The text continues from token 0 and gains an id that would end it."""
    logits = table(60, seed=3)
    asked = {"max_new_tokens": 40, "do_sample": True}
    draft = near(logits, seed=4, spread=0.5)
    generator = SpeculativeGenerator(TableDecoder(draft, slots=2), TableDecoder(logits, slots=2), k=2)
    text = run(generator, [[1, 2, 3]], 60.0, eos_token_id=[], **asked).sequences[0].tolist()
    idle = {token for told in calls[0][1:-1] for token in told.tokens[1]}
    assert len(calls) == 1 and not idle <= set(text), "or nothing is shown"
    calls.clear()
    run(generator, [[1, 2, 3]], 60.0, eos_token_id=sorted(idle - set(text)), **asked)
    assert len(calls) == 1
