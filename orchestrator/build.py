"""Puts concrete parts together: a checkpoint becomes a decoder; target, drafter and configuration an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TypeVar

import torch
from torch import nn

from paceline.config import SpeculativeConfig
from paceline.core.acceptance.base import AcceptanceRule, keeps_tokens
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, TraceableDrafter
from paceline.core.types import DraftShape
from paceline.decoder import environment, memory
from paceline.decoder.backends.base import check_formats, make
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import check_width
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.draft.per_request import PerRequestDrafter
from paceline.draft_checks import check_trees
from paceline.engine.adaptive import DraftLengthController, DraftLengthPolicy
from paceline.engine.batch import RoundShape, Slot
from paceline.engine.engine import Engine
from paceline.engine.fit import DraftFit
from paceline.engine.rounds import RoundPlan, Rounds
from paceline.loadable import Loadable
from paceline.target.verifier import CompiledVerifier

log = logging.getLogger("paceline")

_UNDRAFTED_STEPS = 5
"""Plain steps in one graph while adaptive drafting pauses. More save little, and steps after the end of a sequence are
wasted."""

_A_THREAD = 1 << 26

Decoder = TypeVar("Decoder", bound=CompiledDecoder)
Progress = Callable[[int, int], None]


def load(found: Loadable, progress: Progress | None = None, *, kind: type[Decoder]) -> Decoder:
    """Load what was found to be loadable as a decoder of ``kind``; errors as of `AutoDecoder.from_pretrained`."""
    folder, config, options = found.folder, found.config, found.options
    assert folder is not None, "of a file"
    shard = Shard(config, options.layout)
    asked = options.load
    backend = make(asked.backend, asked.tp_degree, asked.quantization, kv_cache_dtype=asked.kv_cache_dtype)
    if not backend.device_state:  # its state stays in this machine's memory
        memory.check_cache(shard, options, memory.machine_bytes())
    with _few_threads(config):
        weights = load_weights(
            folder,
            config,
            options.dtype,
            progress=progress,
            shard=shard,
            quantization=asked.quantization,
            modules_to_not_convert=asked.modules_to_not_convert,
            blocks=BACKENDS[asked.backend].blocks,
        )
        check_formats(asked.backend, weights.values())
        decoder = kind(config, options, weights, backend=backend)
    backend.attach(decoder.body, os.fspath(folder))
    decoder.folder = folder
    return decoder


@contextmanager
def _few_threads(config: ModelConfig) -> Iterator[None]:
    """Load with one thread per `_A_THREAD` numbers: with small tensors, threads wait longer than they compute, and idle
    ones spin. Afterwards `environment.threads` of them compute.
    """
    usual = torch.get_num_threads()
    if not environment.threads_are_set(usual):
        usual = environment.threads(usual)
    numbers = sum(prod(spec.shape) for spec in registry.family(config.model_type).tensors(config).values())
    torch.set_num_threads(min(usual, 1 + numbers // _A_THREAD))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def engine(
    target: CompiledDecoder,
    drafter: Drafter,
    config: SpeculativeConfig,
    *,
    rule: AcceptanceRule,
    verify_width: int | None = None,
    controller: DraftLengthController | None = None,
) -> Engine:
    """Build an engine of these parts.

    verify_width  rows of the verification graph; None = as the drafter needs
    controller    chooses the length of drafts; None = one for the lengths in ``config.k``, if there are several

    Raises:
        ConfigurationError: the acceptance rule does not fit the drafter, the drafter cannot be fused or shortened, or
            a proposal does not fit the width.
    """
    check_width(drafter.draft_shape.num_draft_tokens + 1)
    lengths = config.draft_lengths(drafter.draft_shape.depth, target.backend.draft_lengths)
    if controller is None and lengths is not None:
        controller = DraftLengthController(lengths)
    return _Builder(target, drafter, config, rule=rule, verify_width=verify_width, controller=controller).engine()


def prediction_refusal(
    target: CompiledDecoder, drafter: Drafter, config: SpeculativeConfig, *, rule: AcceptanceRule
) -> str | None:
    """Return why no prediction can be drafted from; None = it can."""
    if not keeps_tokens(rule):
        return (
            "prediction: expected acceptor='match', the only rule under which a prediction changes no token, got "
            f"{rule.name!r}; omit the prediction"
        )
    if drafter.draft_shape.num_draft_tokens:
        return None
    if not config.max_k:
        return "prediction: expected k of at least 1, got 0; raise k, or omit the prediction"
    if config.exact and not target.body.kernels.batch_invariant:
        return (
            "prediction: expected a draft, without which rounds of this backend have one row, got None; give one, "
            "such as 'suffix', or omit the prediction"
        )
    return None


class _Builder:
    """Builds an engine.

    slots      the request of every slot, or None; shared by the engine and all verifiers
    shape      the proposals that the verification graph takes
    one_width  every round has that width, even with a shorter draft
    fixed      a round without a proposal uses that graph too
    own        every draft length has separate graphs and commits of its width
    """

    def __init__(
        self,
        target: CompiledDecoder,
        drafter: Drafter,
        config: SpeculativeConfig,
        *,
        rule: AcceptanceRule,
        verify_width: int | None,
        controller: DraftLengthController | None,
    ) -> None:
        self.target, self.drafter, self.config, self.rule, self.controller = target, drafter, config, rule, controller
        self.slots: list[Slot | None] = [None] * target.batch_size
        shape = drafter.draft_shape if verify_width is None else _widened(drafter.draft_shape, verify_width)
        check_trees(rule, shape)
        lengths = () if controller is None else controller.draft_lengths
        if lengths and drafter.draft_shape.num_draft_tokens and lengths[-1] > drafter.draft_shape.depth:
            raise ConfigurationError(
                f"k: expected at most {drafter.draft_shape.depth}, the most that {type(drafter).__name__} drafts, "
                f"got {lengths[-1]}; lower it"
            )
        # If a row's bits depend on the number of rows, every round of an exact generator has the same number.
        self.shape, self.can_fuse = shape, config.fused is not False and isinstance(drafter, TraceableDrafter)
        if isinstance(drafter, TraceableDrafter):
            # An exporter cannot follow changes to one cache through two modules.
            shared = drafter.state is target.body and target.backend.device_state
            self.can_fuse = self.can_fuse and not shared and not _on_other_ranks(drafter.state, target)
        self.one_width = config.exact and shape.is_chain and not target.body.kernels.batch_invariant
        self.fixed = verify_width is not None or self.one_width
        # With two graphs a drafter may propose nothing, and every width would need a narrow graph for that.
        separate = controller is not None and not self.fixed and shape.is_chain and drafter.reads is None
        self.own = separate and self.can_fuse
        self.plain_steps = config.max_k + 1 if not config.draft and verify_width is None else 1
        self.width = self.plain_steps if self.plain_steps > 1 else shape.depth + 1

    def engine(self) -> Engine:
        drafter, target, config = self.drafter, self.target, self.config
        policy, rest, most = None, None, drafter.draft_shape.depth
        if self.plain_steps > 1:
            most = self.plain_steps - 1
            plans = {most: self._plain(self.plain_steps, self.width)}
        elif self.controller is None or not drafter.draft_shape.num_draft_tokens:
            plans = {most: self._plan(most)}
        else:
            plans = {length: self._plan(length) for length in self.controller.draft_lengths}
            batch_for = target.batch_for if len(target.batch_buckets) > 1 else None
            policy = DraftLengthPolicy(
                self.controller, batch_for=batch_for, competes=target.body.skips_idle and drafter.draft_shape.is_chain
            )
            if not self.fixed and drafter.reads is None and keeps_tokens(self.rule):
                steps = min(_UNDRAFTED_STEPS, self.width)
                rest = self._plain(steps, steps if self.own else self.width)
        predicts = prediction_refusal(target, drafter, config, rule=self.rule) is None
        # A drafter without causes may well miss, and synthetic acceptance says nothing of it.
        watched = drafter.misfit_causes and self.rule.name != "synthetic"
        rounds = Rounds(
            drafter,
            plans,
            self.slots,
            policy=policy,
            rest=rest,
            on_host=self._on_host,
            predicted=self._predicted if predicts else None,
            fit=DraftFit(type(drafter).__name__, drafter.misfit_causes) if watched else None,
        )
        chunk, buckets = target.options.chunks[-1], (target.kv_buckets, target.batch_buckets)
        shape = RoundShape(most, self.width, drafter.max_positions, *buckets, chunk)
        return Engine(self.slots, rounds, shape, target.prefix_cache if config.prefix_caching else None)

    def _plan(self, length: int) -> RoundPlan:
        drafter, full = self.drafter, self.drafter.draft_shape.depth
        short = drafter if length in (0, full) else drafter.shortened(length)
        as_drafted = self.own or not (self.one_width or short is drafter)
        width = length + 1 if self.own else self.width
        shape = DraftShape.chain(length) if as_drafted else self.shape
        verifier = self._verifier(shape, width, depths=() if self.fixed else short.draft_lengths)
        fused = self._fused(short, shape)
        return RoundPlan(
            short,
            verifier,
            width,
            drafts=length > 0,
            reads=drafter.draft_shape.num_draft_tokens > 0,
            fused=fused if length else None,
            alone=drafter.reads is None or not self.target.backend.device_state,
        )

    def _plain(self, steps: int, width: int) -> RoundPlan:
        """Return the plan of rounds of plain steps. The drafter, if there is one, sees their commits, so that it can
        continue later.
        """
        verifier = self._verifier(DraftShape.chain(0), width)
        verifier.steps = steps
        return RoundPlan(
            self.drafter, verifier, width, drafts=False, reads=self.drafter.draft_shape.num_draft_tokens > 0
        )

    def _predicted(self) -> RoundPlan:
        # If nothing else drafts: the number of tokens that plain steps in one graph commit.
        shape = self.shape if self.shape.num_draft_tokens else DraftShape.chain(self.width - 1)
        drafter = PerRequestDrafter(self.drafter, self.slots, draft_shape=shape)
        return RoundPlan(drafter, self._verifier(shape, self.width), self.width)

    def _on_host(self) -> RoundPlan:
        """The plan for requests some of which are decided on the host."""
        from paceline.target.host_verifier import HostVerifier  # seldom needed

        if self.controller is not None or (
            self.config.fused is not False and isinstance(self.drafter, TraceableDrafter)
        ):
            level = logging.WARNING if self.config.fused else logging.INFO  # an option by name cannot be applied
            log.log(level, "processors and scores need the host at every token: two graphs of one length, not one")
        verifier = HostVerifier(
            self.target,
            self.shape,
            rule=self.rule,
            wide=self.fixed,
            reads=self.drafter.reads,
            width=self.width,
            slots=self.slots,
        )
        return RoundPlan(PerRequestDrafter(self.drafter, self.slots, draft_shape=self.shape), verifier, self.width)

    def _verifier(self, shape: DraftShape, width: int, *, depths: Sequence[int] = ()) -> CompiledVerifier:
        return CompiledVerifier(
            self.target,
            shape,
            rule=self.rule,
            wide=self.fixed,
            reads=self.drafter.reads,
            width=width,
            slots=self.slots,
            depths=depths,
        )

    def _fused(self, drafter: Drafter, shape: DraftShape) -> TraceableDrafter | None:
        """Return the drafter if it shares a graph with a verifier of that shape."""
        chains = drafter.draft_shape.is_chain and shape.is_chain
        if self.can_fuse and (chains or drafter.draft_shape == shape):
            assert isinstance(drafter, TraceableDrafter)
            return drafter
        if not self.config.fused:
            return None
        if isinstance(drafter, TraceableDrafter) and _on_other_ranks(drafter.state, self.target):
            raise ConfigurationError(
                "fused: expected the same tp_degree for draft and target, which share a graph, got different ones; "
                "load both with one, or omit fused"
            )
        raise ConfigurationError(f"fused: {type(drafter).__name__} cannot share a graph with the target; omit fused")


def _on_other_ranks(state: nn.Module, target: CompiledDecoder) -> bool:
    return isinstance(state, ModelWithCache) and state.group != target.body.group


def _widened(shape: DraftShape, width: int) -> DraftShape:
    if isinstance(width, bool) or not isinstance(width, int):
        raise ConfigurationError(f"verify_width: expected an integer or None, got {width!r}; correct it")
    nodes = shape.num_draft_tokens
    if width == nodes + 1:
        return shape
    if not shape.is_chain:
        raise ConfigurationError(
            f"verify_width: expected None for a drafter of trees (this one has {nodes} nodes), got {width}; omit it"
        )
    if width < nodes + 1:
        raise ConfigurationError(
            f"verify_width: expected at least {nodes} draft tokens and one more, got {width}; raise it"
        )
    return DraftShape.chain(width - 1)
