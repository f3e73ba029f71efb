"""Same seed, same tokens: whatever the drafter, k, batch and acceptance, but for simulated acceptance."""

from __future__ import annotations

import logging

import pytest
import torch

from paceline import FunctionDrafter, NgramDrafter, SpeculativeGenerator, SyntheticAcceptance
from paceline.core import probs
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import Sampling, row_seed, sampling_tensors
from tests.fakes import Checked, TableDecoder, near, table
from tests.orchestrator.drafting import anti_oracle, coin, oracle
from tests.sampled import run, texts

V = 24
TARGET = table(V, seed=0, spread=2.0)
DRAFT = near(TARGET, seed=1, spread=0.8)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2, 3]]
MODES: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 7},
    "filtered": {"do_sample": True, "seed": 8, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
}


def target(slots: int = 1, kv_buckets: tuple[int, ...] = (64,), logits: torch.Tensor = TARGET) -> TableDecoder:
    return TableDecoder(logits, slots=slots, kv_buckets=kv_buckets)


def plain(prompts: list[list[int]], **asked: object) -> list[list[int]]:
    return texts(run(SpeculativeGenerator(None, target()), prompts, **asked))


@pytest.mark.parametrize("mode", MODES)
def test_plain_decoding_samples_with_the_noise_of_each_position(mode: str) -> None:
    text = list(PROMPTS[0])
    asked = {name: value for name, value in MODES[mode].items() if name != "do_sample"}
    params = Sampling(**({"temperature": 1.0} | asked if asked else {}))  # type: ignore[arg-type]
    for position in range(len(text), len(text) + 25):
        logits = TARGET[text[-2], text[-1]].view(1, 1, V)
        text.append(
            int(probs.sample_tokens(logits, torch.tensor([[position]], dtype=torch.int32), sampling_tensors([params])))
        )
    assert plain(PROMPTS[:1], max_new_tokens=25, **MODES[mode]) == [text]


@pytest.mark.parametrize("k", [1, 8])  # 2 to 4: tests/target
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_a_model_that_drafts_for_itself_is_always_accepted(acceptor: str, mode: str, k: int) -> None:
    generator = Checked(target(2), target(2), k=k, acceptor=acceptor)
    done = run(generator, PROMPTS, max_new_tokens=1 + 3 * (k + 1), **MODES[mode])
    assert done.statistics.num_draft_tokens > 0
    assert done.statistics.num_accepted_tokens == done.statistics.num_draft_tokens
    assert done.statistics.tau == k + 1


def test_one_decoder_may_be_its_own_draft() -> None:
    one = target()
    done = run(SpeculativeGenerator(one, one, k=3), PROMPTS[:1], max_new_tokens=9)
    assert texts(done) == plain(PROMPTS[:1], max_new_tokens=9)
    assert done.statistics.acceptance_rate == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_a_self_draft_is_accepted_across_bucket_borders(mode: str) -> None:
    """A round that proposes nothing, as at a border, must not leave a hole in the draft's cache."""
    generator = Checked(target(1, (16, 32, 64)), target(1, (16, 32, 64)), k=4)
    done = run(generator, [PROMPTS[0]], **MODES[mode])
    assert texts(done) == plain([PROMPTS[0]], **MODES[mode])
    assert done.statistics.num_accepted_tokens == done.statistics.num_draft_tokens


@pytest.mark.parametrize(("mode", "k"), [("greedy", 1), ("sampled", 8), ("filtered", 4)])
def test_an_oracle_gains_k_tokens_per_round_and_an_anti_oracle_none(k: int, mode: str) -> None:
    size = 1 + 4 * (k + 1)
    wanted = plain(PROMPTS, max_new_tokens=size, **MODES[mode])
    done = run(
        Checked(FunctionDrafter(oracle(wanted, k), k), target(2), k=k), PROMPTS, max_new_tokens=size, **MODES[mode]
    )
    assert (texts(done), done.statistics.tau) == (wanted, k + 1)
    assert done.statistics.num_rounds == 4 * len(PROMPTS)
    wrong = FunctionDrafter(anti_oracle(wanted, k, vocab_size=V), k)
    done = run(Checked(wrong, target(2), k=k), PROMPTS, max_new_tokens=size, **MODES[mode])
    assert (texts(done), done.statistics.tau) == (wanted, 1.0)
    assert done.statistics.num_accepted_tokens == 0 < done.statistics.num_draft_tokens


@pytest.mark.parametrize(("alpha", "k", "golden"), [(0.6, 1, 1.60), (0.8, 5, 3.69)])
def test_a_random_drafter_gains_as_the_formula_predicts(alpha: float, k: int, golden: float) -> None:
    mean = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert mean == pytest.approx(golden, abs=0.005)
    square = sum((n + 1) ** 2 * alpha**n * (1 - alpha) for n in range(k)) + (k + 1) ** 2 * alpha**k
    long = 120 * (k + 1)
    decoder = TableDecoder(TARGET, kv_buckets=(long + 64,))
    wanted = texts(run(SpeculativeGenerator(None, decoder), [[3, 1]], max_new_tokens=long, do_sample=True))
    source = FunctionDrafter(coin(wanted, k, vocab_size=V, alpha=alpha, seed=k), k)
    done = run(SpeculativeGenerator(source, decoder, k=k), [[3, 1]], max_new_tokens=long, do_sample=True)
    assert texts(done) == wanted
    sigma = ((square - mean**2) / done.statistics.num_rounds) ** 0.5
    assert done.statistics.tau == pytest.approx(mean, abs=3 * sigma)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_a_wider_window_than_the_proposal_changes_nothing(exact: bool, scores: bool, acceptor: str) -> None:
    """The n-gram drafter proposes nothing at first and two tokens later: both must fit the graph of eight rows."""
    asked = {"max_new_tokens": 30, "output_scores": scores}
    prompt = [[3, 1, 4] * 4]
    for source in (NgramDrafter(2), target(logits=DRAFT)):
        made = SpeculativeGenerator(source, target(), k=2, acceptor=acceptor, exact=exact, verify_width=8)
        done = run(made, prompt, **asked)
        assert texts(done) == plain(prompt, max_new_tokens=30)


def test_a_row_does_not_depend_on_other_rows_with_rejection() -> None:
    """With `match`: `tests/equality/test_equality.py`."""
    asked = {"max_new_tokens": 20, "do_sample": True}

    def made(prompts: list[list[int]], slots: int, seed: object) -> list[list[int]]:
        generator = Checked(target(slots, logits=DRAFT), target(slots), acceptor="reject")
        return texts(run(generator, prompts, seed=seed, **asked))

    many, seeds = made(PROMPTS, 3, 11), [row_seed(11, row) for row in range(len(PROMPTS))]
    assert many == made(PROMPTS, 3, seeds) == [made([prompt], 1, seeds[i])[0] for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(("alpha", "heat"), [(0.0, {}), (0.6, {"do_sample": True, "seed": 3}), (1.0, {})])
def test_tokens_per_round_follow_the_formula(alpha: float, heat: dict) -> None:
    """E = (1 - alpha^(k+1)) / (1 - alpha), for drafts of any quality."""
    k, wanted = 4, {0.0: 1.0, 0.6: 2.306, 1.0: 5.0}[alpha]
    for draft in (
        TableDecoder(near(TARGET, seed=1, spread=0.6), slots=4, kv_buckets=(512,)),
        FunctionDrafter(lambda _: [1] * k, k),
    ):
        target = TableDecoder(TARGET, slots=4, kv_buckets=(512,))
        made = Checked(draft, target, k=k, acceptor=SyntheticAcceptance(alpha))
        made.sample(PROMPTS, max_new_tokens=400 if 0 < alpha < 1 else 60, **heat)
        assert made.statistics.tokens_per_round == pytest.approx(wanted, rel=0.12)
        assert not made.statistics.lossless
        assert made.statistics.to_dict()["acceptor"] == "synthetic"


def test_a_simulated_run_is_reproducible_and_labelled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        made = SpeculativeGenerator("ngram", TableDecoder(TARGET), k=3, acceptor=SyntheticAcceptance(0.5))
    assert "does not follow the target's distribution" in caplog.text
    first, second = (made.sample([[1, 2, 1]], max_new_tokens=40, seed=5) for _ in range(2))
    assert torch.equal(first, second)


def test_unsupported_simulations_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="a probability"):
        SpeculativeGenerator("ngram", TableDecoder(TARGET), acceptor=SyntheticAcceptance(1.5))
    with pytest.raises(ConfigurationError, match="on the device"):
        SpeculativeGenerator("ngram", TableDecoder(TARGET), acceptor=SyntheticAcceptance(0.5)).sample(
            [[1, 2]], repetition_penalty=1.5
        )
