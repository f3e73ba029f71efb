"""Prompts that are read in chunks between rounds: how long a stream waits, and that its tokens stay the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.types import Commit, RoundLimits, RoundResult, SamplingTensors
from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.backends.native import NativeBackend
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.engine.request import Request, SamplingParams
from paceline.engine.rounds import Rounds
from paceline.outputs import RequestOutput
from paceline.text.structured_output import StructuredOutput
from tests.decoder.tiny import CHUNK as GRAPH_CHUNK
from tests.decoder.tiny import Workshop, fresh
from tests.fakes import Checked, TableDecoder, near, table, watch_rounds
from tests.orchestrator.json_tokens import EOS, tokenizer

V = 24
TARGET = table(V, seed=0, spread=2.0)
DRAFT = near(TARGET, seed=1, spread=0.8)
CHUNK = 16  # tokens of the table decoders' largest chunk
CHUNK_S, ROUND_S = 3.0, 1.0  # virtual seconds


class Clock:
    """Virtual time: chunks and rounds take it, and nothing else does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[float] = []  # when each prompt's first chunk was begun


class TimedByChunks:
    """A round that takes virtual time."""

    def __init__(self, inner: Rounds, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> object:
        reading = self._inner.start(slot, prompt, sampling)
        self._clock.begun.append(self._clock.now)
        while True:
            self._clock.now += CHUNK_S
            try:
                next(reading)
            except StopIteration as done:
                return done.value
            yield

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        result = self._inner(commit, sampling, limits)
        self._clock.now += ROUND_S * len(result.reports)
        return result


class Arrivals:
    """A queue in which requests appear at their times. ``online``: a caller waits for every token."""

    online = True

    def __init__(self, requests: Sequence[tuple[float, Request]], clock: Clock) -> None:
        self._waiting, self._clock, self.aborted = deque(requests), clock, list[int]()

    def pop(self, longest: int | None = None) -> Request | None:
        there = self._waiting and self._waiting[0][0] <= self._clock.now
        if there and (longest is None or len(self._waiting[0][1].prompt) <= longest):
            return self._waiting.popleft()[1]
        return None

    def take_aborted(self) -> Collection[int]:
        taken, self.aborted = self.aborted, []
        return taken


def asked(generator: SpeculativeGenerator, prompts: Sequence[Sequence[int]], **params: object) -> list[Request]:
    return Request.batch([list(p) for p in prompts], SamplingParams.merge(None, params), generator.limits)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drafts(slots: int) -> ModelDrafter:
    return ModelDrafter(TableDecoder(DRAFT, slots=slots, kv_buckets=(256,)), 3, vocabulary=VocabMap(V, V))


@pytest.mark.parametrize("mode", ["plain", "model", "ngram"])
def test_a_running_stream_never_waits_longer_than_a_chunk_and_a_round(mode: str) -> None:
    """Three prompts of 10 chunks come while one stream runs; it used to wait for all 30 of them, and no token less.

    Each prompt's first token comes with its last chunk, before the next prompt is begun.
    """
    slots, clock = 4, Clock()
    target = TableDecoder(TARGET, slots=slots, kv_buckets=(256,))
    draft = {"plain": None, "model": drafts(slots), "ngram": "ngram:prompt_lookup_max=2"}[mode]
    made = Checked(draft, target)
    watch_rounds(made, lambda inner: TimedByChunks(inner, clock))  # type: ignore[arg-type, return-value]
    prompts = [prompt(5, 0), *(prompt(10 * CHUNK, i) for i in (1, 2, 3))]
    requests = asked(made, prompts, max_new_tokens=80)
    queue = Arrivals([(0.0, requests[0]), *((5.0, one) for one in requests[1:])], clock)
    outputs: list[tuple[float, RequestOutput]] = []
    for step in made.steps(queue):
        outputs += [(clock.now, output) for output in step]
    texts = {i: [t for _, output in outputs if output.index == i for t in output.tokens] for i in range(4)}
    for number, own in texts.items():
        alone = SpeculativeGenerator(None, TableDecoder(TARGET, kv_buckets=(256,)))
        assert own == alone.sample([prompts[number]], max_new_tokens=80)[0, len(prompts[number]) :].tolist()
    times = {i: [at for at, output in outputs if output.index == i] for i in range(4)}
    for own_times in times.values():  # while prompts are read; otherwise several rounds may run in one call
        gaps = [b - a for a, b in pairwise(own_times) if a >= 5.0 + ROUND_S and b <= times[3][0]]
        assert max(gaps, default=0.0) <= CHUNK_S + ROUND_S
    assert sum(5.0 <= at <= times[3][0] for at in times[0]) >= 10
    # The drafter reads its prompt in chunks as well; the first chunk comes with the target's last.
    chunks = 19 if mode == "model" else 10
    for place in (1, 2, 3):  # several rounds may have been under way when the first of them came
        longest = clock.begun[1] + place * chunks * (CHUNK_S + ROUND_S) + CHUNK_S
        assert times[place][0] <= longest


def test_short_prompts_are_read_together_within_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts of five tokens come while a stream runs: three fit a chunk of 16, the next waits for a round."""
    monkeypatch.setattr("paceline.engine.engine.PASS_TOKENS", 4)
    made, clock = Checked(None, TableDecoder(TARGET, slots=9, kv_buckets=(256,))), Clock()
    prompts = [prompt(5, i) for i in range(9)]
    requests = asked(made, prompts, max_new_tokens=40)
    queue = Arrivals([(0.0, requests[0]), *((1.0, one) for one in requests[1:])], clock)
    first, texts = list[list[int]](), [list[int]() for _ in prompts]
    for step in made.steps(queue):
        clock.now += 1.0
        begun = [output.index for output in step if not texts[output.index]]
        first += [begun] if begun else []
        for output in step:
            texts[output.index] += output.tokens
    assert first == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]
    for own, text in zip(prompts, texts, strict=True):
        alone = SpeculativeGenerator(None, TableDecoder(TARGET, kv_buckets=(256,)))
        assert text == alone.sample([own], max_new_tokens=40)[0, 5:].tolist()


def test_an_aborted_prompt_leaves_its_slot_between_two_chunks() -> None:
    clock, target = Clock(), TableDecoder(TARGET, slots=1, kv_buckets=(256,))
    made = Checked(drafts(1), target)
    requests = asked(made, [prompt(10 * CHUNK, 1), prompt(5, 2)], max_new_tokens=9)
    queue = Arrivals([(0.0, one) for one in requests], clock)
    steps, outputs = 0, list[RequestOutput]()
    for step in made.steps(queue):
        steps, outputs = steps + 1, outputs + step
        if steps == 3:
            queue.aborted = [0]
    assert {one.index for one in outputs} == {1} and steps < 3 + 12
    expected = SpeculativeGenerator(None, TableDecoder(TARGET)).sample([requests[1].prompt], max_new_tokens=9)
    assert [t for one in outputs for t in one.tokens] == expected[0, 5:].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("mode", ["plain", "model"])
def test_rounds_between_chunks_keep_the_prefill_bitwise_identical(
    workshop: Workshop, mode: str, temperature: float
) -> None:
    """Cache rows of real models after a prompt that was read between rounds, and after one that was read at once.

    But for the first rows, which an idle slot writes over.
    """
    rows = []
    for online in (False, True):
        one_graph = [2]  # of all slots: no request moves, and the rows of the second stay where they are
        target = fresh(workshop.checkpoint(), batch_size=one_graph)
        draft = fresh(workshop.checkpoint("draft"), batch_size=one_graph) if mode == "model" else None
        made = SpeculativeGenerator(draft, target, k=3) if draft is not None else SpeculativeGenerator(None, target)
        prompts = [prompt(5, 0), prompt(90, 1)]
        params = {"do_sample": temperature > 0, "temperature": temperature or 1.0, "seed": 3}
        requests = [
            replace(one, index=index)
            for index, (text, new) in enumerate(zip(prompts, (30, 20), strict=True))
            for one in asked(made, [text], max_new_tokens=new, **params)
        ]
        queue = Arrivals([(0.0, one) for one in requests], Clock())
        queue.online = online  # type: ignore[misc]
        outputs = [output for step in made.steps(queue) for output in step]
        texts = [[t for one in outputs if one.index == i for t in one.tokens] for i in (0, 1)]
        caches: list[Tensor] = [one[1, :, 16:105].clone() for pair in target.body.caches for one in pair]
        if draft is not None:
            caches += [one[1, :, 16:90].clone() for pair in draft.body.caches for one in pair]
        rows.append((texts, caches))
    (texts, caches), (paced_texts, paced_caches) = rows
    assert texts == paced_texts
    assert all(torch.equal(a, b) for a, b in zip(caches, paced_caches, strict=True))


TO_MAKE_A_GRAPH = 1000
"""Of virtual time; a call of a graph takes 1."""
LATER: dict[str, dict[str, object]] = {
    "drawn": {"do_sample": True, "top_k": 40},
    "schema": {"structured_outputs": StructuredOutput("regex", r"(ab|c){2,6}[0-9]+"), "tokenizer": tokenizer()},
    "logprobs": {"logprobs": 3},
    "prompt's logprobs": {"logprobs": 1, "prompt_logprobs": 1},
    "penalties": {"presence_penalty": 0.9, "logit_bias": {4: 2.0}},
    "processors": {"logits_processor": [lambda _ids, scores: scores / 2]},
    "prediction": {"prediction": [5, 9, 2, 2, 7]},
    "minimum": {"min_tokens": 6},
}


@pytest.fixture
def graphs_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Calls of graphs, and building them, take virtual time."""
    clock, original = Clock(), NativeBackend.compile

    def made(backend: NativeBackend, graph: Graph, announce: Callable[[str], None]) -> Step:
        step = original(backend, graph, announce)
        clock.now += TO_MAKE_A_GRAPH

        def call(*inputs: object) -> object:
            clock.now += 1
            return step(*inputs)

        return call  # type: ignore[return-value]

    monkeypatch.setattr(NativeBackend, "compile", made)
    return clock


def native(folder: Path) -> SamplingDecoder:
    made = AutoDecoder.from_pretrained(
        folder, backend="native", amp="f32", batch_size=3, context_length_estimate=[GRAPH_CHUNK]
    )
    made.on_graph = lambda _event: None
    return made


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        (None, {}),
        ("ngram", {"k": 3}),
        *(("model", more) for more in ({"k": 3}, {"k": 3, "fused": False}, {"k": "auto"})),
    ],
)
def test_no_kind_of_request_makes_a_stream_wait_longer_than_a_chunk_and_a_round(
    workshop: Workshop, graphs_clock: Clock, draft: str | None, options: dict[str, object]
) -> None:
    """Nor is a graph made while it runs."""
    target = native(workshop.checkpoint())
    drafter = native(workshop.checkpoint("draft")) if draft == "model" else draft
    generator = SpeculativeGenerator(drafter, target, **options)  # type: ignore[arg-type]
    generator.compile()
    params = [{"max_new_tokens": 90, "eos_token_id": []}]
    params += [{"max_new_tokens": 8, "seed": 3, "eos_token_id": EOS, **one} for one in LATER.values()]
    requests = []
    for index, own in enumerate(params):
        text = [1 + i % 60 for i in range(2 * GRAPH_CHUNK + index)] if index else [5, 9, 3]
        requests.append((graphs_clock.now + 5.0 * index, replace(asked(generator, [text], **own)[0], index=index)))
    times, ended = [], set()
    with closing(generator.serve(Arrivals(requests, graphs_clock))) as outputs:
        for output in outputs:
            assert output.error is None
            if output.index == 0 and output.tokens:
                times.append(graphs_clock.now)
            elif output.finish_reason:
                ended.add(output.index)
    assert ended == set(range(1, len(params))), "all of them were served beside the stream"
    models = 2 if draft == "model" else 1  # a draft model may have to catch up first
    assert max(b - a for a, b in pairwise(times)) <= models + (generator.config.max_k + 2) * models
