"""The verifier: runs one compiled step from a commit and a proposal to the next commit.

The steps are in `paceline.target.steps`; what needs the host for every token (processors, scores) is in
`paceline.target.host_verifier`. Features that a drafter reads stay on the device between fused rounds, where a backend
copies what goes in and out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.protocols import Reading, TraceableDrafter
from paceline.core.types import (
    PAD,
    Commit,
    DeviceFeatures,
    DraftShape,
    FeatureSpec,
    MultiRoundLimits,
    PrefillResult,
    Proposal,
    RoundLimits,
    RoundReport,
    RoundResult,
    SamplingKind,
    SamplingTensors,
)
from paceline.decoder.backends.base import MultiRoundStep, Step
from paceline.decoder.decoder import CompiledDecoder, FeatureBuffer, ModelWithCache
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.steps import prefill_in_chunks
from paceline.target.consecutive import ConsecutiveRounds, ConsecutiveStep, RunRounds, consecutive_key
from paceline.target.steps import FusedStep, VerifyStep, pad_draft_probs

_Fused = tuple[TraceableDrafter, int, int, bool, SamplingKind]
"""A drafter, its bucket, that of the target, whether features are on the device, and the kind of sampling."""


@dataclass(frozen=True, slots=True)
class _FusedRounds:
    """How fused rounds run, for as long as nothing changes that selects their graph.

    drafter, kept, kind  as in `_Fused`; the kind is that of the batch
    bucket               that of the target
    rows                 of the longest text, before a round: with others, draft or target need another bucket
    run                  runs rounds
    several              whether it can run more than one in a call
    """

    drafter: TraceableDrafter
    kept: bool
    kind: SamplingKind
    bucket: int
    rows: range
    run: RunRounds
    several: bool


class CompiledVerifier:
    """Runs `VerifyStep` for one draft shape, for nothing proposed, and for chains shorter than the draft shape.

    ``wide``: a round without a proposal goes through the graph of one with a proposal; otherwise through a narrow one.
    ``depths``: of shorter chains that have a graph of their own.
    ``width``: tokens a commit has room for, where this one takes turns with verifiers of deeper draft shapes.
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
    ) -> None:
        decoder.check_width(draft_shape.num_draft_tokens + 1)
        self.draft_shapes = (
            *(DraftShape.chain(depth) for depth in sorted(depths) if depth < draft_shape.depth),
            draft_shape,
        )
        self._width = draft_shape.depth + 1 if width is None else width
        self.decoder, self.draft_shape, self._rule, self._reads = decoder, draft_shape, rule, reads
        self._wide = wide
        self._keys: dict[tuple[DraftShape, int, int, bool, SamplingKind], GraphKey] = {}  # every round asks for one
        self._fused_steps: dict[_Fused, tuple[RunRounds, bool]] = {}
        self._fused: _FusedRounds | None = None
        self._nothing = torch.full((decoder.batch_size, draft_shape.num_draft_tokens), PAD, dtype=torch.int32)

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt and pick the first token; see the protocol."""
        logits, features = yield from prefill_in_chunks(self.decoder, slot, prompt, reads=self._reads, shared=True)
        position = torch.tensor([[len(prompt)]], dtype=torch.int32)
        return PrefillResult(int(self.decoder.body.kernels.sample_tokens(logits, position, sampling)), features)

    def finish_request(self, slot: int) -> None:
        """The next request's prompt overwrites the cache rows."""
        self.decoder.read_prompts.finish(slot)

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        """Verify a proposal; see the protocol."""
        draft_shape, drawn = self.draft_shape, False
        if proposal is not None:
            fits = (one for one in self.draft_shapes if one.num_draft_tokens >= proposal.tokens.shape[1])
            draft_shape = next(fits, self.draft_shape)
            proposal = fitted(proposal, draft_shape.num_draft_tokens)
        elif not self._wide:
            draft_shape = DraftShape.chain(0)
        inputs = [commit.tokens, commit.count, commit.first_row, limits.max_accept, sampling.params, sampling.seeds]
        if proposal is not None:
            inputs.append(proposal.tokens)
            if isinstance(proposal.parents, Tensor):
                inputs.append(proposal.parents)
            drawn = proposal.draft_probs is not None and self._rule.draft_probs
            inputs += [proposal.draft_probs] if drawn and proposal.draft_probs is not None else []
        elif draft_shape.num_draft_tokens:
            inputs.append(self._nothing)
        bucket, kind = self.decoder.bucket_for(limits.max_rows), self.decoder.sampling_kind(sampling.kind)
        key = self._key(draft_shape, commit.tokens.shape[1], bucket, kind=kind, drawn=drawn)
        step = self.decoder.graph(key, partial(self._step, draft_shape=draft_shape, kind=kind), inputs)
        tokens, count, *features = step(*inputs)
        return Commit(tokens, count, commit.first_row + commit.count, features[0] if features else None)

    def fused(
        self,
        drafter: TraceableDrafter,
        commit: Commit,
        *,
        sampling: SamplingTensors,
        limits: RoundLimits,
        seconds: float,
    ) -> RoundResult:
        """Draft and verify in one graph; see the protocol."""
        assert commit.tokens.shape[1] == self._width, "what a round makes is what the next one reads"
        inputs = [commit.tokens, commit.count, commit.first_row, limits.max_accept, sampling.params, sampling.seeds]
        carry, kept = None, False
        if self._reads is not None:
            carry, kept = self._carry(commit, self._reads), isinstance(commit.features, DeviceFeatures)
            inputs += [commit.features] if isinstance(commit.features, Tensor) else []
        which = self._fused
        if (
            which is None
            or limits.max_rows not in which.rows
            or (which.drafter, which.kept, which.kind) != (drafter, kept, sampling.kind)
        ):
            which = self._fused = self._fused_rounds(
                drafter, carry, kept=kept, kind=sampling.kind, inputs=inputs, rows=limits.max_rows
            )
        further = limits.multi_round if which.several else None
        if carry is not None and not kept:
            further = None  # the next round has another graph
        if further is not None:
            last = min(limits.max_rows + (further.max_rounds - 1) * self._width, which.bucket)
            further = further if last in which.rows else self._in_one_bucket(further, which, limits.max_rows)
        reports, outputs = which.run(inputs, seconds, further)
        features: Tensor | DeviceFeatures | None = outputs[3] if len(outputs) > 3 else None
        if carry is not None:
            features = DeviceFeatures(partial(self.decoder.backend.read_state, carry.features))
        return RoundResult(Commit(outputs[0], outputs[1], outputs[2], features), reports)

    def _fused_rounds(
        self,
        drafter: TraceableDrafter,
        carry: FeatureBuffer | None,
        *,
        kept: bool,
        kind: SamplingKind,
        inputs: list[Tensor],
        rows: int,
    ) -> _FusedRounds:
        """How fused rounds run from texts of so many rows on."""
        bucket, draft_bucket = self.decoder.bucket_for(rows), drafter.bucket(rows)
        which = (drafter, draft_bucket, bucket, kept, self.decoder.sampling_kind(kind))
        if which not in self._fused_steps:
            self._fused_steps[which] = self._run_fused(which, carry, inputs)
        run, several = self._fused_steps[which]
        same = bisect_right(range(rows, bucket + 1), draft_bucket, key=drafter.bucket)
        return _FusedRounds(drafter, kept, kind, bucket, range(rows, rows + same), run, several)

    def _run_fused(self, which: _Fused, carry: FeatureBuffer | None, inputs: list[Tensor]) -> tuple[RunRounds, bool]:
        """What runs fused rounds, and whether it can run more than one in a call."""
        drafter, draft_bucket, bucket, kept, kind = which
        backend = self.decoder.backend
        alone = self._key(self.draft_shape, self._width, bucket, kind=kind)
        key = replace(alone, kept=kept, draft=drafter.step_key(draft_bucket))
        graph = partial(self.decoder.graph, guest=drafter.cache_key, owner=drafter.state)

        def make(body: ModelWithCache, bucket: int) -> FusedStep:
            verify = self._step(body, bucket, draft_shape=self.draft_shape, kind=kind)
            return FusedStep(drafter.step(draft_bucket, kind), verify, carry, lean=backend.device_state)

        def fused() -> Step | MultiRoundStep:
            return graph(key, make, inputs)

        step = fused()
        if isinstance(step, MultiRoundStep):
            return step.run_rounds, True
        one = partial(_one_round, step=step, lean=backend.device_state)
        rounds = backend.rounds_in_graph
        if rounds == 1 or (self._reads is not None and not kept):  # the next round has another graph
            return one, False
        several = partial(
            graph, consecutive_key(key, rounds), lambda body, bucket: ConsecutiveStep(make(body, bucket), rounds)
        )
        return ConsecutiveRounds(one, several, rounds=rounds, width=self._width).run_rounds, True

    def _in_one_bucket(self, limits: MultiRoundLimits, which: _FusedRounds, rows: int) -> MultiRoundLimits:
        """Fewer rounds, where the drafter would need another graph before the last of them."""
        rounds = limits.max_rounds
        while rounds > 1 and min(rows + (rounds - 1) * self._width, which.bucket) not in which.rows:
            rounds //= 2
        return replace(limits, max_rounds=rounds)

    def _carry(self, commit: Commit, reads: FeatureSpec) -> FeatureBuffer | None:
        """Where features stay between rounds, where bringing them to the host would cost a copy."""
        if not self.decoder.backend.device_state:
            return None
        width = self.decoder.config.hidden_size * max(1, len(reads.layers))
        return self.decoder.carry(*commit.tokens.shape, width)

    def _step(self, body: ModelWithCache, bucket: int, *, draft_shape: DraftShape, kind: SamplingKind) -> VerifyStep:
        return VerifyStep(
            body,
            bucket,
            draft_shape=draft_shape,
            rule=self._rule,
            reads=self._reads,
            width=self._width,
            kind=kind,
        )

    def _key(
        self, draft_shape: DraftShape, width: int, bucket: int, *, kind: SamplingKind, drawn: bool = False
    ) -> GraphKey:
        """Of the graph that verifies proposals of a shape, after commits of ``width`` tokens."""
        which = (draft_shape, width, bucket, drawn, kind)
        if which not in self._keys:
            self._keys[which] = GraphKey(
                "verify",
                draft_shape.num_draft_tokens + 1,
                bucket,
                draft_shape=draft_shape,
                rule=self._rule.cache_key,
                drawn=drawn,
                features=None if self._reads is None else self._reads.layers,
                commit_width=width,
                next_width=self._width,
                sampling=kind,
            )
        return self._keys[which]


def _one_round(
    inputs: list[Tensor], _seconds: float, _limits: MultiRoundLimits | None, *, step: Step, lean: bool
) -> tuple[list[RoundReport], list[Tensor]]:
    """As `MultiRoundStep.run_rounds`, of a step that runs one round a call. ``lean``: whether the `FusedStep` is."""
    begin = perf_counter()
    packed, *outputs = step(*inputs)
    if lean:
        outputs = [packed[:, :-2].contiguous(), packed[:, -2].contiguous(), inputs[2] + inputs[1], *outputs]
    return [RoundReport.of(packed.tolist(), perf_counter() - begin)], outputs


def fitted(proposal: Proposal | None, nodes: int) -> Proposal | None:
    """A chain filled up with PAD to the number of nodes that the graph takes."""
    if proposal is None or proposal.tokens.shape[1] == nodes:
        return proposal
    missing = nodes - proposal.tokens.shape[1]
    tokens = nn.functional.pad(proposal.tokens, (0, missing), value=PAD)
    return Proposal(
        tokens, None, None if proposal.draft_probs is None else pad_draft_probs(proposal.draft_probs, missing)
    )
