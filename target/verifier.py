"""The verifier: runs one compiled step from a commit and a proposal to the next commit.

The steps are in `paceline.target.steps`; what needs the host for every token (processors, scores) is in
`paceline.target.host_verifier`. Features that a drafter reads stay on the device between fused rounds, where a backend copies
what goes in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.acceptance.match import Reject
from paceline.core.acceptance.synthetic import SyntheticAcceptance
from paceline.core.acceptance.typical import Typical
from paceline.core.protocols import TraceableDrafter
from paceline.core.types import (
    PAD,
    Commit,
    DeviceFeatures,
    DraftShape,
    FeatureSpec,
    PrefillResult,
    Proposal,
    RoundLimits,
    RoundResult,
    SamplingTensors,
)
from paceline.decoder.backends.base import Again, Repeats
from paceline.decoder.decoder import CompiledDecoder, FeatureBuffer, ModelWithCache
from paceline.decoder.steps import prefill
from paceline.target.multi_round import multi_round
from paceline.target.steps import Acceptor, FusedStep, VerifyStep, pad_law


class CompiledVerifier:
    """Runs `VerifyStep` for one outline, for nothing proposed, and for chains shorter than the outline.

    ``wide``: a round without a proposal goes through the graph of one with a proposal; otherwise through a narrow one.
    ``depths``: of shorter chains that have a graph of their own.
    ``width``: tokens a commit has room for, where other verifiers with deeper outlines take turns with this one.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        outline: DraftShape,
        *,
        acceptor: Acceptor,
        wide: bool,
        reads: FeatureSpec | None = None,
        width: int | None = None,
        depths: Sequence[int] = (),
    ) -> None:
        decoder.check_width(outline.nodes + 1)
        self.outlines = (*(DraftShape.chain(depth) for depth in sorted(depths) if depth < outline.depth), outline)
        self._width = outline.depth + 1 if width is None else width
        self.decoder, self.outline, self._acceptor, self._reads = decoder, outline, acceptor, reads
        self._wide = wide
        self._names: dict[tuple[DraftShape, int, bool], str] = {}  # a round asks for one every time
        self._rounds: dict[tuple[TraceableDrafter, int, int, bool], Again] = {}  # the same, of fused ones
        self._nothing = torch.full((decoder.batch_size, outline.nodes), PAD, dtype=torch.int32)

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> PrefillResult:
        """Read a prompt and pick the first token; see the protocol."""
        logits, features = prefill(self.decoder, slot, prompt, reads=self._reads)
        position = torch.tensor([[len(prompt)]], dtype=torch.int32)
        return PrefillResult(int(self.decoder.body.kernels.choose(logits, position, sampling)), features)

    def release(self, slot: int) -> None:
        """Nothing to forget: the next request's prompt overwrites the cache rows."""

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, bounds: RoundLimits
    ) -> Commit:
        """Verify a proposal; see the protocol."""
        outline, drawn = self.outline, False
        if proposal is not None:
            fits = (one for one in self.outlines if one.nodes >= proposal.tokens.shape[1])
            outline = next(fits, self.outline)
            proposal = fitted(proposal, outline.nodes)
        elif not self._wide:
            outline = DraftShape.chain(0)
        inputs = [commit.tokens, commit.count, commit.start, bounds.limit, sampling.knobs, sampling.keys]
        if proposal is not None:
            inputs.append(proposal.tokens)
            if isinstance(proposal.parents, Tensor):
                inputs.append(proposal.parents)
            drawn = proposal.law is not None and isinstance(self._acceptor, Reject)
            inputs += [proposal.law] if drawn and proposal.law is not None else []
        elif outline.nodes:
            inputs.append(self._nothing)
        name = self._name(outline, commit.tokens.shape[1], drawn=drawn)
        make = partial(self._step, outline=outline)
        step = self.decoder.graph(name, make, inputs, reach=self.decoder.reach(bounds.rows))
        tokens, count, *features = step(*inputs)
        return Commit(tokens, count, commit.start + commit.count, features[0] if features else None)

    def fused(
        self,
        drafter: TraceableDrafter,
        commit: Commit,
        *,
        sampling: SamplingTensors,
        bounds: RoundLimits,
        seconds: float,
    ) -> RoundResult:
        """Draft and verify in one graph; see the protocol."""
        assert commit.tokens.shape[1] == self._width, "what a round makes is what the next one reads"
        inputs = [commit.tokens, commit.count, commit.start, bounds.limit, sampling.knobs, sampling.keys]
        carry, kept = None, False
        if self._reads is not None:
            carry, kept = self._carry(commit, self._reads), isinstance(commit.features, DeviceFeatures)
            inputs += [commit.features] if isinstance(commit.features, Tensor) else []
        room = None if carry is not None and not kept else bounds.room  # the next round would have another graph
        reach, bucket = self.decoder.reach(bounds.rows), drafter.bucket(bounds.rows)
        if room is not None:
            rounds = room.rounds
            while rounds > 1 and drafter.bucket(min(bounds.rows + (rounds - 1) * self._width, reach)) != bucket:
                rounds //= 2  # all in one graph of the draft's
            room = room if rounds == room.rounds else replace(room, rounds=rounds)
        key = (drafter, bucket, reach, kept)
        again = self._rounds.get(key)
        if again is None:
            again = self._rounds[key] = self._again(drafter, bucket, inputs, reach=reach, carry=carry, kept=kept)
        told, made = again(inputs, seconds, room)
        features: Tensor | DeviceFeatures | None = made[3] if len(made) > 3 else None
        if carry is not None:
            features = DeviceFeatures(partial(self.decoder.backend.value, carry.features))
        return RoundResult(Commit(made[0], made[1], made[2], features), told)

    def _again(
        self,
        drafter: TraceableDrafter,
        bucket: int,
        inputs: list[Tensor],
        *,
        reach: int,
        carry: FeatureBuffer | None,
        kept: bool,
    ) -> Again:
        """What runs a drafter's step and that of this verifier in one graph."""
        lean = self.decoder.backend.keeps

        def make(body: ModelWithCache, reach: int) -> nn.Module:
            verify = self._step(body, reach, outline=self.outline)
            return FusedStep(drafter.step(bucket), verify, carry, lean=lean)

        name = f"{drafter.name(bucket)}+{self._name(self.outline, self._width)}{',kept' if kept else ''}"
        step = self.decoder.graph(name, make, inputs, reach=reach, guest=drafter.facts, owner=drafter.state)
        given: object = step  # mypy takes no function for an object with methods
        return given.again if isinstance(given, Repeats) else multi_round(step, lean=lean)

    def _carry(self, commit: Commit, reads: FeatureSpec) -> FeatureBuffer | None:
        """Where features stay between rounds, if they had better not come to the host."""
        if not self.decoder.backend.keeps:
            return None
        width = self.decoder.config.hidden_size * max(1, len(reads.layers))
        return self.decoder.carry(*commit.tokens.shape, width)

    def _step(self, body: ModelWithCache, reach: int, *, outline: DraftShape) -> VerifyStep:
        width = self._width
        return VerifyStep(body, reach, outline=outline, acceptor=self._acceptor, reads=self._reads, width=width)

    def _name(self, outline: DraftShape, width: int, *, drawn: bool = False) -> str:
        key = (outline, width, drawn)
        if key not in self._names:
            self._names[key] = self._described(*key)
        return self._names[key]

    def _described(self, outline: DraftShape, width: int, drawn: bool) -> str:
        kind = "reject" if isinstance(self._acceptor, Reject) else "match"
        if isinstance(self._acceptor, SyntheticAcceptance):
            kind = f"simulated {self._acceptor.alpha}"
        if isinstance(self._acceptor, Typical):  # its numbers are part of the graph
            kind = f"typical {self._acceptor.epsilon} {self._acceptor.alpha}"
        shape = "tree" if outline.dynamic else "chain" if outline.is_chain else f"tree{list(outline.parents or ())}"
        reads = "" if self._reads is None else f",reads {self._reads.layers}"
        return (
            f"verify[{outline.nodes + 1} {shape} of {outline.depth},{kind}{',drawn' if drawn else ''}"
            f",from {width} to {self._width}{reads}]"
        )


def fitted(proposal: Proposal | None, nodes: int) -> Proposal | None:
    """A chain filled up with PAD to the number of nodes that the graph takes."""
    if proposal is None or proposal.tokens.shape[1] == nodes:
        return proposal
    missing = nodes - proposal.tokens.shape[1]
    tokens = nn.functional.pad(proposal.tokens, (0, missing), value=PAD)
    return Proposal(tokens, None, None if proposal.law is None else pad_law(proposal.law, missing))
