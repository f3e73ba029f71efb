"""Prefix caching over HTTP: what an answer and the metrics say of it, and that the answer is the same."""

from __future__ import annotations

import random
from typing import Any

from paceline import SpeculativeGenerator
from paceline.serving.api import create_app
from paceline.serving.metrics import MetricSet
from paceline.serving.model_server import LocalRouter, ModelServer
from paceline.serving.settings import ApiSettings
from paceline.workers.shared_engine import SharedEngine
from tests.decoder.tiny import CHUNK, Workshop, fresh
from tests.serving.edge import TEMPLATE, card, client_of
from tests.serving.small_vocabulary import letters

IDS = random.Random(0).choices(range(3, 60), k=3 * CHUNK)


def test_usage_says_what_was_cached_and_answers_are_the_same(workshop: Workshop) -> None:
    answers: dict[bool, list[Any]] = {}
    for caching in (False, True):
        target = fresh(workshop.checkpoint(), backend="eager", batch_size=2)
        generator = SpeculativeGenerator("ngram", target, k=2, prefix_caching=caching)
        engine = SharedEngine(generator)
        app = create_app(
            LocalRouter({"m": ModelServer(letters(TEMPLATE), engine, generator.limits, card=card())}), ApiSettings()
        )
        with client_of(app) as client:
            answers[caching] = [
                client.completions.create(
                    model="m", prompt=prompt, max_tokens=9, temperature=1, seed=3, n=n, extra_body={"ignore_eos": True}
                )
                for prompt, n in ((IDS, 1), ([*IDS[:40], 5], 2), (IDS, 1))
            ]
    texts = {key: [[one.text for one in answer.choices] for answer in found] for key, found in answers.items()}
    assert texts[True] == texts[False]
    assert [answer.usage.prompt_tokens_details for answer in answers[False]] == [None] * 3
    details = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers[True]]
    assert details == [0, 2 * CHUNK, 2 * CHUNK], "the second answer of a prompt took the slot of the first prompt"
    metrics = MetricSet("m", "0", ray_too=False)
    metrics.update(engine.figures(), None, num_slots=2)
    lines = metrics.text().splitlines()
    queries, hits = 2 * len(IDS) + 2 * 41, 2 * CHUNK + 41 + 2 * CHUNK
    for name, count in (("queries", queries), ("hits", hits)):
        assert f'vllm:prefix_cache_{name}_total{{engine="0",model_name="m"}} {float(count)}' in lines
