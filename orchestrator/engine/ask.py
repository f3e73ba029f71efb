"""The keywords of one call of `sample` or `stream` as a value, and what is made of them before any work starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.core.detokenizer import Decodes
from paceline.core.errors import SamplingError
from paceline.decoder.decoder import CompiledDecoder
from paceline.engine import request, validation
from paceline.engine.request import InputIds, Request
from paceline.engine.stopping import Criterion, InNewText, StopStrings
from paceline.target.host_verifier import Processor
from paceline.text import processors

if TYPE_CHECKING:
    from transformers.generation.logits_process import LogitsProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """As documented at `paceline.sampler.Sampler.sample`."""

    input_ids: InputIds
    sequence_length: int | None = None
    max_new_tokens: int | None = None
    attention_mask: Tensor | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    do_sample: bool = False
    seed: int | Sequence[int] = 0
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: StopStrings = None
    tokenizer: Decodes | None = None
    stopping_criteria_list: Sequence[Criterion] | None = None
    logits_processor: Sequence[LogitsProcessor] | None = None
    no_repeat_ngram_size: int | None = None
    repetition_penalty: float | None = None
    use_speculation: bool | Sequence[bool] = True

    def requests(self, target: CompiledDecoder) -> list[Request]:
        """Checked requests, in row order.

        Raises:
            PromptError, SamplingError: something cannot be served.
        """
        self._check_types()
        rows = request.prompts(self.input_ids, self.attention_mask, vocab_size=target.config.vocab_size)
        if isinstance(self.seed, Sequence) and len(self.seed) != len(rows):
            raise SamplingError(f"seed has {len(self.seed)} entries for {len(rows)} prompts; give one each, or an int")
        if not isinstance(self.use_speculation, bool) and len(self.use_speculation) != len(rows):
            raise SamplingError(
                f"use_speculation has {len(self.use_speculation)} entries for {len(rows)} prompts; give one each"
            )
        return [self._request(index, row, target) for index, row in enumerate(rows)]

    def processor(self) -> Processor | None:
        """The processors asked for, as one."""
        made: Processor | None = processors.processor_list(  # type: ignore[assignment]  # its call is annotated wider
            self.logits_processor,
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
        )
        return made

    def _check_types(self) -> None:
        integers = (
            ("sequence_length", self.sequence_length),
            ("max_new_tokens", self.max_new_tokens),
            ("top_k", self.top_k),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size),
        )
        for name, value in integers:
            validation.integer(name, value)
        validation.flag("do_sample", self.do_sample)
        validation.number("temperature", self.temperature, optional=False)
        validation.number("top_p", self.top_p)
        validation.number("min_p", self.min_p)
        validation.number("repetition_penalty", self.repetition_penalty)
        validation.integers("seed", self.seed, optional=False)
        validation.integers("eos_token_id", self.eos_token_id, optional=True)
        stops = self.stop_strings
        validation.strings("stop_strings", stops.strings if isinstance(stops, InNewText) else stops)
        validation.flags("use_speculation", self.use_speculation)
        validation.callables("stopping_criteria_list", self.stopping_criteria_list)
        validation.callables("logits_processor", self.logits_processor)

    def _request(self, index: int, prompt: tuple[int, ...], target: CompiledDecoder) -> Request:
        length = request.total_length(
            len(prompt), self.sequence_length, self.max_new_tokens, n_positions=target.n_positions
        )
        own = request.sampling(
            index,
            do_sample=self.do_sample,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )
        limits = request.stopping(
            length,
            eos=self.eos_token_id,
            default_eos=target.config.eos_token_ids,
            stop_strings=self.stop_strings,
            tokenizer=self.tokenizer,
            criteria=self.stopping_criteria_list,
        )
        use_speculation = (
            self.use_speculation if isinstance(self.use_speculation, bool) else self.use_speculation[index]
        )
        return Request(index, prompt, own, limits, use_speculation)
