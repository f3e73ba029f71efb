"""Streams, streamers, events and statistics tell the same story as the result; a request that is over is forgotten."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextIteratorStreamer

from paceline import FunctionDrafter, NgramDrafter, RequestOutput, SpeculativeGenerator
from paceline.core.errors import DecoderBusyError, SamplingError
from paceline.core.protocols import Drafter
from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.engine.engine import ListQueue
from paceline.engine.request import Request, SamplingParams
from paceline.target.host_verifier import HostVerifier
from tests.fakes import Checked, TableDecoder, near, table
from tests.sampled import run, texts

V = 12
TARGET = table(V, seed=5, spread=2.0)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6], [7, 7, 8]]


class Letters:
    """A tokenizer of one letter per id."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join("abcdefghijkl "[int(i)] for i in token_ids)


class Heard:
    """A streamer that writes down what it is given."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.values: list[torch.Tensor] = []
        self.ended, self._fails_at = 0, fails_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.values) == self._fails_at:
            raise OSError("the reader is gone")
        self.values.append(value)

    def end(self) -> None:
        self.ended += 1


def generator(slots: int = 1, *, k: int = 4, acceptor: str = "match") -> SpeculativeGenerator:
    draft = TableDecoder(near(TARGET, seed=6, spread=0.4), slots=slots)
    return Checked(draft, TableDecoder(TARGET, slots=slots), k=k, acceptor=acceptor)


@pytest.mark.parametrize("stops", [False, True])
def test_a_streamer_gets_the_prompt_and_then_every_token_once(stops: bool) -> None:
    """And nothing after a stop."""
    heard, asked = Heard(), {"max_new_tokens": 17}
    text: Any = generator().sample([PROMPTS[0]], **asked)
    eos = int(text[0, 12])
    made: Any = generator().sample([PROMPTS[0]], streamer=heard, eos_token_id=eos if stops else [], **asked)
    assert heard.values[0].tolist() == [PROMPTS[0]] and heard.ended == 1
    assert torch.cat(heard.values[1:]).tolist() == made[0, len(PROMPTS[0]) :].tolist()
    assert not stops or int(heard.values[-1]) == eos


def test_hugging_face_s_iterator_streamer_works_across_threads() -> None:
    streamer = TextIteratorStreamer(Letters(), timeout=60)  # type: ignore[arg-type]
    kept: list[object] = []
    asked = {"max_new_tokens": 17, "streamer": streamer}
    thread = threading.Thread(target=lambda: kept.append(generator().sample([PROMPTS[0]], **asked)))
    thread.start()
    heard = "".join(streamer)
    thread.join()
    assert heard == Letters().decode(kept[0][0].tolist())  # type: ignore[index]


def test_a_streamer_for_several_prompts_is_rejected() -> None:
    heard = Heard()
    with pytest.raises(SamplingError, match="streamer: expected one prompt, got 2"):
        generator(2).sample(PROMPTS[:2], streamer=heard)
    assert not heard.values


def test_a_streamer_is_ended_when_the_generation_fails() -> None:
    def broken(ids: torch.Tensor, scores: object) -> bool:
        raise LookupError("no idea")

    heard = Heard()
    with pytest.raises(LookupError):
        generator().sample([PROMPTS[0]], streamer=heard, stopping_criteria_list=[broken])
    assert heard.ended == 1


def test_a_streamer_that_fails_is_ended_and_leaves_the_decoders_free() -> None:
    one, heard = generator(), Heard(fails_at=3)
    with pytest.raises(OSError, match="gone") as caught:
        one.sample([PROMPTS[0]], streamer=heard)
    assert heard.ended == 1
    assert caught.tb is not None  # somebody looks at the traceback, which keeps the frames alive
    one.sample([PROMPTS[0]], max_new_tokens=2)


def test_a_stream_holds_its_decoders_from_the_call_until_it_is_done_or_closed() -> None:
    one = generator()
    events = one.stream([PROMPTS[0]], max_new_tokens=5)
    for busy in (one.stream, one.sample, SpeculativeGenerator(None, one.target).sample):
        with pytest.raises(DecoderBusyError, match="another generation"):
            busy([PROMPTS[0]])
    assert len({event.index for event in events}) == 1  # whoever was first goes on
    assert one.statistics.new_tokens == 5
    events = one.stream([PROMPTS[0]])
    next(events)
    with pytest.raises(DecoderBusyError):
        one.sample([PROMPTS[0]])
    events.close()  # type: ignore[attr-defined]
    one.sample([PROMPTS[0]], max_new_tokens=2)


def test_a_stream_that_never_begins_frees_its_decoders() -> None:
    one = generator()
    one.stream([PROMPTS[0]]).close()  # type: ignore[attr-defined]
    one.stream([PROMPTS[0]])  # dropped
    gc.collect()
    events = one.stream([PROMPTS[0]])
    events.close()  # type: ignore[attr-defined]
    events.close()  # type: ignore[attr-defined]
    assert list(events) == []
    one.sample([PROMPTS[0]], max_new_tokens=2)


def test_a_pair_with_one_busy_decoder_releases_the_other() -> None:
    one = generator()
    draft = one.decoders[1]
    other = SpeculativeGenerator(None, draft)
    events = other.stream([PROMPTS[0]])
    with pytest.raises(DecoderBusyError):
        one.stream([PROMPTS[0]])
    SpeculativeGenerator(None, one.target).sample([PROMPTS[0]], max_new_tokens=2)
    events.close()  # type: ignore[attr-defined]
    one.sample([PROMPTS[0]], max_new_tokens=2)


@pytest.mark.parametrize("nested", [lambda draft: [(draft, 2)], lambda draft: ["ngram", ["suffix", draft]]])
def test_a_draft_inside_a_list_is_reserved_too(nested: Callable[[object], list[object]]) -> None:
    target, draft = generator().decoders
    one = SpeculativeGenerator(nested(draft), target, confidence_threshold=0.01)
    events = one.stream([PROMPTS[0]])
    with pytest.raises(DecoderBusyError):
        SpeculativeGenerator(None, draft).sample([PROMPTS[0]])
    events.close()  # type: ignore[attr-defined]


def test_a_stream_rejects_bad_input_before_its_first_event() -> None:
    with pytest.raises(SamplingError):
        generator().stream([PROMPTS[0]], max_new_tokens=0)


def story(events: Iterator[RequestOutput], count: int) -> tuple[list[list[int]], list[object], list[RequestOutput]]:
    kept = list(events)
    tokens = [[t for e in kept if e.index == row for t in e.tokens] for row in range(count)]
    ends = [[e.finish_reason for e in kept if e.index == row] for row in range(count)]
    assert all(end[:-1] == [None] * (len(end) - 1) for end in ends)
    return tokens, [end[-1] for end in ends], kept


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_events_statistics_and_result_agree(slots: int, acceptor: str) -> None:
    asked = {"max_new_tokens": 19, "do_sample": True, "eos_token_id": 3}
    one = generator(slots, acceptor=acceptor)
    result = run(one, PROMPTS, **asked)
    tokens, ends, events = story(one.stream(PROMPTS, **asked), len(PROMPTS))  # type: ignore[arg-type]
    assert [[*prompt, *own] for prompt, own in zip(PROMPTS, tokens, strict=True)] == texts(result)
    assert ends == result.finish_reasons
    counts = one.statistics
    assert counts.new_tokens == sum(len(t) for t in tokens)
    assert counts.num_accepted_tokens == sum(e.accepted for e in events) == sum(counts.num_accepted_tokens_per_pos)
    assert counts.num_draft_tokens == sum(counts.num_draft_tokens_per_pos)
    own_cut = sum(1 for e in events if e.accepted == len(e.tokens))  # the target's own token fell behind a stop
    firsts = len(PROMPTS)
    assert counts.new_tokens == firsts + counts.num_rounds + counts.num_accepted_tokens - own_cut
    assert counts.num_rounds == len(events) - firsts
    assert counts.tau == pytest.approx(1 + sum(n / counts.num_drafts for n in counts.num_accepted_tokens_per_pos))
    assert counts.tokens_per_round == pytest.approx(1 + counts.num_accepted_tokens / counts.num_rounds)
    histogram = counts.acceptance_histogram
    assert sum(histogram) == counts.num_drafts <= counts.num_rounds
    assert sum(n * many for n, many in enumerate(histogram)) == counts.num_accepted_tokens
    assert counts.acceptance_rate == pytest.approx(counts.num_accepted_tokens / counts.num_draft_tokens)
    for few, many in zip(counts.num_accepted_tokens_per_pos, counts.num_draft_tokens_per_pos, strict=True):
        assert 0 <= few <= many
    assert sorted(counts.num_accepted_tokens_per_pos, reverse=True) == counts.num_accepted_tokens_per_pos
    assert counts.to_dict()["tau"] == counts.tau


@pytest.mark.parametrize("k", [0, 2])
def test_plain_decoding_has_a_tau_of_one_and_drafts_nothing(k: int) -> None:
    one = SpeculativeGenerator(None, TableDecoder(TARGET), k=k)
    one.sample([PROMPTS[0]], max_new_tokens=5)
    assert (one.statistics.num_rounds, one.statistics.num_draft_tokens, one.statistics.tau) == (4, 0, 1.0)
    one.sample([PROMPTS[0]], max_new_tokens=1)
    assert (one.statistics.num_rounds, one.statistics.tau, one.statistics.acceptance_rate) == (0, 1.0, 0.0)


def test_texts_that_end_early_do_not_delay_the_others() -> None:
    """Each of them has a slot at once; otherwise a sharer of the rounds would wait until all are prefilled."""
    made = generator(2)
    requests = [
        replace(
            Request.batch([PROMPTS[0]], SamplingParams(max_new_tokens=size, eos_token_id=[]), made.limits)[0], index=i
        )
        for i, size in enumerate((60, *[1] * 8))
    ]
    with closing(made.serve(ListQueue(requests))) as events:
        order = [event.index for event in events]
    assert [index for index in order if index] == list(range(1, 9))
    assert order[order.index(1) : order.index(8)].count(0) >= 3


class Register(Drafter):
    """A drafter that proposes nothing and knows who is seated; strict about the order of calls."""

    draft_shape = DraftShape.chain(2)
    reads: FeatureSpec | None = None
    max_positions: int | None = None

    def __init__(self, *, fails: bool = False) -> None:
        self.seated: set[int] = set()
        self.releases, self._fails = 0, fails

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        assert slot not in self.seated, "a slot is taken twice"
        self.seated.add(slot)
        if self._fails:
            raise LookupError("no idea")

    def finish_request(self, slot: int) -> None:
        self.seated.discard(slot)
        self.releases += 1

    def update(self, commit: Commit) -> None:
        """No round without a request; a slot that holds one is past its prompt."""
        assert self.seated
        assert all(commit.first_row[slot] > 0 for slot in self.seated)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        return Proposal(torch.full((len(commit.tokens), 2), -1, dtype=torch.int32))


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("new", [1, 2, 9])
def test_every_request_is_released_once_before_its_slot_is_taken_again(new: int, scores: bool) -> None:
    drafter = Register()
    SpeculativeGenerator(drafter, TableDecoder(TARGET, slots=2)).sample(
        PROMPTS, max_new_tokens=new, eos_token_id=3, output_scores=scores
    )
    assert (drafter.seated, drafter.releases) == (set(), len(PROMPTS))


def test_a_stream_that_is_closed_or_dropped_releases_its_requests() -> None:
    drafter = Register()
    one = SpeculativeGenerator(drafter, TableDecoder(TARGET, slots=2))
    events = one.stream(PROMPTS)
    next(events)
    assert drafter.seated == {0, 1}
    events.close()  # type: ignore[attr-defined]
    assert drafter.seated == set()
    events = one.stream(PROMPTS)
    next(events)
    del events
    gc.collect()
    assert drafter.seated == set()


def test_a_request_that_fails_is_released() -> None:
    drafter = Register(fails=True)
    with pytest.raises(LookupError):
        SpeculativeGenerator(drafter, TableDecoder(TARGET, slots=2)).sample(PROMPTS)
    assert drafter.seated == set()

    def broken(ids: torch.Tensor, scores: object) -> bool:
        raise LookupError("no idea")

    drafter = Register()
    with pytest.raises(LookupError):
        SpeculativeGenerator(drafter, TableDecoder(TARGET)).sample(PROMPTS, stopping_criteria_list=[broken])
    assert drafter.seated == set()


@pytest.mark.parametrize("kind", ["ngram", "lift"])
def test_a_drafters_memory_is_bounded_by_the_running_requests(kind: str) -> None:
    """Idle slots get commits too: while one long text continues, nothing is added for those that are done."""
    drafter = NgramDrafter(3) if kind == "ngram" else FunctionDrafter(lambda text: text[:3], 3)
    one = SpeculativeGenerator(drafter, TableDecoder(TARGET, slots=3))
    alone = 0
    for _ in range(30):
        for event in one.stream([[1, 2, 1, 2], [4], [6, 5]], stopping_criteria_list=[_short_ones]):
            kept = drafter._texts
            assert len(kept) <= 3
            alone += set(kept) == {0} and event.index == 0
        assert not drafter._texts
    assert alone > 30, "the long text was never alone, so this shows nothing"


def _short_ones(ids: torch.Tensor, _scores: object) -> bool:
    """Ends texts that do not begin as the first prompt does."""
    return ids[0, :3].tolist() != [1, 2, 1] and ids.shape[1] >= 8


def test_the_host_verifier_forgets_texts_and_scores() -> None:
    draft = TableDecoder(near(TARGET, seed=1, spread=0.5), slots=2)
    one = SpeculativeGenerator(draft, TableDecoder(TARGET, slots=2))
    one.sample(PROMPTS, max_new_tokens=6, output_scores=True)
    assert one.engine.rounds.on_host is not None
    verifier = one.engine.rounds.on_host().verifier
    assert isinstance(verifier, HostVerifier) and verifier.scores is None and one.engine.slots == [None, None]
