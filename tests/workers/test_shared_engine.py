"""A shared engine: callers in many threads share rounds, join and leave, and each gets the tokens of a separate
call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from paceline import SpeculativeGenerator
from paceline.core.errors import CheckpointError, PromptError, SamplingError
from paceline.core.types import Commit, Proposal, RoundLimits, SamplingTensors
from paceline.decoder.options import LoadOptions
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.engine.request import Request, SamplingParams
from paceline.outputs import GenerationResult
from paceline.placement.remote.messages import Handshake
from paceline.workers.draft import make_drafters
from paceline.workers.shared_engine import SharedEngine
from paceline.workers.target import make_target
from tests.decoder.tiny import VOCABULARY, Workshop, fresh
from tests.fakes import Around, Checked, TableDecoder, near, table
from tests.fakes_text import Pieces
from tests.waiting import until
from tests.workers.heard import asked as outputs_by
from tests.workers.heard import outputs_of

V = 24
TARGET = table(V, seed=0, spread=2.0)
DRAFT = near(TARGET, seed=1, spread=0.8)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2, 3], [7, 7]]


class Gate(Around):
    """A drafter that writes down how many requests each round has, and waits in every one until it is let through."""

    def __init__(self, inner: ModelDrafter) -> None:
        super().__init__(inner)
        self.open, self.together, self.fails, self.fail_next = threading.Semaphore(0), [], False, 0

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        assert self.open.acquire(timeout=20)
        if self.fails or self.fail_next:
            self.fail_next = max(0, self.fail_next - 1)
            raise RuntimeError("asked for")
        self.together.append(int((commit.first_row > 0).sum()))
        return self.inner.propose(commit, sampling, bounds)

    def let(self, rounds: int) -> None:
        self.open.release(rounds)


def shared(slots: int) -> tuple[SharedEngine, Gate, TableDecoder]:
    target = TableDecoder(TARGET, slots=slots)
    gate = Gate(ModelDrafter(TableDecoder(DRAFT, slots=slots), 4, vocabulary=VocabMap(V, V)))
    return SharedEngine(Checked(gate, target)), gate, target


def wanted(prompt: Sequence[int], **asked: object) -> list[int]:
    done = SpeculativeGenerator(None, TableDecoder(TARGET)).sample([list(prompt)], return_dict=True, **asked)  # type: ignore[arg-type]
    assert isinstance(done, GenerationResult)
    return done.sequences[0, len(prompt) : done.lengths[0]].tolist()


def say(found: tuple[SharedEngine, Gate, TableDecoder], ticket: str, prompt: list[int], **asked: object) -> list[int]:
    requests = Request.batch([prompt], SamplingParams.merge(None, asked), found[2].generator.limits)
    return [token for output in outputs_of(found[0], ticket, requests) for token in output.tokens]


@pytest.mark.parametrize("slots", [2, 4])
def test_callers_share_rounds_and_get_separate_tokens(slots: int) -> None:
    """Five callers; they come while others are at it, more than there are slots."""
    made = shared(slots)
    asks = [{"max_new_tokens": 20 + i, "do_sample": i % 2 == 1, "temperature": 1.2, "seed": i} for i in range(5)]
    with ThreadPoolExecutor(5) as pool:
        texts = []
        for number, prompt in enumerate(PROMPTS):
            texts.append(pool.submit(say, made, str(number), prompt, **asks[number]))
            made[1].let(1)  # the next one comes after a round or two of those that are there
        made[1].let(1000)
        assert [text.result(30) for text in texts] == [wanted(p, **a) for p, a in zip(PROMPTS, asks, strict=True)]
    assert max(made[1].together) == slots


def test_an_aborted_request_frees_its_slot_while_others_continue() -> None:
    made = shared(2)
    requests = Request.batch(PROMPTS[:2], SamplingParams.merge(None, {"max_new_tokens": 40}), made[2].generator.limits)
    heard: dict[int, list[int]] = {0: [], 1: []}
    outputs = outputs_of(made[0], "two", requests)
    made[1].let(1)
    while not (heard[0] and heard[1]):
        output = next(outputs)
        heard[output.index] += output.tokens
    made[0].leave("two", [0])
    made[0].leave("nobody", [0])
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(say, made, "third", PROMPTS[2], max_new_tokens=9)  # takes the slot
        made[1].let(1000)
        for output in outputs:
            heard[output.index] += output.tokens
        assert third.result(30) == wanted(PROMPTS[2], max_new_tokens=9)
    assert heard[1] == wanted(PROMPTS[1], max_new_tokens=40) and 0 < len(heard[0]) < 40
    made[1].let(1)
    more = outputs_of(made[0], "one", requests[:1])
    next(more)
    made[0].leave("one", [0])  # the only one: the call is over
    made[1].let(1000)
    assert sum(len(output.tokens) for output in more) < 39
    assert made[0].figures().running == 0


def test_a_call_with_processors_runs_in_exclusive_rounds() -> None:
    made = shared(2)
    asked = {"max_new_tokens": 12, "no_repeat_ngram_size": 2}
    made[1].let(1000)
    with ThreadPoolExecutor(3) as pool:
        plain = [pool.submit(say, made, str(i), PROMPTS[i], max_new_tokens=30) for i in range(2)]
        other = pool.submit(say, made, "other", PROMPTS[2], **asked)
        assert other.result(30) == wanted(PROMPTS[2], **asked)
        assert [p.result(30) for p in plain] == [wanted(p, max_new_tokens=30) for p in PROMPTS[:2]]


def test_an_unservable_request_does_not_affect_the_others() -> None:
    """A stop string that is valid JSON and no UTF-8 was looked at in a round, which ended for everybody."""
    made = shared(2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(say, made, "other", PROMPTS[0], max_new_tokens=20)
        made[1].let(1)
        until(lambda: made[0].heartbeat)
        with pytest.raises(SamplingError, match="surrogate"):
            say(made, "bad", PROMPTS[1], stop_strings="\ud800", tokenizer=Pieces([b"x"] * V), max_new_tokens=5)
        made[1].let(1000)
        assert other.result(30) == wanted(PROMPTS[0], max_new_tokens=20)


class Gaps:
    """A tokenizer that has no text for an id: it raises, as those of Python do, or has nothing."""

    def __init__(self, gap: int, answer: str | None) -> None:
        self._gap, self._answer = gap, answer

    def decode(self, token_ids: list[int], **_: object) -> str | None:
        if self._gap not in token_ids:
            return "x" * len(token_ids)
        if self._answer is None:
            return None
        raise KeyError(self._answer)


@pytest.mark.parametrize("penalty", [None, 1.3])  # on the host, the round itself looks for stop strings
@pytest.mark.parametrize("answer", ["no such id", None])
def test_a_failing_tokenizer_ends_only_its_request(answer: str | None, penalty: float | None) -> None:
    made = shared(2)
    asked = {"max_new_tokens": 40, "repetition_penalty": penalty}
    expected = wanted(PROMPTS[1], **asked)
    bad = {**asked, "stop_strings": "y", "tokenizer": Gaps(expected[4], answer)}
    made[1].let(1000)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(say, made, "other", PROMPTS[0], **asked)
        with pytest.raises(
            CheckpointError, match=r"stop_strings: the tokenizer cannot turn .*\((KeyError|None is not a text)"
        ):
            say(made, "bad", PROMPTS[1], **bad)
        assert other.result(30) == wanted(PROMPTS[0], **asked)
    # One of these fails, one waits for a slot.
    three = Request.batch(
        [PROMPTS[1], PROMPTS[0], PROMPTS[2]], SamplingParams.merge(None, bad), made[2].generator.limits
    )
    with pytest.raises(CheckpointError):
        list(outputs_of(made[0], "three", three))
    assert say(made, "next", PROMPTS[3], **asked) == wanted(PROMPTS[3], **asked)
    assert not made[0]._running and not made[0]._calls


@pytest.mark.parametrize("drafts", [True, False])
def test_a_hosted_target_serves_threads_at_once(workshop: Workshop, drafts: bool) -> None:
    """Real checkpoints, in the thread that a worker has for its rounds."""
    options = asdict(LoadOptions(amp="f32", batch_size=2, n_positions=128))
    shape = {**options, "backend": "eager", "k": 4, "draft_ahead": False}
    inner = None
    if drafts:
        drafters = make_drafters({**shape, "folder": str(workshop.checkpoint("draft"))})
        inner = drafters.acquire(Handshake(0, "t", 2, VOCABULARY))
    host = make_target({**shape, "folder": str(workshop.checkpoint())}, inner)
    made = dict(host.generator.target._steps)
    plain = SpeculativeGenerator(None, fresh(workshop.checkpoint(), batch_size=2), k=0, verify_width=5)
    asks = [{"max_new_tokens": 25 + i, "do_sample": True, "temperature": 1.2, "seed": [i]} for i in range(4)]
    expected = [
        plain.sample([p], **a)[0, len(p) :].tolist()  # type: ignore[arg-type,call-overload]
        for p, a in zip(PROMPTS[:4], asks, strict=True)
    ]

    def said(number: int) -> list[int]:
        outputs = outputs_by(host, str(number), [PROMPTS[number]], SamplingParams.merge(None, asks[number]))
        return [token for output in outputs for token in output.tokens]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(said, range(4))) == expected
    assert host.heartbeat > 0 and host.generator.statistics.new_tokens
    assert host.generator.target._steps == made, "a request had to wait for a graph"
    with pytest.raises(PromptError, match="vocabulary"):
        next(outputs_by(host, "y", [[10**6]], SamplingParams()))
