"""A call of `sample` and the texts of its result; no tests."""

from __future__ import annotations

from paceline import GenerationResult
from paceline.auto import Sampler


def run(sampler: Sampler, prompts: list[list[int]], **asked: object) -> GenerationResult:
    """The result of one call."""
    result = sampler.sample(prompts, return_dict=True, **asked)  # type: ignore[arg-type]
    assert isinstance(result, GenerationResult)
    return result


def texts(result: GenerationResult) -> list[list[int]]:
    """The texts, without padding."""
    return [row[:length].tolist() for row, length in zip(result.sequences, result.lengths, strict=True)]
