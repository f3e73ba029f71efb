"""`SpeculativeGenerator`: a draft that proposes and a target that decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import torch
from torch import Tensor

from paceline import build, warmup
from paceline.auto_drafter import make_drafter
from paceline.config import SpeculativeConfig
from paceline.core.drafter_statistics import DrafterCounts
from paceline.core.errors import ConfigurationError, SamplingError
from paceline.core.sampling import COMPILED_KINDS, known_kinds
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft_checks import make_rule
from paceline.engine.engine import ListQueue, RequestQueue
from paceline.engine.fit import DraftFit
from paceline.engine.request import InputIds, Request, SamplingParams
from paceline.engine.rounds import Rounds
from paceline.loadable import request_limits
from paceline.outputs import GenerationResult, RequestOutput, Statistics

if TYPE_CHECKING:
    from paceline.learner import Learner

log = logging.getLogger("paceline")


class SpeculativeGenerator:
    """Decodes several tokens per round.

    The tokens are those of plain decoding with the same seed, at any temperature, whatever the draft
    (``acceptor="match"``); ``acceptor="reject"`` preserves the target distribution but not the tokens, and accepts a
    little more. ``acceptor="typical"`` is LOSSY: above temperature 0 it preserves neither.

    draft    the drafter, in the grammar of `paceline.draft_spec`: a name with options ("ngram:prompt_lookup_max=4"), a
             folder, a mapping, a list of these; or an object: a decoder, a drafter, a function from ids to ids. None:
             plain decoding, with k + 1 steps in one graph
    target   the decoder whose output is generated
    verify_width  rows of the verification graph, at least k + 1, to compare generators at equal width; None = as the
                  drafter needs
    options  the fields of `paceline.config.SpeculativeConfig`: k, acceptor, exact, fused, ...

    Raises:
        PairingError: draft and target have different tokenizers or batch sizes.
        ConfigurationError: an option is out of range, or applies to a draft and there is none.
    """

    def __init__(
        self,
        draft: object,
        target: CompiledDecoder,
        *positional_k: int,
        verify_width: int | None = None,
        **options: Any,
    ) -> None:
        if len(positional_k) > 1 or (positional_k and "k" in options):
            raise ConfigurationError("k: expected one number after draft and target, got more; give the rest by name")
        options |= dict(zip(("k",), positional_k, strict=False))
        if not isinstance(target, CompiledDecoder):
            raise ConfigurationError(
                f"target: expected a decoder, got a {type(target).__name__}; load one with AutoDecoder.from_pretrained"
            )
        self.target, self.config = target, SpeculativeConfig(draft=draft, **options)
        self._rule = make_rule(self.config)
        self.drafter, drafts = make_drafter(self.config, target)
        self.decoders: list[CompiledDecoder] = [target, *drafts]
        self.learner: Learner | None = None
        if self.config.learn is not None and self.config.k != 0:
            from paceline.learner import Learner  # and training

            paths = [leaf.path for leaf in self.config.leaves()]
            self.learner = Learner(self.drafter, target, head=paths[0], folder=self.config.learn)
        self._last_holder = object()  # of the decoders, in the last call
        self._warned = False  # that values of sampling change nothing
        self.engine = build.engine(target, self.drafter, self.config, rule=self._rule, verify_width=verify_width)
        refusals = (refusal for one in self.decoders if (refusal := one.backend.sampling_refusal()) is not None)
        self.limits = replace(
            request_limits(target, self._rule),
            sampling_refusal=next(refusals, None),
            drafters=tuple(self.drafter.choice_counts),
            prediction_refusal=build.prediction_refusal(target, self.drafter, self.config, rule=self._rule),
        )
        config = target.config
        self._pad_token_id = config.pad_token_id if config.pad_token_id is not None else (*config.eos_token_ids, 0)[0]
        self.statistics = Statistics(acceptor=self._rule.name, lossless=self._rule.lossless)
        if not self._rule.lossless:
            log.warning("acceptor %r is lossy: the output does not follow the target's distribution", self._rule.name)

    @overload
    def sample(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        params: SamplingParams | None = None,
        *,
        attention_mask: Tensor | None = None,
        streamer: Streamer | None = None,
        return_dict: Literal[False] = False,
        **overrides: Any,
    ) -> Tensor: ...

    @overload
    def sample(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        params: SamplingParams | None = None,
        *,
        attention_mask: Tensor | None = None,
        streamer: Streamer | None = None,
        return_dict: Literal[True],
        **overrides: Any,
    ) -> GenerationResult: ...

    def sample(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        params: SamplingParams | None = None,
        *,
        attention_mask: Tensor | None = None,
        streamer: Streamer | None = None,
        return_dict: bool = False,
        **overrides: Any,
    ) -> Tensor | GenerationResult:
        """Continue prompts.

        input_ids        LongTensor [B, S], or lists of ids of unequal lengths; more prompts than slots queue
        sequence_length  as in `SamplingParams`
        params           sampling values; ``overrides`` replace some of its fields, or set them without it
        attention_mask   [B, S], 0 where ``input_ids`` is padding (left or right); without it every id is real
        streamer         Hugging Face streamer, for one prompt

        Returns LongTensor [B, <= sequence_length], or a `GenerationResult` with ``return_dict``.

        Raises:
            PromptError, SamplingError: before any work starts, prompts or values cannot be served; later, a processor
                or criterion cannot be used.
            DecoderBusyError: a decoder is in use.
        """
        if overrides.pop("top_p_min_tokens", 1) != 1:
            raise SamplingError("top_p_min_tokens: expected 1, which top_p always keeps, got another; omit it")
        params = SamplingParams.merge(params, overrides, sequence_length=sequence_length)
        ignored = [name for name in ("top_k", "top_p", "temperature") if name in overrides]
        if ignored and "do_sample" not in overrides and not params.do_sample and not self._warned:
            self._warned = True
            log.warning("%s without do_sample=True: decoding is greedy (transformers-neuronx samples)", ignored[0])
        requests = Request.batch(input_ids, params, self.limits, attention_mask=attention_mask)
        if streamer is not None:
            _check_streamer(streamer, len(requests))
        with (
            self._held() as (statistics, _),
            closing(self._run(ListQueue(requests), statistics)) as steps,
        ):
            outputs: Iterator[RequestOutput] = chain.from_iterable(steps)
            if streamer is not None:
                outputs = _feed(streamer, requests[0], outputs)
            pad = self._pad_token_id if params.pad_token_id is None else params.pad_token_id
            result = GenerationResult.collect(requests, outputs, pad_token_id=pad, statistics=statistics)
        return result if return_dict else result.sequences

    def stream(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        params: SamplingParams | None = None,
        *,
        attention_mask: Tensor | None = None,
        **overrides: Any,
    ) -> OutputStream:
        """Stream the tokens of `sample` as they are committed; `statistics` are those up to the last output.

        Bad input and a busy decoder raise in this call, not at the first output. The decoders are held until the stream
        is exhausted, closed or dropped.

        Raises:
            PromptError, SamplingError, DecoderBusyError: as `sample`.
        """
        params = SamplingParams.merge(params, overrides, sequence_length=sequence_length)
        requests = Request.batch(input_ids, params, self.limits, attention_mask=attention_mask)
        return self.serve(ListQueue(requests))

    def serve(self, queue: RequestQueue) -> OutputStream:
        """Serve a queue until it is empty and every request has finished.

        Requests that join later share rounds with those that are there, and get the same tokens as alone.

        Raises:
            DecoderBusyError: a decoder is in use.
        """

        def begin(statistics: Statistics) -> Generator[RequestOutput, None, None]:
            with closing(self._run(queue, statistics)) as steps:
                for outputs in steps:
                    yield from outputs

        return HeldStream(self, begin)

    def steps(self, queue: RequestQueue) -> StepStream:
        """Serve a queue as `serve`, with all outputs of a step together; see `paceline.engine.engine.Engine.run`."""
        return HeldStream(self, partial(self._run, queue))

    def compile(self, *, kinds: Sequence[str] = COMPILED_KINDS) -> None:
        """Make every graph that a call without logits processors needs, so that no call waits for one.

        kinds  of sampling: "greedy", "top-k" (1 to 256), "full" (other sampling) and "wide" (a larger top-k). Backends
               whose graphs differ by mode (xla, neuron) compile only these; the first call that needs another one
               compiles and logs it

        Raises:
            ConfigurationError: a kind is unknown, or there is none.
        """
        warmup.compile_graphs(self.engine, self.decoders, kinds=known_kinds(kinds))

    def _run(self, queue: RequestQueue, statistics: Statistics) -> Generator[list[RequestOutput], None, None]:
        """Run the engine; the head learns from the texts if it is to."""
        if self.learner is None:
            return self.engine.run(queue, statistics)
        return self.learner.run(self.engine, queue, statistics)

    @property
    def choice_counts(self) -> Mapping[str, DrafterCounts]:
        """Counts of each drafter of a choice since it was made, by its name; empty without a choice."""
        return self.drafter.choice_counts

    @property
    def draft_fit(self) -> DraftFit | None:
        """Whether the drafter fits the target, by its first drafts; None for one that may well miss."""
        rounds = self.engine.rounds
        return rounds.fit if isinstance(rounds, Rounds) else None

    @contextmanager
    def _held(self) -> Iterator[tuple[Statistics, Callable[[], None]]]:
        """Hold the decoders for one call. -> its statistics, and a function that adds the drafters' counts to them"""
        holder, last = object(), self._last_holder if self.config.prefix_caching else None
        with ExitStack() as stack:
            for decoder in self.decoders:
                stack.enter_context(decoder.held_by(holder, keeps_prompts_of=last))
            self._last_holder = holder
            self.statistics = statistics = Statistics(acceptor=self._rule.name, lossless=self._rule.lossless)
            before, chosen = self.drafter.health, self.drafter.choice_counts

            def note_drafters() -> None:
                after = self.drafter.health
                if before is not None and after is not None:
                    statistics.drafter_health = after.since(before)
                if chosen:
                    statistics.drafters = {name: one.since(chosen[name]) for name, one in self.choice_counts.items()}

            try:
                yield statistics, note_drafters
            finally:
                note_drafters()


Item = TypeVar("Item")


class HeldStream(Iterator[Item]):
    """Iterator over the items of a call. It holds the generator's decoders until it is exhausted, closed or dropped."""

    def __init__(
        self, generator: SpeculativeGenerator, begin: Callable[[Statistics], Generator[Item, None, None]]
    ) -> None:
        self._resources = ExitStack()
        statistics, self._note_drafters = self._resources.enter_context(generator._held())
        self._items = begin(statistics)

    def __next__(self) -> Item:
        try:
            item = next(self._items)
        except BaseException:
            self.close()
            raise
        self._note_drafters()  # the consumer of the last item may read the statistics before the call has ended
        return item

    def close(self) -> None:
        """End the call; its requests are given up."""
        self._items.close()
        self._resources.close()

    def __del__(self) -> None:
        if hasattr(self, "_items"):
            self.close()


OutputStream = HeldStream[RequestOutput]
"""Iterator over the outputs of a call."""

StepStream = HeldStream[list[RequestOutput]]
"""Iterator over the steps of a call, each a list of outputs."""


class Streamer(Protocol):
    """`transformers.generation.streamers.BaseStreamer`."""

    def put(self, value: Tensor) -> object: ...

    def end(self) -> object: ...


def _check_streamer(streamer: Streamer, rows: int) -> None:
    """Raise SamplingError for an object that is not a streamer, and for several rows: it could not distinguish them."""
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise SamplingError(
            f"streamer: expected an object with put(ids) and end(), got a {type(streamer).__name__}; pass another"
        )
    if rows != 1:
        raise SamplingError(
            f"streamer: expected one prompt, got {rows}; use `for event in generator.stream(...)`, whose events "
            "contain the row"
        )


def _feed(streamer: Streamer, request: Request, events: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """Pass events on and show them to the streamer; it is ended however the generation ends."""
    try:
        streamer.put(torch.tensor([request.prompt]))
        for event in events:
            for token in event.tokens:
                streamer.put(torch.tensor([token]))
            yield event
    finally:
        streamer.end()
