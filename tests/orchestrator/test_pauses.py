"""No request waits for another's prefill: in virtual time, a stream's longest pause is a chunk of a prompt and
a round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.backends.native import NativeBackend
from paceline.decoder.graph_key import GraphEvent
from paceline.engine.request import Request, SamplingParams
from paceline.text.structured_output import StructuredOutput
from tests.decoder.tiny import CHUNK, Workshop
from tests.orchestrator.json_tokens import EOS, tokenizer

K = 3
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


class Clock:
    """Times of calls of graphs, and of building them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, original = 0, NativeBackend.compile

        def made(backend: NativeBackend, graph: Graph, announce: Callable[[str], None]) -> Step:
            step = original(backend, graph, announce)
            self.now += TO_MAKE_A_GRAPH

            def call(*inputs: object) -> object:
                self.now += 1
                return step(*inputs)

            return call  # type: ignore[return-value]

        patch.setattr(NativeBackend, "compile", made)


class Arrivals:
    """A queue of requests, each with an arrival time; a caller waits for every token."""

    online = True

    def __init__(self, clock: Clock, requests: list[tuple[int, Request]]) -> None:
        self._clock, self._waiting = clock, requests

    def pop(self, longest: int | None = None) -> Request | None:
        there = self._waiting and self._waiting[0][0] <= self._clock.now
        fits = there and (longest is None or len(self._waiting[0][1].prompt) <= longest)
        return self._waiting.pop(0)[1] if fits else None

    def take_aborted(self) -> Collection[int]:
        return ()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def decoder(folder: Path) -> SamplingDecoder:
    made = AutoDecoder.from_pretrained(
        folder, backend="native", amp="f32", batch_size=3, context_length_estimate=[CHUNK]
    )
    made.on_graph = _quiet
    return made


def _quiet(_event: GraphEvent) -> None:
    pass


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        (None, {}),
        ("ngram", {"k": K}),
        ("model", {"k": K}),
        ("model", {"k": K, "fused": False}),
        ("model", {"k": "auto"}),
    ],
)
def test_a_stream_waits_at_most_a_chunk_and_a_round(
    workshop: Workshop, clock: Clock, draft: str | None, options: dict[str, object]
) -> None:
    target = decoder(workshop.checkpoint())
    drafter = decoder(workshop.checkpoint("draft")) if draft == "model" else draft
    generator = SpeculativeGenerator(drafter, target, **options)  # type: ignore[arg-type]
    generator.compile()
    warm = clock.now
    prompts = [[5, 9, 3], *([[1 + i % 60 for i in range(2 * CHUNK + number)] for number in range(len(LATER))])]
    asked = [SamplingParams(max_new_tokens=90, eos_token_id=[])]
    asked += [SamplingParams(**{"max_new_tokens": 8, "seed": 3, "eos_token_id": EOS, **one}) for one in LATER.values()]  # type: ignore[arg-type]
    requests = []
    for index, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
        (request,) = Request.batch([prompt], params, generator.limits)
        requests.append((warm + 5 * index, replace(request, index=index)))
    times, ended = [], set()
    with closing(generator.serve(Arrivals(clock, requests))) as outputs:
        for output in outputs:
            assert output.error is None
            if output.index == 0 and output.tokens:
                times.append(clock.now)
            elif output.finish_reason:
                ended.add(output.index)
    assert ended == set(range(1, len(asked))), "all of them were served beside the stream"
    models = 2 if draft == "model" else 1
    chunk, round_ = models, (generator.config.max_k + 2) * models  # a draft model may have to catch up first
    assert max(later - before for before, later in pairwise(times)) <= chunk + round_
