"""The verifier: runs one step from a commit and a proposal to the next commit.

The steps are in `paceline.target.steps`; requests that need the host for every token (processors, scores) use
`paceline.target.host_verifier`. Features that a drafter reads stay on the device between fused rounds if the backend
copies inputs and outputs. Consecutive rounds in one call on the CPU are in `decoder/native/program.cpp`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.protocols import HostText, TraceableDrafter
from paceline.core.types import (
    PAD,
    Commit,
    DeviceFeatures,
    DraftShape,
    FeatureSpec,
    MultiRoundLimits,
    Proposal,
    RoundLimits,
    RoundReport,
    RoundResult,
    SamplingKind,
    SamplingTensors,
)
from paceline.decoder.backends.base import MultiRoundStep, Step
from paceline.decoder.decoder import (
    CompiledDecoder,
    FeatureBuffer,
    ModelWithCache,
    first_slots,
    for_all_slots,
    idle_tokens,
)
from paceline.decoder.graph_key import GraphKey
from paceline.target.base import TargetVerifier
from paceline.target.steps import FusedStep, VerifyStep, pad_draft_probs


@dataclass(frozen=True, slots=True)
class _FusedRounds:
    """Runner of fused rounds, valid until the selection of their graph changes.

    which    its selection, except the cache length
    bucket   that of the target
    rows     of the longest sequence, before a round: other lengths need another bucket of draft or target
    several  whether a call may run several rounds
    run      runs the rounds
    """

    which: tuple[TraceableDrafter, bool, SamplingKind, int | None]
    bucket: int
    rows: range
    several: bool
    run: _RunRounds


class CompiledVerifier(TargetVerifier):
    """Runs `VerifyStep` for one draft shape, for nothing proposed, and for chains shorter than the draft shape.

    ``wide``: a round without a proposal uses the graph of one with a proposal; otherwise a narrow one.
    ``depths``: of shorter chains that have a separate graph.
    ``width``: capacity of a commit in tokens, if it alternates with verifiers of deeper draft shapes.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        draft_shape: DraftShape,
        *,
        rule: AcceptanceRule,
        wide: bool,
        reads: FeatureSpec | None = None,
        width: int | None = None,
        depths: Sequence[int] = (),
        slots: Sequence[HostText | None] = (),
    ) -> None:
        decoder.check_width(draft_shape.num_draft_tokens + 1)
        self.draft_shapes = (
            *(DraftShape.chain(depth) for depth in sorted(depths) if depth < draft_shape.depth),
            draft_shape,
        )
        super().__init__(decoder, draft_shape.depth + 1 if width is None else width, reads=reads, slots=slots)
        self.draft_shape, self._rule, self._wide = draft_shape, rule, wide
        self._step = partial(VerifyStep, rule=rule, reads=reads, width=self._width)
        self._fused: _FusedRounds | None = None
        self._nothing = torch.full((decoder.batch_size, draft_shape.num_draft_tokens), PAD, dtype=torch.int32)

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        """Verify a proposal."""
        draft_shape, drawn = self.draft_shape, False
        if proposal is not None:
            fits = (one for one in self.draft_shapes if one.num_draft_tokens >= proposal.tokens.shape[1])
            draft_shape = next(fits, self.draft_shape)
            proposal = fitted(proposal, draft_shape.num_draft_tokens)
        elif not self._wide:
            draft_shape = DraftShape.chain(0)
        inputs = self._inputs(commit, sampling, limits)
        if proposal is not None:
            inputs.append(proposal.tokens)
            if isinstance(proposal.parents, Tensor):
                inputs.append(proposal.parents)
            drawn = proposal.draft_probs is not None and self._rule.draft_probs
            inputs += [proposal.draft_probs] if drawn and proposal.draft_probs is not None else []
        elif draft_shape.num_draft_tokens:
            inputs.append(self._nothing)
        which = (draft_shape.num_draft_tokens, drawn, commit.tokens.shape[1], sampling.kind)

        def find(bucket: int, lines: int, given: Sequence[Tensor]) -> Step:
            kind = self.decoder.sampling_kind(sampling.kind)
            key = self._key(draft_shape, bucket, kind, width=commit.tokens.shape[1], drawn=drawn, lines=lines)
            return self.decoder.graph(key, partial(self._step, draft_shape=draft_shape, kind=kind), given)

        return self._next(commit, inputs, which, limits=limits, find=find)

    def fused(
        self,
        drafter: TraceableDrafter,
        commit: Commit,
        *,
        sampling: SamplingTensors,
        limits: RoundLimits,
        seconds: float,
    ) -> RoundResult:
        """Draft and verify in one graph."""
        assert commit.tokens.shape[1] == self._width, "what a round makes is what the next one reads"
        inputs = self._inputs(commit, sampling, limits)
        carry, kept, lines = None, False, 0
        if self._reads is not None:
            lines = self.decoder.lines_for(limits.used_slots)
            carry = self._carry(commit, self._reads, lines)
            kept = isinstance(commit.features, DeviceFeatures) and commit.features.lines == lines
            inputs += [commit.states] if not kept and commit.states is not None else []
        which, fused = (drafter, kept, sampling.kind, limits.used_slots), self._fused
        if fused is None or limits.max_rows not in fused.rows or fused.which != which:
            fused = self._fused = self._fused_rounds(which, carry, inputs=inputs, rows=limits.max_rows)
        further = limits.multi_round
        if further is not None and fused.several:
            last = min(limits.max_rows + (further.max_rounds - 1) * self._width, fused.bucket)
            further = further if last in fused.rows else self._in_one_bucket(further, fused, limits.max_rows)
        reports, outputs = fused.run(inputs, seconds, further)
        features: Tensor | DeviceFeatures | None = outputs[3] if len(outputs) > 3 else None
        if carry is not None:
            features = DeviceFeatures(partial(self._fetch, carry), lines)
        return RoundResult(Commit(outputs[0], outputs[1], outputs[2], features), reports)

    def _fused_rounds(
        self,
        which: tuple[TraceableDrafter, bool, SamplingKind, int | None],
        carry: FeatureBuffer | None,
        *,
        inputs: list[Tensor],
        rows: int,
    ) -> _FusedRounds:
        """Select the fused-round runner for sequences of at least ``rows`` KV positions. ``which``: drafter, whether
        the features it reads are on the device, the sampling mode of the batch, and slots in use.
        """
        drafter, kept, kind, used_slots = which
        decoder, lean = self.decoder, self.decoder.backend.device_state
        bucket, draft_bucket = decoder.bucket_for(rows), drafter.bucket(rows)
        kind, lines = decoder.sampling_kind(kind), decoder.lines_for(used_slots)
        alone = self._key(self.draft_shape, bucket, kind, width=self._width, lines=lines)
        key = replace(alone, kept=kept, draft=drafter.step_key(draft_bucket))

        def make(body: ModelWithCache, bucket: int) -> FusedStep:
            verify = self._step(body, bucket, draft_shape=self.draft_shape, kind=kind)
            return FusedStep(drafter.step(draft_bucket, kind), verify, carry, lean=lean)

        given = [first_slots(x, lines) for x in inputs]
        step: Step | MultiRoundStep = decoder.graph(key, make, given, guest=drafter.cache_key, owner=drafter.state)
        same = bisect_right(range(rows, bucket + 1), draft_bucket, key=drafter.bucket)
        if isinstance(step, MultiRoundStep):
            return _FusedRounds(which, bucket, range(rows, rows + same), True, step.run_rounds)
        run = partial(_one_round, step=step, lean=lean, lines=lines)
        return _FusedRounds(which, bucket, range(rows, rows + same), False, run)

    def _in_one_bucket(self, limits: MultiRoundLimits, fused: _FusedRounds, rows: int) -> MultiRoundLimits:
        """Reduce the number of rounds where the drafter would need another graph before the last of them."""
        rounds = limits.max_rounds
        while rounds > 1 and min(rows + (rounds - 1) * self._width, fused.bucket) not in fused.rows:
            rounds //= 2
        return replace(limits, max_rounds=rounds)

    def _carry(self, commit: Commit, reads: FeatureSpec, lines: int) -> FeatureBuffer | None:
        """Return the buffer for features between rounds of ``lines`` batch rows, if copying them to the host costs
        time.
        """
        if not self.decoder.backend.device_state:
            return None
        width = self.decoder.config.hidden_size * max(1, len(reads.layers))
        return self.decoder.carry(*first_slots(commit.tokens, lines).shape, width)

    def _fetch(self, carry: FeatureBuffer) -> Tensor:
        """Copy the buffer to the host, with a row for every slot."""
        return for_all_slots(self.decoder.backend.read_state(carry.features), self.decoder.batch_size)

    def _key(
        self, shape: DraftShape, bucket: int, kind: SamplingKind, *, width: int, drawn: bool = False, lines: int = 0
    ) -> GraphKey:
        """Return the key of a graph that verifies. ``width``: W of the commit before."""
        return GraphKey(
            "verify",
            shape.num_draft_tokens + 1,
            bucket,
            draft_shape=shape,
            rule=self._rule.cache_key,
            drawn=drawn,
            features=None if self._reads is None else self._reads.layers,
            commit_width=width,
            next_width=self._width,
            sampling=kind,
            lines=lines,
        )


def fitted(proposal: Proposal | None, nodes: int) -> Proposal | None:
    """Pad a chain with PAD to the number of nodes that the graph takes."""
    if proposal is None or proposal.tokens.shape[1] == nodes:
        return proposal
    missing = nodes - proposal.tokens.shape[1]
    tokens = nn.functional.pad(proposal.tokens, (0, missing), value=PAD)
    return Proposal(
        tokens, None, None if proposal.draft_probs is None else pad_draft_probs(proposal.draft_probs, missing)
    )


_RunRounds = Callable[[list[Tensor], float, MultiRoundLimits | None], tuple[list[RoundReport], list[Tensor]]]
"""`paceline.decoder.backends.base.MultiRoundStep.run_rounds`."""


def _one_round(
    inputs: list[Tensor], _seconds: float, _limits: MultiRoundLimits | None, *, step: Step, lean: bool, lines: int
) -> tuple[list[RoundReport], list[Tensor]]:
    """Run one round, as `MultiRoundStep.run_rounds`, by a step of one round. ``lean``: whether the `FusedStep` is.

    lines  as in `GraphKey`; inputs and what comes out have a line for every slot
    """
    begin = perf_counter()
    packed, *outputs = step(*([first_slots(x, lines) for x in inputs] if lines else inputs))
    if lines:
        slots = len(inputs[0])
        packed = for_all_slots(packed, slots, [*idle_tokens(packed.shape[1] - 2), 1, 0])
        outputs = [for_all_slots(x, slots) for x in (outputs if lean else outputs[3:])]  # features, if they are outputs
    if lean or lines:
        outputs = [packed[:, :-2].contiguous(), packed[:, -2].contiguous(), inputs[2] + inputs[1], *outputs]
    return [RoundReport.of(packed.tolist(), perf_counter() - begin)], outputs
