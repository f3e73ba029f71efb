"""Puts concrete parts together: from a target, a drafter and a configuration to an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from paceline.config import SpeculativeConfig
from paceline.core.acceptance.base import AcceptanceRule, keeps_tokens
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, TraceableDrafter
from paceline.core.types import DraftShape
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache
from paceline.draft.row_drafting import RowDrafter
from paceline.draft_checks import check_trees
from paceline.engine.adaptive import DraftLengthController, Pace
from paceline.engine.batch import RoundShape, Slot
from paceline.engine.engine import Engine
from paceline.engine.fit import DraftFit
from paceline.engine.rounds import RoundPlan, Rounds
from paceline.target.autoregressive import AutoregressiveDecoder
from paceline.target.verifier import CompiledVerifier

log = logging.getLogger("paceline")

_UNDRAFTED_STEPS = 5
"""Plain steps in one graph while adaptive drafting pauses. More save little, and steps after the end of a sequence are
wasted."""


def engine(
    target: CompiledDecoder,
    drafter: Drafter,
    config: SpeculativeConfig,
    *,
    rule: AcceptanceRule,
    verify_width: int | None = None,
) -> Engine:
    """Build an engine of these parts. ``verify_width``: rows of the verification graph; None = as the drafter needs.

    Raises:
        ConfigurationError: the acceptance rule does not fit the drafter, the drafter cannot be fused or shortened, or
            a proposal does not fit the width.
    """
    builder = round_builder(target, drafter, config, rule=rule, verify_width=verify_width)
    slots: list[Slot | None] = [None] * target.batch_size
    rounds, shape = builder.build(slots)
    return Engine(slots, rounds, shape, target.read_prompts if config.prefix_caching else None)


def round_builder(
    target: CompiledDecoder,
    drafter: Drafter,
    config: SpeculativeConfig,
    *,
    rule: AcceptanceRule,
    verify_width: int | None = None,
) -> RoundBuilder:
    """Return the builder of an engine's rounds."""
    target.check_width(drafter.draft_shape.num_draft_tokens + 1)
    lengths = config.draft_lengths(drafter.draft_shape.depth, target.backend.draft_lengths)
    return RoundBuilder(
        target,
        drafter,
        rule,
        exact=config.exact,
        fused=config.fused,
        controller=None if lengths is None else DraftLengthController(lengths),
        plain_steps=config.max_k + 1 if not config.draft else 1,
        predicts=prediction_refusal(target, drafter, config, rule=rule) is None,
        verify_width=verify_width,
    )


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


@dataclass(frozen=True, slots=True)
class RoundBuilder:
    """Builds the rounds of an engine.

    exact        rounding does not depend on proposals
    fused        draft and verify in one graph; None = if possible
    controller   chooses the length of drafts; None = always that of the drafter
    plain_steps  steps in one graph, if nothing is drafted
    predicts     requests may have a prediction to draft from
    verify_width  rows of the verification graph; None = as the drafter needs
    """

    target: CompiledDecoder
    drafter: Drafter
    rule: AcceptanceRule
    exact: bool
    fused: bool | None
    controller: DraftLengthController | None
    plain_steps: int
    predicts: bool
    verify_width: int | None = None

    def build(self, slots: Sequence[Slot | None]) -> tuple[Rounds, RoundShape]:
        """The rounds of requests in these slots, and what a batch must know of them."""
        drafter, target, widths = self.drafter, self.target, self._widths(self.verify_width)
        self._check(widths.shape)
        depth, pace, rest = drafter.draft_shape.depth, None, None
        shape = RoundShape(depth, widths.commit, drafter.max_positions, target.kv_buckets, target.batch_buckets)
        if self.plain_steps > 1 and self.verify_width is None:
            shape = replace(shape, max_accept=self.plain_steps - 1, width=self.plain_steps)
            plans = {shape.max_accept: self._plain(self.plain_steps, shape.width, slots)}
        elif self.controller is None or not drafter.draft_shape.num_draft_tokens:
            plans = {depth: self._plan(depth, widths, slots)}
        else:
            plans = {length: self._plan(length, widths, slots) for length in self.controller.draft_lengths}
            pace = Pace(self.controller, lines=target.lines_for if len(target.batch_buckets) > 1 else None)
            if not widths.fixed and drafter.reads is None and keeps_tokens(self.rule):
                steps = min(_UNDRAFTED_STEPS, widths.commit)
                rest = self._plain(steps, steps if widths.own else widths.commit, slots)
        rounds = Rounds(
            drafter,
            plans,
            slots,
            pace=pace,
            rest=rest,
            on_host=lambda: self._on_host(widths, slots, shape.width),
            predicted=(lambda: self._predicted(widths, slots, shape.width)) if self.predicts else None,
            fit=self._fit(),
        )
        return rounds, shape

    def _fit(self) -> DraftFit | None:
        """Return a watch on the drafter's fit; None: it may well miss, or tokens are accepted at random."""
        drafter = self.drafter
        watched = drafter.misfit_causes and self.rule.name != "synthetic"
        return DraftFit(type(drafter).__name__, drafter.misfit_causes) if watched else None

    def _plan(self, length: int, widths: _Widths, slots: Sequence[Slot | None]) -> RoundPlan:
        """The plan of rounds that draft ``length`` tokens."""
        drafter, full = self.drafter, self.drafter.draft_shape.depth
        short = drafter if length in (0, full) else drafter.shortened(length)
        as_drafted = widths.own or not (widths.one_width or short is drafter)
        commit = length + 1 if widths.own else widths.commit
        verifier = CompiledVerifier(
            self.target,
            DraftShape.chain(length) if as_drafted else widths.shape,
            rule=self.rule,
            wide=widths.fixed,
            reads=drafter.reads,
            width=commit,
            depths=() if widths.fixed else short.draft_lengths,
            slots=slots,
        )
        alone = drafter.reads is None or not self.target.backend.device_state
        fused = self._is_fused(short, verifier.draft_shape)
        return RoundPlan(short, verifier, commit, drafts=length > 0, fused=fused and length > 0, alone=alone)

    def _plain(self, steps: int, width: int, slots: Sequence[Slot | None]) -> RoundPlan:
        """Return the plan of rounds of plain steps. The drafter, if there is one, sees their commits, so that it can
        continue later.
        """
        verifier = AutoregressiveDecoder(self.target, steps, width=width, slots=slots)
        return RoundPlan(self.drafter, verifier, width, drafts=False)

    def _predicted(self, widths: _Widths, slots: Sequence[Slot | None], width: int) -> RoundPlan:
        """The plan for requests some of which bring a prediction."""
        # If nothing else drafts: the number of tokens that plain steps in one graph commit.
        shape = widths.shape if widths.shape.num_draft_tokens else DraftShape.chain(width - 1)
        verifier = CompiledVerifier(
            self.target, shape, rule=self.rule, wide=widths.fixed, reads=self.drafter.reads, width=width, slots=slots
        )
        return RoundPlan(RowDrafter(self.drafter, slots, draft_shape=shape), verifier, width)

    def _on_host(self, widths: _Widths, slots: Sequence[Slot | None], width: int) -> RoundPlan:
        """The plan for requests some of which are decided on the host."""
        from paceline.target.host_verifier import HostVerifier  # seldom needed

        if self.controller is not None or (self.fused is not False and isinstance(self.drafter, TraceableDrafter)):
            level = logging.WARNING if self.fused else logging.INFO  # an option given by name cannot be applied
            log.log(level, "processors and scores need the host at every token: two graphs of one length, not one")
        shape = widths.shape
        verifier = HostVerifier(
            self.target, shape, rule=self.rule, wide=widths.fixed, slots=slots, reads=self.drafter.reads, width=width
        )
        return RoundPlan(RowDrafter(self.drafter, slots, draft_shape=shape), verifier, width)

    def _widths(self, width: int | None) -> _Widths:
        """Return the widths of graphs and commits."""
        drafter = self.drafter
        shape = drafter.draft_shape if width is None else _widened(drafter.draft_shape, width)
        # If a row's bits depend on the number of rows, every round of an exact generator has the same number.
        one_width = self.exact and shape.is_chain and not self.target.body.kernels.batch_invariant
        fixed = width is not None or one_width
        # With two graphs a drafter may propose nothing, and every width would need a narrow graph for that.
        own = self.controller is not None and not fixed and shape.is_chain and drafter.reads is None
        return _Widths(shape, one_width=one_width, fixed=fixed, own=own and self._can_fuse())

    def _check(self, shape: DraftShape) -> None:
        """Refuse what the acceptance rule or the drafter cannot do."""
        rule, drafter = self.rule, self.drafter
        check_trees(rule, shape)
        lengths = () if self.controller is None else self.controller.draft_lengths
        if lengths and drafter.draft_shape.num_draft_tokens and lengths[-1] > drafter.draft_shape.depth:
            raise ConfigurationError(
                f"k: expected at most {drafter.draft_shape.depth}, the most that {type(drafter).__name__} drafts, "
                f"got {lengths[-1]}; lower it"
            )

    def _is_fused(self, drafter: Drafter, shape: DraftShape) -> bool:
        """Whether a drafter shares a graph with a verifier of that shape.

        Raises:
            ConfigurationError: the option was given by name, and cannot be applied.
        """
        chains = drafter.draft_shape.is_chain and shape.is_chain
        if self._can_fuse() and (chains or drafter.draft_shape == shape):
            return True
        if not self.fused:
            return False
        if isinstance(drafter, TraceableDrafter) and _on_other_ranks(drafter.state, self.target):
            raise ConfigurationError(
                "fused: expected the same tp_degree for draft and target, which share a graph, got different ones; "
                "load both with one, or omit fused"
            )
        raise ConfigurationError(f"fused: {type(drafter).__name__} cannot share a graph with the target; omit fused")

    def _can_fuse(self) -> bool:
        """Whether the drafter shares a graph with the target, if their draft shapes let it."""
        drafter = self.drafter
        if self.fused is False or not isinstance(drafter, TraceableDrafter):
            return False
        if drafter.state is self.target.body and self.target.backend.device_state:
            return False  # an exporter cannot follow changes to one cache through two modules
        return not _on_other_ranks(drafter.state, self.target)


@dataclass(frozen=True, slots=True)
class _Widths:
    """Widths of the graphs and commits of an engine.

    shape      the proposals that the verification graph takes
    one_width  every round has that width, even with a shorter draft
    fixed      a round without a proposal uses that graph too
    own        every draft length has separate graphs and commits of its width
    """

    shape: DraftShape
    one_width: bool
    fixed: bool
    own: bool

    @property
    def commit(self) -> int:
        """W of the commits, where draft lengths do not have their own."""
        return self.shape.depth + 1


def _on_other_ranks(state: nn.Module, target: CompiledDecoder) -> bool:
    """Whether a draft model runs on other ranks than the target."""
    return isinstance(state, ModelWithCache) and state.group != target.body.group


def _widened(shape: DraftShape, width: int) -> DraftShape:
    """A chain that fills ``width`` rows."""
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
