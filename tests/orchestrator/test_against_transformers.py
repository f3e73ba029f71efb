"""A tiny network decoded by Paceline and by transformers, as an independent judge of caches and scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, MinNewTokensLengthLogitsProcessor, SuppressTokensLogitsProcessor

from paceline import FunctionDrafter, SpeculativeGenerator
from paceline.decoder import steps
from tests.fakes_models import V, generated, load, logits_of, network, saved
from tests.orchestrator.drafting import coin
from tests.sampled import run, texts

PROMPTS = [[5, 9, 13, 5, 9], [40], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20, "seed": 5}


@pytest.fixture(scope="module")
def judge() -> LlamaForCausalLM:
    return network()


@pytest.fixture(scope="module")
def folders(judge: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    draft = network()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return saved(judge, root / "target"), saved(draft, root / "draft")


@pytest.mark.parametrize("asked", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_cache_after_drafts_equals_that_of_the_text(
    folders: tuple[Path, Path], judge: LlamaForCausalLM, asked: dict[str, object]
) -> None:
    """Every row of both caches, by the logits that a last token gets from them."""
    target, prompt = load(folders[0]), PROMPTS[0]
    wanted = texts(run(SpeculativeGenerator(None, target), [prompt], max_new_tokens=40, **asked))
    source = FunctionDrafter(coin(wanted, 4, vocab_size=V, alpha=0.6, seed=1), 4)
    done = run(SpeculativeGenerator(source, target, k=4), [prompt], max_new_tokens=40, **asked)
    text = texts(done)[0]
    assert 0 < done.statistics.num_accepted_tokens < done.statistics.num_draft_tokens
    exact = logits_of(judge, text)
    for at in (len(text) - 1, len(text) - 6, len(prompt) + 1):  # from the end, since reading writes
        tokens = torch.tensor([text[at : at + 1]], dtype=torch.int32)
        got = steps.window(target, tokens, torch.tensor([at], dtype=torch.int32), bucket=target.bucket_for(at + 1))[0]
        torch.testing.assert_close(got[0, 0], exact[at], atol=2e-4, rtol=1e-4)


def test_the_drafts_cache_equals_that_of_the_text(folders: tuple[Path, Path]) -> None:
    draft = load(folders[1])
    done = run(SpeculativeGenerator(draft, load(folders[0]), k=4), PROMPTS[:1], max_new_tokens=40, **SAMPLED)
    assert 0 < done.statistics.num_accepted_tokens < done.statistics.num_draft_tokens
    text = texts(done)[0]
    exact = logits_of(LlamaForCausalLM.from_pretrained(folders[1]).eval(), text)
    at = len(text) - 8  # what the very last rounds committed is never read by a draft
    tokens = torch.tensor([text[at : at + 1]], dtype=torch.int32)
    got = steps.window(draft, tokens, torch.tensor([at], dtype=torch.int32), bucket=draft.bucket_for(at + 1))[0]
    torch.testing.assert_close(got[0, 0], exact[at], atol=2e-4, rtol=1e-4)


def test_banned_tokens_never_appear_even_if_drafted(folders: tuple[Path, Path], judge: LlamaForCausalLM) -> None:
    wanted = generated(judge, PROMPTS[0], max_new_tokens=20)
    banned = sorted({*wanted[5:8]})
    rules = [SuppressTokensLogitsProcessor(banned), MinNewTokensLengthLogitsProcessor(5, 4, 7)]
    for acceptor in ("match", "reject"):
        source = FunctionDrafter(lambda _: banned[:3], 3)
        generator = SpeculativeGenerator(source, load(folders[0]), acceptor=acceptor)
        for asked in ({}, SAMPLED):
            text = texts(run(generator, PROMPTS[:1], max_new_tokens=20, logits_processor=rules, **asked))[0]
            assert not {*banned} & {*text[5:]}
            assert 7 not in text[5:9]


@pytest.mark.parametrize("asked", [{}, SAMPLED, {"repetition_penalty": 1.3}], ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_scores_are_the_log_softmax_of_the_processed_logits(
    folders: tuple[Path, Path], judge: LlamaForCausalLM, asked: dict[str, object], acceptor: str
) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = SpeculativeGenerator(load(folders[1], slots=2), load(folders[0], slots=2), k=3, acceptor=acceptor)
    done = run(generator, PROMPTS, max_new_tokens=10, output_scores=True, **asked)
    assert done.logprobs is not None
    for prompt, text, logprobs in zip(PROMPTS, texts(done), done.logprobs, strict=True):
        exact = logits_of(judge, text)
        assert len(logprobs) == len(text) - len(prompt)
        for at, logprob in zip(range(len(prompt), len(text)), logprobs, strict=True):
            line = exact[at - 1 : at]
            if "repetition_penalty" in asked:
                line = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([text[:at]]), line)
            assert logprob == pytest.approx(float(line.log_softmax(-1)[0, text[at]]), abs=1e-4)
