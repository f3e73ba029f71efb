"""The definitions of acceptance: identities among them, and the same figures as a generator's own statistics."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decoder.options import LoadOptions
from paceline.engine.request import SamplingParams
from paceline.experiments.definitions import Acceptance, Draft
from paceline.experiments.exchange import aiperf
from paceline.experiments.store import CellResult
from paceline.outputs import RequestOutput
from paceline.serving.metrics import MetricSet
from paceline.workers.target import make_target
from tests.contract.drafters import ROWS, Home
from tests.decoder.tiny import Workshop
from tests.serving.test_metrics import samples
from tests.workers.heard import asked

DRAFTS = st.lists(
    st.integers(1, 6).flatmap(lambda drafted: st.builds(Draft, st.just(drafted), st.integers(0, drafted))), max_size=30
)


@given(DRAFTS, st.integers(0, 9))
@settings(max_examples=60)
def test_acceptance_identities_hold(drafts: list[Draft], undrafted: int) -> None:
    accepted = sum(draft.accepted for draft in drafts)
    rounds = len(drafts) + undrafted
    figures = Acceptance(tuple(drafts), rounds, 1 + rounds + accepted)
    positions = figures.positions
    assert sum(position.unconditional for position in positions) == pytest.approx(figures.mean_acceptance_length - 1)
    assert sum(position.accepted for position in positions) == accepted
    assert sum(position.tested for position in positions) == figures.num_tested_tokens
    assert sum(figures.histogram) == figures.num_drafts
    assert sum(length * count for length, count in enumerate(figures.histogram)) == accepted
    assert figures.draft_acceptance_rate <= figures.conditional_acceptance_rate <= 1
    assert 1 <= figures.tokens_per_round <= figures.mean_acceptance_length
    if drafts and len({draft.drafted for draft in drafts}) == 1:  # one length: a product of the conditional rates
        product = 1.0
        for position in positions:
            product *= position.conditional
            assert position.unconditional == position.of_drafted == pytest.approx(product)


def test_pooled_rates_count_all_drafts() -> None:
    short, long = Acceptance((Draft(2, 2),), 1, 4), Acceptance((Draft(2, 0),) * 3, 3, 4)
    pooled = Acceptance.pooled([short, long])
    assert pooled.mean_acceptance_length == 1 + 2 / 4
    assert pooled.new_tokens == 8


@pytest.mark.parametrize("name", ["ngram", "model", "model, in doubt", "EAGLE 3 dynamic tree", "none"])
def test_figures_equal_the_statistics_of_a_call(name: str, workshop: Workshop, tmp_path: Path) -> None:
    """Drafts that are too long for what is left of a text, and texts that end inside of a draft, included."""
    with ExitStack() as stack:
        row = ROWS[name]
        generator = row.make(Home(workshop, tmp_path, stack, 1), row.depths[-1])
        parts = []
        for prompt in ([5, 9, 5, 9, 5], [7, 7, 8, 7, 7]):
            stream = generator.stream([prompt], max_new_tokens=23, eos_token_id=[3, 40])
            parts.append(Acceptance.of(stream))
            own, counted = parts[-1], generator.statistics
            assert own.draft_acceptance_rate == pytest.approx(counted.acceptance_rate)
            assert own.drafted_token_share == pytest.approx(counted.num_accepted_tokens / counted.new_tokens)
            for key in ("mean_acceptance_length", "tokens_per_round"):
                assert getattr(own, key) == pytest.approx(getattr(counted, key)), key
            assert own.num_rounds == counted.num_rounds and own.new_tokens == counted.new_tokens
            assert [p.accepted for p in own.positions] == counted.num_accepted_tokens_per_pos
            assert [p.drafted for p in own.positions] == counted.num_draft_tokens_per_pos
            assert list(own.histogram) == counted.acceptance_histogram
        assert name == "none" or Acceptance.pooled(parts).num_drafts


def test_a_run_server_metrics_and_aiperf_records_agree(workshop: Workshop) -> None:
    """The same requests, counted from their outputs, by the engine of a server for Prometheus, and as records."""
    prompts, params = ((5, 9, 5, 9, 5), (7, 7, 8, 7, 7), (3, 4)), SamplingParams(max_new_tokens=23, seed=[1, 2, 3])
    keys = asdict(LoadOptions(amp="f32", batch_size=2, n_positions=128))
    keys |= {"backend": "eager", "folder": str(workshop.checkpoint())}
    host = make_target({**keys, "draft": ["ngram", str(workshop.checkpoint("draft"))], "k": 3}, None)
    outputs: dict[int, list[RequestOutput]] = {0: [], 1: [], 2: []}
    for output in asked(host, "ticket", prompts, params):
        outputs[output.index].append(output)
    run = [Acceptance.of(rows) for rows in outputs.values()]
    pooled = Acceptance.pooled(run)
    assert 0 < pooled.num_accepted_tokens < pooled.num_draft_tokens

    metrics = MetricSet("tiny", "0")
    metrics.update(host.figures(), None, num_slots=2)
    served = samples(metrics.text())
    drafts, drafted, accepted = (
        served[f"vllm:spec_decode_num_{name}_total", ""] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert (drafts, drafted, accepted) == (pooled.num_drafts, pooled.num_draft_tokens, pooled.num_accepted_tokens)
    assert 1 + accepted / drafts == pytest.approx(pooled.mean_acceptance_length)
    assert accepted / drafted == pytest.approx(pooled.draft_acceptance_rate)
    for index, place in enumerate(pooled.positions):
        assert served["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(index)] == place.accepted

    rows = [
        {"prompt": str(number), "num_rounds": one.num_rounds, "new_tokens": one.new_tokens}
        | {f"per_step_{name}": [getattr(draft, name) for draft in one.drafts] for name in ("drafted", "accepted")}
        for number, one in enumerate(run)
    ]
    for ours, row in zip(run, aiperf(CellResult("cell", {"k": 3}, rows)), strict=True):
        record = row["spec_decode_acceptance"]
        assert record["num_accepted_draft_tokens"] == ours.num_accepted_tokens
        assert record["mean_acceptance_length"] == ours.mean_acceptance_length
        assert (record["num_spec_steps"], record["completion_tokens"]) == (ours.num_drafts, ours.new_tokens)
