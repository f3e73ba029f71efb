"""Log-probabilities of a prompt's tokens are those of one forward pass, one for each token but the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import AutoDecoder, SamplingParams, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import SamplingError
from tests.fakes_models import POSITIONS, V, load, logits_of, network, saved

MADE = network()
PROMPTS = [[(3 * i * i + i * start) % V for i in range(length)] for start, length in ((1, 40), (5, 16), (2, 3), (7, 1))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MADE, tmp_path_factory.mktemp("tiny"))


def native(folder: Path, slots: int) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(
        folder, batch_size=slots, n_positions=POSITIONS, context_length_estimate=[8, 16], amp="f32", backend="native"
    )


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(
    ("backend", "draft", "options"),
    [
        (native, None, {}),
        (native, "ngram", {"k": 3}),
        (native, "ngram", {"k": "auto", "prefix_caching": True}),
        (load, "suffix", {"k": 2}),
    ],
)
def test_prompt_logprobs_equal_one_forward_pass(
    folder: Path, backend: Any, draft: str | None, options: dict[str, Any], slots: int
) -> None:
    generator = SpeculativeGenerator(draft, backend(folder, slots=slots), **options)
    asked: dict[str, Any] = {"max_new_tokens": 6, "return_dict": True}
    plain = generator.sample(PROMPTS, **asked)
    for _ in range(2):  # with prefix caching the second call finds the prompts
        found: Any = generator.sample(PROMPTS, prompt_logprobs=2, logprobs=2, **asked)
        assert torch.equal(found.sequences, plain.sequences), "to ask changes no token"
        for prompt, scored in zip(PROMPTS, found.prompt_logprobs, strict=True):
            assert [one.token for one in scored] == prompt[1:]
            expected = logits_of(MADE, prompt).log_softmax(-1)
            for place, one in enumerate(scored):
                assert one.logprob == pytest.approx(float(expected[place, one.token]), abs=1e-4)
                best = expected[place].topk(2).values.tolist()
                assert [value for _, value in one.top] == pytest.approx(best, abs=1e-4)
                assert (one.rank == 1) == (one.logprob == max(value for _, value in one.top))
    assert plain.prompt_logprobs is None


def test_the_number_of_prompt_logprobs_is_checked() -> None:
    with pytest.raises(SamplingError, match="prompt_logprobs: expected a number from 0 to 20, got 21"):
        SamplingParams(prompt_logprobs=21)
