"""A tiny network decoded by Paceline and by transformers, as an independent judge of caches and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from paceline import FunctionDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.decoder import steps
from tests.fakes_models import V, load, logits_of, network, saved
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


def check_cache(decoder: SamplingDecoder, judge: LlamaForCausalLM, text: list[int], places: tuple[int, ...]) -> None:
    """Rows of a cache are those of the text, by the logits that a last token gets from them."""
    exact = logits_of(judge, text)
    for at in places:  # from the end, since reading writes
        tokens, row = torch.tensor([text[at : at + 1]], dtype=torch.int32), torch.tensor([at], dtype=torch.int32)
        got = steps.window(decoder, tokens, row, bucket=decoder.bucket_for(at + 1))[0]
        torch.testing.assert_close(got[0, 0], exact[at], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("asked", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_both_caches_after_drafts_equal_those_of_the_text(
    folders: tuple[Path, Path], judge: LlamaForCausalLM, asked: dict[str, object]
) -> None:
    target, draft, prompt = load(folders[0]), load(folders[1]), PROMPTS[0]
    wanted = texts(run(SpeculativeGenerator(None, target), [prompt], max_new_tokens=40, **asked))
    for source in (FunctionDrafter(coin(wanted, 4, vocab_size=V, alpha=0.6, seed=1), 4), draft):
        done = run(SpeculativeGenerator(source, target, k=4), [prompt], max_new_tokens=40, **asked)
        assert 0 < done.statistics.num_accepted_tokens < done.statistics.num_draft_tokens
        (text,) = texts(done)
        check_cache(target, judge, text, (len(text) - 1, len(text) - 6, len(prompt) + 1))
    # What the very last rounds committed is never read by a draft.
    check_cache(draft, LlamaForCausalLM.from_pretrained(folders[1]).eval(), text, (len(text) - 8,))


@pytest.mark.parametrize("asked", [{}, SAMPLED, {"repetition_penalty": 1.3}], ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_scores_are_the_log_softmax_of_the_processed_logits(
    folders: tuple[Path, Path], judge: LlamaForCausalLM, asked: dict[str, object], acceptor: str
) -> None:
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


def test_speculation_leaves_the_draft_model_unchanged(folders: tuple[Path, Path]) -> None:
    """Assisted generation of transformers 5.24.0 changes its settings for good."""
    draft, target = (load(folder) for folder in folders[::-1])
    before, said = {name: x.clone() for name, x in draft.body.named_parameters()}, (draft.config, draft.options)
    made = SpeculativeGenerator(draft, target, k=3, acceptor="reject")
    asked = {"top_k": 3, "temperature": 0.7, "repetition_penalty": 1.3, "min_tokens": 2, "eos_token_id": 5}
    run(made, [[1, 2]], do_sample=True, max_new_tokens=8, **asked)
    after = dict(draft.body.named_parameters())
    assert before and all(torch.equal(value, after[name]) for name, value in before.items())
    assert (draft.config, draft.options) == said


MORE = [[(3 * i * i + i * start) % V for i in range(length)] for start, length in ((1, 40), (5, 16), (2, 3), (7, 1))]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(
    ("backend", "draft", "options"),
    [
        ("native", None, {}),
        ("native", "ngram", {"k": 3}),
        ("native", "ngram", {"k": "auto", "prefix_caching": True}),
        ("eager", "suffix", {"k": 2}),
    ],
)
def test_prompt_logprobs_equal_one_forward_pass(
    folders: tuple[Path, Path],
    judge: LlamaForCausalLM,
    backend: str,
    draft: str | None,
    options: dict[str, Any],
    slots: int,
) -> None:
    generator = SpeculativeGenerator(draft, load(folders[0], slots=slots, backend=backend), **options)
    asked: dict[str, Any] = {"max_new_tokens": 6, "return_dict": True}
    plain = generator.sample(MORE, **asked)
    for _ in range(2):  # with prefix caching the second call finds the prompts
        found: Any = generator.sample(MORE, prompt_logprobs=2, logprobs=2, **asked)
        assert torch.equal(found.sequences, plain.sequences), "to ask changes no token"
        for prompt, scored in zip(MORE, found.prompt_logprobs, strict=True):
            assert [one.token for one in scored] == prompt[1:]
            expected = logits_of(judge, prompt).log_softmax(-1)
            for place, one in enumerate(scored):
                assert one.logprob == pytest.approx(float(expected[place, one.token]), abs=1e-4)
                best = expected[place].topk(2).values.tolist()
                assert [value for _, value in one.top] == pytest.approx(best, abs=1e-4)
                assert (one.rank == 1) == (one.logprob == max(value for _, value in one.top))
    assert plain.prompt_logprobs is None
