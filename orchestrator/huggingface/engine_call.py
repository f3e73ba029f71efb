"""A call of `generate` with speculation on Paceline's engine: requests from what `transformers` prepared, and its
output.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paceline.core.sampling import row_seed
from paceline.engine.engine import ListQueue
from paceline.engine.request import Request, SamplingParams
from paceline.generator import SpeculativeGenerator, Streamer

_ROW_BY_ROW = (
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
)
"""Processors that treat every row alike and separately."""

_WARPERS = (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)
"""Warpers that Paceline's sampling replaces, in this order."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """Arguments of a decoding method of `transformers`.

    input_ids   [R, S] int64, rows repeated for ``num_return_sequences``
    mask        [R, S] int64, 0 for padding, or None; longer if the sequences begin in a cache
    """

    input_ids: Tensor
    mask: Tensor | None
    processors: Sequence[LogitsProcessor]
    criteria: Sequence[StoppingCriteria]
    config: GenerationConfig
    streamer: Streamer | None = None

    @classmethod
    def of(cls, input_ids: Tensor, given: Mapping[str, Any]) -> PreparedCall:
        return cls(
            input_ids,
            given.get("attention_mask"),
            given["logits_processor"],
            given["stopping_criteria"],
            given["generation_config"],
            given.get("streamer"),
        )

    @property
    def real(self) -> Tensor:
        """Mask of the ids that are not padding. [R, S] bool"""
        return torch.ones_like(self.input_ids, dtype=torch.bool) if self.mask is None else self.mask != 0

    @property
    def keeps_scores(self) -> bool:
        config = self.config
        return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))

    def why_not(self) -> str | None:
        """Why the engine cannot do this as the loop of `transformers` does it; None if it can."""
        columns = self.input_ids.shape[1]  # newer versions drop a mask without padding, and keep its length
        length = getattr(self.config, "_mask_length", columns) if self.mask is None else self.mask.shape[1]
        if length != columns:
            return "the call has only the tokens after those in the cache"
        if len(self.input_ids) == 1:
            return None
        if self.streamer is not None:
            return "a streamer receives tokens of all rows at once"
        if self.keeps_scores:
            return "scores of several rows are requested"
        if any(type(processor) not in _ROW_BY_ROW for processor in self.processors):
            return "a logits processor may look at several rows at once"
        if any(type(rule) not in (MaxLengthCriteria, EosTokenCriteria) for rule in self.criteria):
            return "a stopping criterion may look at several rows at once"
        return None


def run(generator: SpeculativeGenerator, call: PreparedCall) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode with a generator. -> [R, longest] int64, rows padded on the right; or with scores, as the call asks.

    A call that samples takes its seed from PyTorch's generator, so that `torch.manual_seed` determines it.
    """
    config = call.config
    seed = int(torch.randint(0, 2**62, ())) if config.do_sample else 0
    records: tuple[list[Tensor], list[Tensor]] = ([], [])
    requests = [
        replace(_request(generator, call, row, seed=row_seed(seed, row), records=records), index=row)
        for row in range(len(call.input_ids))
    ]
    new: list[list[int]] = [[] for _ in requests]
    outputs = generator.serve(ListQueue(requests))
    try:
        for output in outputs:
            if output.error is not None:
                raise output.error
            new[output.index] += output.tokens
            if call.streamer is not None:
                for token in output.tokens:
                    call.streamer.put(torch.tensor([token]))
    finally:
        outputs.close()
        if call.streamer is not None:
            call.streamer.end()
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    longest = max(map(len, new))
    rows = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in new])
    sequences = torch.cat((call.input_ids, rows), 1)
    if not config.return_dict_in_generate:
        return sequences
    raw, processed = (tuple(record[:longest]) for record in records)
    kind: Any = GenerateDecoderOnlyOutput
    result: GenerateDecoderOnlyOutput = kind(
        sequences=sequences,
        scores=processed if config.output_scores else None,
        logits=raw if config.output_logits else None,
    )
    return result


def _request(
    generator: SpeculativeGenerator, call: PreparedCall, row: int, *, seed: int, records: tuple[list[Tensor], ...]
) -> Request:
    config, ids = call.config, call.input_ids[row]
    prompt = ids[call.real[row]]
    processors = [_of_row(processor, row) for processor in call.processors]
    if call.keeps_scores:
        draws: dict[str, float | int] = {}
        processors = [_Recorder(records[0], len(ids)), *processors, _Recorder(records[1], len(ids))]
    else:
        draws = _take_warpers(processors)
    eos: list[int] = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
    criteria = [rule for rule in call.criteria if type(rule) not in (MaxLengthCriteria, EosTokenCriteria)]
    padded = len(prompt) < len(ids)
    params = SamplingParams(
        max_new_tokens=config.max_length - len(ids),
        do_sample=bool(config.do_sample),
        seed=seed,
        eos_token_id=[token for token in eos if token >= 0],  # -1 is "none" to users of transformers
        logits_processor=[
            _WithPadding(processor, ids, len(prompt)) if padded else processor for processor in processors
        ]
        or None,
        stopping_criteria_list=[_WithPadding(rule, ids, len(prompt)) if padded else rule for rule in criteria] or None,
        **draws,  # type: ignore[arg-type]
    )
    return Request.batch([prompt.tolist()], params, generator.limits)[0]


def _of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """A processor for one row: a repetition penalty knows of every row where its padding ends."""
    padding = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(padding, Tensor):
        return processor
    single: Any = copy.copy(processor)
    single.prompt_ignore_length = padding[row : row + 1]
    result: LogitsProcessor = single
    return result


def _take_warpers(processors: list[LogitsProcessor]) -> dict[str, float | int]:
    """Take from the end of the list what our sampling does itself. -> its parameters"""
    parameters: dict[str, float | int] = {}
    place = len(_WARPERS)
    while processors and type(processors[-1]) in _WARPERS[:place]:
        warper = processors.pop()
        place = _WARPERS.index(type(warper))
        name = ("temperature", "top_k", "top_p", "min_p")[place]
        parameters[name] = getattr(warper, name)
    return parameters


class _WithPadding(LogitsProcessor, StoppingCriteria):
    """A processor or criterion that sees a row as `transformers` would show it, padding included."""

    def __init__(self, inner: LogitsProcessor | StoppingCriteria, ids: Tensor, prompt: int) -> None:
        self._inner, self._ids, self._prompt = inner, ids.unsqueeze(0), prompt

    def __call__(self, ids: Tensor, scores: Tensor | None) -> Tensor:
        result: Tensor = self._inner(torch.cat((self._ids, ids[:, self._prompt :]), 1), scores)
        return result


class _Recorder(LogitsProcessor):
    """Keeps the scores of every new token."""

    def __init__(self, record: list[Tensor], prompt: int) -> None:
        self._record, self._prompt = record, prompt

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        del self._record[ids.shape[1] - self._prompt :]  # a position that is checked again
        self._record.append(scores.clone())
        return scores
