"""`sample` and `stream`, with Hugging Face's keywords, for everything that can decode."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from paceline.build import CallOptions
from paceline.core.detokenizer import Decodes
from paceline.decoder.decoder import CompiledDecoder
from paceline.engine import validation
from paceline.engine.ask import Ask
from paceline.engine.engine import Engine, ListQueue, RequestQueue, run
from paceline.engine.request import InputIds, Request
from paceline.engine.stopping import Criterion, StopStrings
from paceline.outputs import FinishReason, GenerationResult, RequestOutput, Statistics
from paceline.text import streamers
from paceline.text.streamers import Streamer

if TYPE_CHECKING:
    from transformers.generation.logits_process import LogitsProcessor


class Sampler:
    """What `SpeculativeGenerator` and decoders share; they say which engine serves a call."""

    statistics: Statistics
    """Of the last call."""

    def sample(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        *,
        max_new_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        do_sample: bool = False,
        seed: int | Sequence[int] = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: StopStrings = None,
        tokenizer: Decodes | None = None,
        stopping_criteria_list: Sequence[Criterion] | None = None,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        no_repeat_ngram_size: int | None = None,
        repetition_penalty: float | None = None,
        streamer: Streamer | None = None,
        output_scores: bool = False,
        return_dict: bool = False,
        width: int | None = None,
        use_speculation: bool | Sequence[bool] = True,
    ) -> Tensor | GenerationResult:
        """Continue prompts.

        input_ids               LongTensor [B, S], or lists of ids of unequal lengths; more prompts than slots queue
        sequence_length         most tokens of a text, prompt included; max_new_tokens without it; the smaller holds
        attention_mask          [B, S], 0 where input_ids is padding (left or right); without it every id is real
        temperature, top_k, top_p, min_p, do_sample   as in Hugging Face; greedy unless ``do_sample``
        seed                    row b draws with seed + b; or one seed for every row
        eos_token_id            default: the checkpoint's; [] for none
        pad_token_id            behind shorter rows; default: the checkpoint's, else its first eos id, else 0
        stop_strings            need ``tokenizer``; the token that completes one is kept; see `stopping.InNewText`
        stopping_criteria_list  Hugging Face criteria, called once per new token with ids [1, length]
        logits_processor        Hugging Face processors, called once per decided token, on the host
        streamer, output_scores Hugging Face streamer, one prompt; log-probabilities of new tokens (``return_dict``)
        use_speculation               False, or one entry for every prompt: draft nothing for it
        width                   rows of the verifying graph, at least k + 1 (to compare runs at equal width)

        Returns LongTensor [B, <= sequence_length], or a `GenerationResult` with ``return_dict``. Raises PromptError,
        SamplingError or ConfigurationError before any work starts; DecoderBusyError if a decoder is in use.
        """
        ask = Ask(
            input_ids=input_ids, sequence_length=sequence_length, max_new_tokens=max_new_tokens,
            attention_mask=attention_mask, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            do_sample=do_sample, seed=seed, eos_token_id=eos_token_id, stop_strings=stop_strings,
            tokenizer=tokenizer, stopping_criteria_list=stopping_criteria_list, logits_processor=logits_processor,
            no_repeat_ngram_size=no_repeat_ngram_size, repetition_penalty=repetition_penalty,
            use_speculation=use_speculation,
        )  # fmt: skip
        requests = ask.requests(self._decoders()[0])
        validation.integer("pad_token_id", pad_token_id)
        streamers.check(streamer, len(requests))
        with closing(self.serve(ListQueue(requests), CallOptions(ask.processor(), output_scores, width))) as events:
            shown = streamers.feed(streamer, requests[0], events)
            result = self._collect(requests, shown, pad=pad_token_id, scores=output_scores)
        return result if return_dict else result.sequences

    def stream(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        *,
        max_new_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        do_sample: bool = False,
        seed: int | Sequence[int] = 0,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: StopStrings = None,
        tokenizer: Decodes | None = None,
        stopping_criteria_list: Sequence[Criterion] | None = None,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        no_repeat_ngram_size: int | None = None,
        repetition_penalty: float | None = None,
        output_scores: bool = False,
        width: int | None = None,
        use_speculation: bool | Sequence[bool] = True,
    ) -> Iterator[RequestOutput]:
        """The tokens of `sample`, as they are committed; `statistics` is complete when the iterator is done.

        Bad input and a busy decoder raise here, not at the first event. The decoders are held from here on until the
        iterator is done, closed or dropped.
        """
        ask = Ask(
            input_ids=input_ids, sequence_length=sequence_length, max_new_tokens=max_new_tokens,
            attention_mask=attention_mask, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            do_sample=do_sample, seed=seed, eos_token_id=eos_token_id, stop_strings=stop_strings,
            tokenizer=tokenizer, stopping_criteria_list=stopping_criteria_list, logits_processor=logits_processor,
            no_repeat_ngram_size=no_repeat_ngram_size, repetition_penalty=repetition_penalty,
            use_speculation=use_speculation,
        )  # fmt: skip
        requests = ask.requests(self._decoders()[0])
        return self.serve(ListQueue(requests), CallOptions(ask.processor(), output_scores, width))

    def _decoders(self) -> list[CompiledDecoder]:
        """The decoders a generation holds, the target first."""
        raise NotImplementedError

    def _engine(self, demands: CallOptions) -> Engine:
        """A fresh engine for one call."""
        raise NotImplementedError

    def _fresh(self) -> Statistics:
        """Empty statistics, with what is known before anything is decoded."""
        return Statistics()

    def serve(self, door: RequestQueue, demands: CallOptions) -> Generator[RequestOutput, None, None]:
        """What comes through a door is served, until nobody waits and all are done.

        The decoders are held from now on, until the events are at an end, closed or dropped. Requests that join later
        share rounds with those that are there, and have the same tokens as alone.
        """
        events = self._hold(self._engine(demands), door)
        next(events)  # a generator that has not begun would not run its clean-up when it is closed or dropped
        return cast("Generator[RequestOutput, None, None]", events)

    def _hold(self, engine: Engine, door: RequestQueue) -> Generator[RequestOutput | None, None, None]:
        """None when the decoders are held, then the events."""
        with ExitStack() as stack:
            for decoder in self._decoders():
                stack.enter_context(decoder.held_by(engine))
            self.statistics = self._fresh()
            yield None
            yield from run(engine, door, self.statistics)

    def _collect(
        self, requests: list[Request], events: Iterator[RequestOutput], *, pad: int | None, scores: bool
    ) -> GenerationResult:
        texts = [list(request.prompt) for request in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        reasons: list[FinishReason] = ["length"] * len(requests)
        for event in events:
            texts[event.index] += event.tokens
            logprobs[event.index] += event.logprobs or ()
            reasons[event.index] = event.finish_reason or reasons[event.index]
        config = self._decoders()[0].config
        if pad is None:
            pad = config.pad_token_id if config.pad_token_id is not None else (*config.eos_token_ids, 0)[0]
        longest = max(len(text) for text in texts)
        rows = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
        lengths = [len(text) for text in texts]
        return GenerationResult(rows, lengths, reasons, logprobs if scores else None, self.statistics)
