"""The verifier: runs one step from a commit and a proposal to the next commit.

Requests that need the host for every token (processors, scores) use `paceline.target.host_verifier`. Features that a
drafter reads stay on the device between fused rounds if the backend copies inputs and outputs. Consecutive rounds in
one call on the CPU are in `decoder/native/program.cpp`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.protocols import HostText, TraceableDrafter
from paceline.core.types import (
    PAD,
    Commit,
    DeviceFeatures,
    DraftShape,
    FeatureSpec,
    Proposal,
    RoundLimits,
    RoundReport,
    SamplingKind,
    SamplingTensors,
)
from paceline.decoder.backends.base import MultiRoundStep, Step
from paceline.decoder.decoder import (
    CompiledDecoder,
    FeatureBuffer,
    ModelWithCache,
    StepMaker,
    first_rows,
    for_all_slots,
    idle_tokens,
)
from paceline.decoder.graph_key import GraphKey
from paceline.target.base import TargetVerifier, fitted
from paceline.target.steps import AutoregressiveStep, FusedStep, VerifyStep

_NO_DRAFT = DraftShape.chain(0)


@dataclass(frozen=True, slots=True)
class _Found:
    """A selected step, valid until its selection changes. ``rows``: of the longest sequence, before a round."""

    step: Step
    batch: int
    rows: range


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
    """Runs `VerifyStep` for one draft shape, for no proposal, and for chains shorter than the draft shape.

    depths  of shorter chains that have a separate graph
    steps   if set, `AutoregressiveStep` with so many steps takes its place; nothing is proposed then
    """

    steps = 0

    def __init__(
        self,
        decoder: CompiledDecoder,
        draft_shape: DraftShape,
        *,
        rule: AcceptanceRule,
        wide: bool,
        reads: FeatureSpec | None = None,
        width: int | None = None,
        slots: Sequence[HostText | None] = (),
        depths: Sequence[int] = (),
    ) -> None:
        super().__init__(decoder, draft_shape, rule=rule, wide=wide, reads=reads, width=width, slots=slots)
        shorter = (DraftShape.chain(depth) for depth in sorted(depths) if depth < draft_shape.depth)
        self.draft_shapes = (*shorter, draft_shape)
        self._step = partial(VerifyStep, rule=rule, reads=reads, width=self._width)
        self._found = dict[Hashable, _Found]()
        self._fused: _FusedRounds | None = None
        self._nothing = torch.full((decoder.batch_size, draft_shape.num_draft_tokens), PAD, dtype=torch.int32)

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        draft_shape, drawn, proposed = self.draft_shape, False, list[Tensor]()
        if proposal is not None:
            fits = (one for one in self.draft_shapes if one.num_draft_tokens >= proposal.tokens.shape[1])
            draft_shape = next(fits, draft_shape)
            if proposal.tokens.shape[1] != draft_shape.num_draft_tokens:
                proposal = fitted(proposal, draft_shape.num_draft_tokens)
            proposed.append(proposal.tokens)
            if isinstance(proposal.parents, Tensor):
                proposed.append(proposal.parents)
            if self._rule.draft_probs and proposal.draft_probs is not None:
                drawn = True
                proposed.append(proposal.draft_probs)
        elif not self._wide:
            draft_shape = _NO_DRAFT
        elif draft_shape.num_draft_tokens:
            proposed.append(self._nothing)
        if limits.max_accept != self._most:
            self._take_limit(limits.max_accept)
        inputs = [
            commit.tokens, commit.count, commit.first_row, self._limit, sampling.params, sampling.seeds, *proposed
        ]  # fmt: skip
        slots, rows = limits.used_slots, limits.max_rows
        which = (draft_shape.num_draft_tokens, drawn, commit.tokens.shape[1], sampling.kind, slots)
        found = self._found.get(which)
        if found is None or rows not in found.rows:
            found = self._found[which] = self._find(draft_shape, inputs, limits=limits, kind=sampling.kind, drawn=drawn)
        if not found.batch:
            tokens, count, *features = found.step(*inputs)
        else:
            tokens, count, *features = found.step(*(first_rows(x, found.batch) for x in inputs))
            tokens = for_all_slots(tokens, len(commit.count), idle_tokens(self._width))
            count = for_all_slots(count, len(commit.count), 1)
            features = [for_all_slots(x, len(commit.count)) for x in features]
        return Commit(tokens, count, commit.first_row + commit.count, features[0] if features else None)

    def _find(
        self, draft_shape: DraftShape, inputs: Sequence[Tensor], *, limits: RoundLimits, kind: SamplingKind, drawn: bool
    ) -> _Found:
        """Select the step of rounds with such a proposal, for sequences of ``limits.max_rows`` rows or more."""
        rows, batch = limits.max_rows, self.decoder.batch_for(limits.used_slots)
        bucket, kind = self.decoder.bucket_for(rows), self.decoder.sampling_kind(kind)
        make: StepMaker = partial(self._step, draft_shape=draft_shape, kind=kind)
        key = self._key(draft_shape, bucket, kind, width=inputs[0].shape[1], drawn=drawn, batch=batch)
        if self.steps:
            make = partial(AutoregressiveStep, steps=self.steps, width=self._width, kind=kind)
            key = GraphKey(
                "autoregressive", self.steps, bucket, commit_width=key.commit_width, next_width=self._width,
                sampling=kind, batch=batch,
            )  # fmt: skip
        step = self.decoder.graph(key, make, [first_rows(x, batch) for x in inputs])
        return _Found(step, batch, range(rows, bucket + 1))

    def fused(
        self,
        drafter: TraceableDrafter,
        commit: Commit,
        *,
        sampling: SamplingTensors,
        limits: RoundLimits,
        seconds: float,
    ) -> tuple[Commit, list[RoundReport]]:
        assert commit.tokens.shape[1] == self._width, "what a round makes is what the next one reads"
        if limits.max_accept != self._most:
            self._take_limit(limits.max_accept)
        inputs = [commit.tokens, commit.count, commit.first_row, self._limit, sampling.params, sampling.seeds]
        carry, kept, batch = None, False, 0
        if self._reads is not None:
            batch = self.decoder.batch_for(limits.used_slots)
            carry = self._carry(commit, self._reads, batch)
            kept = isinstance(commit.features, DeviceFeatures) and commit.features.batch == batch
            inputs += [commit.states] if not kept and commit.states is not None else []
        which, fused, rows = (drafter, kept, sampling.kind, limits.used_slots), self._fused, limits.max_rows
        if fused is None or rows not in fused.rows or fused.which != which:
            fused = self._fused = self._fused_rounds(which, carry, inputs=inputs, rows=rows)
        if fused.several:  # as many as need no other graph before the last of them
            rounds = limits.max_rounds
            while rounds > 1 and min(rows + (rounds - 1) * self._width, fused.bucket) not in fused.rows:
                rounds //= 2
            limits = limits if rounds == limits.max_rounds else replace(limits, max_rounds=rounds)
        reports, outputs = fused.run(inputs, seconds, limits)
        features: Tensor | DeviceFeatures | None = outputs[3] if len(outputs) > 3 else None
        if carry is not None:
            features = DeviceFeatures(partial(self._fetch, carry), batch)
        return Commit(outputs[0], outputs[1], outputs[2], features), reports

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
        kind, batch = decoder.sampling_kind(kind), decoder.batch_for(used_slots)
        alone = self._key(self.draft_shape, bucket, kind, width=self._width, batch=batch)
        key = replace(alone, kept=kept, draft=drafter.step_key(draft_bucket))

        def make(body: ModelWithCache, bucket: int) -> FusedStep:
            verify = self._step(body, bucket, draft_shape=self.draft_shape, kind=kind)
            return FusedStep(drafter.step(draft_bucket, kind), verify, carry, lean=lean)

        given = [first_rows(x, batch) for x in inputs]
        step: Step | MultiRoundStep = decoder.graph(key, make, given, guest=drafter.cache_key, owner=drafter.state)
        same = bisect_right(range(rows, bucket + 1), draft_bucket, key=drafter.bucket)
        if isinstance(step, MultiRoundStep):
            return _FusedRounds(which, bucket, range(rows, rows + same), True, step.run_rounds)
        run = partial(_one_round, step=step, lean=lean, batch=batch)
        return _FusedRounds(which, bucket, range(rows, rows + same), False, run)

    def _carry(self, commit: Commit, reads: FeatureSpec, batch: int) -> FeatureBuffer | None:
        """Return the buffer for features between rounds of ``batch`` batch rows, if copying them to the host costs
        time.
        """
        if not self.decoder.backend.device_state:
            return None
        width = self.decoder.config.hidden_size * max(1, len(reads.layers))
        return self.decoder.carry(*first_rows(commit.tokens, batch).shape, width)

    def _fetch(self, carry: FeatureBuffer) -> Tensor:
        return for_all_slots(self.decoder.backend.read_state(carry.features), self.decoder.batch_size)

    def _key(
        self, shape: DraftShape, bucket: int, kind: SamplingKind, *, width: int, drawn: bool = False, batch: int = 0
    ) -> GraphKey:
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
            batch=batch,
        )


_RunRounds = Callable[[list[Tensor], float, RoundLimits], tuple[list[RoundReport], list[Tensor]]]
"""`paceline.decoder.backends.base.MultiRoundStep.run_rounds`."""


def _one_round(
    inputs: list[Tensor], _seconds: float, _limits: RoundLimits, *, step: Step, lean: bool, batch: int
) -> tuple[list[RoundReport], list[Tensor]]:
    """Run one round, as `MultiRoundStep.run_rounds`. ``lean``: whether the `FusedStep` is; ``batch``: as in `GraphKey`;
    inputs and what comes out have a line for every slot.
    """
    begin = perf_counter()
    packed, *outputs = step(*([first_rows(x, batch) for x in inputs] if batch else inputs))
    if batch:
        slots = len(inputs[0])
        packed = for_all_slots(packed, slots, [*idle_tokens(packed.shape[1] - 2), 1, 0])
        outputs = [for_all_slots(x, slots) for x in (outputs if lean else outputs[3:])]  # features, if they are outputs
    if lean or batch:
        outputs = [packed[:, :-2].contiguous(), packed[:, -2].contiguous(), inputs[2] + inputs[1], *outputs]
    rows = packed.tolist()  # as in `RoundReport.of`, which would be a call more in every round
    return [RoundReport([row[: row[-2]] for row in rows], [row[-1] for row in rows], perf_counter() - begin)], outputs
