"""The verifier: one compiled step from a commit and a proposal to the next commit.

Only ids and counts leave the graph, and features for drafters that read them: where a backend copies what goes in and
out, those of fused rounds stay on its device. What needs the host for every token
(processors, scores) is in `paceline.target.host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.accept import Match, Reject, committed
from paceline.core.protocols import GraphDrafter
from paceline.core.simulated import Simulated
from paceline.core.types import PAD, Bounds, Commit, Kept, Outline, Proposal, Reading, Reads, SamplingBatch
from paceline.core.typical import Typical
from paceline.decoder.backends.base import Step
from paceline.decoder.decoder import Body, Carry, CompiledDecoder
from paceline.decoder.steps import prefill
from paceline.target.window import Window

Acceptor = Match | Reject | Typical | Simulated

_DEPTHS = 256
"""Counts of a commit and depths of a proposal are below this, so that both can leave a graph as one number."""


class VerifyStep(nn.Module):
    """Target pass over the root and the proposed nodes, law, acceptance, and tidying of the cache."""

    def __init__(
        self,
        body: Body,
        reach: int,
        *,
        outline: Outline,
        acceptor: Acceptor,
        reads: Reads | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.body, self._reach, self._acceptor, self._reads = body, reach, acceptor, reads
        self.outline = outline
        self.window = Window(outline)
        self._unused = 0 if width is None else width - outline.depth - 1

    def forward(self, tokens: Tensor, count: Tensor, start: Tensor, limit: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """The fields of a Commit; then limit [B] int32, knobs [B, 4], keys [B, 2]; then, if N > 0, what a drafter's
        step gives: drafts [B, N], parents [B, N] of a dynamic outline, law [B, N, V] if they were drawn.

        -> tokens [B, W] and count [B] of the next Commit, and its features if they are read. W is ``width``, where
        rounds of several depths share one shape of commits, or D + 1.
        """
        knobs, keys, *proposed = rest
        sampling = SamplingBatch(knobs, keys)
        drafts = proposed.pop(0) if proposed else tokens[:, :0]
        parents = proposed.pop(0) if self.outline.dynamic else None
        token, row = root_of(tokens, count, start)
        view = self.window(drafts, parents, limit=limit)
        read = torch.cat((token.unsqueeze(1), view.proposal.tokens), 1)
        read = read.clamp(min=0, max=self.body.config.vocab_size - 1)
        hidden, features = self.body.window(read, row, self._reach, tree=view.tree, reads=self._reads)
        positions = row.unsqueeze(1) + 1 + view.depth
        if isinstance(self._acceptor, Match):
            choices = self.body.choose(hidden, positions.contiguous(), sampling)
            verdict = self._acceptor(view.proposal, choices, self.outline.depth)
        elif isinstance(self._acceptor, Simulated):
            choices = self.body.choose(hidden, positions.contiguous(), sampling)
            nodes = (positions[:, 1:] - 1).contiguous()
            verdict = self._acceptor(view.proposal, choices, nodes, sampling=sampling, depth=self.outline.depth)
        elif isinstance(self._acceptor, Typical):
            logits = self.body.logits(hidden)
            choices = self.body.kernels.choose(logits, positions.contiguous(), sampling)
            law = self.body.kernels.probabilities(logits, sampling)
            verdict = self._acceptor(view.proposal, law, choices, depth=self.outline.depth)
        else:
            kernels, logits = self.body.kernels, self.body.logits(hidden)
            drawn = nn.functional.pad(proposed[0], (0, logits.shape[-1] - proposed[0].shape[-1])) if proposed else None
            law = kernels.probabilities(logits, sampling)
            chain = Proposal(view.proposal.tokens, None, drawn)
            verdict = self._acceptor(chain, law, positions, sampling, choose=kernels.choose)
        if view.tree is not None:
            self.body.keep(row, verdict.path)
        out = (nn.functional.pad(committed(view.proposal, verdict), (0, self._unused), value=PAD), verdict.count + 1)
        if features is None:
            return out
        return (*out, nn.functional.pad(features_of(verdict.path, features), (0, 0, 0, self._unused)))


class FusedStep(nn.Module):
    """A drafter's step and the verification of what it proposes, in one graph.

    With a ``carry`` the features of the commit stay there instead of going out, and come from there if none are given.
    ``lean`` gives as few numbers as possible, as it should be where they are copied from a device. Where they are not,
    another tensor costs the graph nothing and saves the host an operation.
    """

    def __init__(self, draft: nn.Module, verify: VerifyStep, carry: Carry | None = None, *, lean: bool = True) -> None:
        super().__init__()
        self.draft, self.verify, self.carry, self._lean = draft, verify, carry, lean

    def forward(self, tokens: Tensor, count: Tensor, start: Tensor, limit: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """The fields of a Commit, limit [B] int32, knobs [B, 4], keys [B, 2] and, if they are read, features [B, W, F].

        -> what `VerifyStep` gives, with how deep each proposal went in the high bits of ``count``; if not ``lean``,
        that and the next Commit's ``start`` stand behind ``count``, [B] int32 each.
        """
        knobs, keys, *read = rest
        if self.carry is not None and not read:
            read = [self.carry.features]
        proposed = self.draft(tokens, count, start, knobs, keys, *read)
        missing = self.verify.outline.nodes - proposed[0].shape[1]
        if missing:  # a chain shorter than the window; its law, if it has one, ends with it too
            proposed = [
                nn.functional.pad(one, (0, missing), value=PAD) if one.dim() == 2 else _pad_law(one, missing)
                for one in proposed
            ]
        parents = proposed[1] if self.verify.outline.dynamic else None
        deep = self.verify.window(proposed[0], parents, limit=limit).reached()
        made, accepted, *features = self.verify(tokens, count, start, limit, knobs, keys, *proposed)
        if self.carry is not None:
            (states,) = features
            room = self.carry.features.shape[1] - states.shape[1]
            self.carry.features.copy_(nn.functional.pad(states, (0, 0, 0, room)))
            features = []
        if self._lean:
            return (made, accepted + deep * _DEPTHS, *features)
        return (made, accepted, deep, start + count, *features)


class CompiledVerifier:
    """Runs `VerifyStep` for one outline, for nothing proposed, and for chains shorter than the outline.

    ``wide``: a round without a proposal goes through the graph of one with a proposal; otherwise through a narrow one.
    ``depths``: of shorter chains that have a graph of their own.
    ``width``: tokens a commit has room for, where other verifiers with deeper outlines take turns with this one.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        outline: Outline,
        *,
        acceptor: Acceptor,
        wide: bool,
        reads: Reads | None = None,
        width: int | None = None,
        depths: Sequence[int] = (),
    ) -> None:
        decoder.check_width(outline.nodes + 1)
        self.outlines = (*(Outline.chain(depth) for depth in sorted(depths) if depth < outline.depth), outline)
        self._width = outline.depth + 1 if width is None else width
        self.decoder, self.outline, self._acceptor, self._reads = decoder, outline, acceptor, reads
        self._wide = wide
        self._names: dict[tuple[Outline, int, bool], str] = {}  # a round asks for one every time
        self._rounds: dict[tuple[GraphDrafter, int, int, int, bool], Step] = {}  # the same, of fused ones
        self._nothing = torch.full((decoder.batch_size, outline.nodes), PAD, dtype=torch.int32)

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingBatch) -> Reading:
        """Read a prompt and pick the first token; see the protocol."""
        logits, features = prefill(self.decoder, slot, prompt, reads=self._reads)
        position = torch.tensor([[len(prompt)]], dtype=torch.int32)
        return Reading(int(self.decoder.body.kernels.choose(logits, position, sampling)), features)

    def release(self, slot: int) -> None:
        """Nothing to forget: the next request's prompt overwrites the cache rows."""

    def __call__(self, commit: Commit, proposal: Proposal | None, sampling: SamplingBatch, bounds: Bounds) -> Commit:
        """Verify a proposal; see the protocol."""
        outline, drawn = self.outline, False
        if proposal is not None:
            fits = (one for one in self.outlines if one.nodes >= proposal.tokens.shape[1])
            outline = next(fits, self.outline)
            proposal = fitted(proposal, outline.nodes)
        elif not self._wide:
            outline = Outline.chain(0)
        inputs = [commit.tokens, commit.count, commit.start, bounds.limit, sampling.knobs, sampling.keys]
        if proposal is not None:
            inputs.append(proposal.tokens)
            if isinstance(proposal.parents, Tensor):
                inputs.append(proposal.parents)
            drawn = proposal.law is not None and isinstance(self._acceptor, Reject)
            inputs += [proposal.law] if drawn and proposal.law is not None else []
        elif outline.nodes:
            inputs.append(self._nothing)
        name = self._name(outline, commit, drawn=drawn)
        make = partial(self._step, outline=outline)
        step = self.decoder.graph(name, make, inputs, reach=self.decoder.reach(bounds.rows))
        tokens, count, *features = step(*inputs)
        return Commit(tokens, count, commit.start + commit.count, features[0] if features else None)

    def fused(
        self, drafter: GraphDrafter, commit: Commit, *, sampling: SamplingBatch, bounds: Bounds
    ) -> tuple[Commit, list[int]]:
        """Draft and verify in one graph; see the protocol."""
        inputs = [commit.tokens, commit.count, commit.start, bounds.limit, sampling.knobs, sampling.keys]
        lean, carry, kept = self.decoder.backend.keeps, None, False
        if self._reads is not None:
            carry, kept = self._carry(commit, self._reads), isinstance(commit.features, Kept)
            inputs += [commit.features] if isinstance(commit.features, Tensor) else []
        reach, bucket = self.decoder.reach(bounds.rows), drafter.bucket(bounds.rows)
        key = (drafter, bucket, reach, commit.tokens.shape[1], kept)
        step = self._rounds.get(key)
        if step is None:

            def make(body: Body, reach: int) -> nn.Module:
                verify = self._step(body, reach, outline=self.outline)
                return FusedStep(drafter.step(bucket), verify, carry, lean=lean)

            name = f"{drafter.name(bucket)}+{self._name(self.outline, commit)}{',kept' if kept else ''}"
            step = self.decoder.graph(name, make, inputs, reach=reach, guest=drafter.facts, owner=drafter.state)
            self._rounds[key] = step
        tokens, count, *more = step(*inputs)
        if lean:
            deep, count, start = count // _DEPTHS, count % _DEPTHS, commit.start + commit.count
        else:
            deep, start, *more = more
        made = Commit(tokens, count, start, more[0] if more else None)
        if carry is not None:
            made = replace(made, features=Kept(partial(self.decoder.backend.value, carry.features)))
        return made, deep.tolist()

    def _carry(self, commit: Commit, reads: Reads) -> Carry | None:
        """Where features stay between rounds, if they had better not come to the host."""
        if not self.decoder.backend.keeps:
            return None
        width = self.decoder.config.hidden_size * max(1, len(reads.layers))
        return self.decoder.carry(*commit.tokens.shape, width)

    def _step(self, body: Body, reach: int, *, outline: Outline) -> VerifyStep:
        width = self._width
        return VerifyStep(body, reach, outline=outline, acceptor=self._acceptor, reads=self._reads, width=width)

    def _name(self, outline: Outline, commit: Commit, *, drawn: bool = False) -> str:
        key = (outline, commit.tokens.shape[1], drawn)
        if key not in self._names:
            self._names[key] = self._described(*key)
        return self._names[key]

    def _described(self, outline: Outline, width: int, drawn: bool) -> str:
        kind = "reject" if isinstance(self._acceptor, Reject) else "match"
        if isinstance(self._acceptor, Simulated):
            kind = f"simulated {self._acceptor.alpha}"
        if isinstance(self._acceptor, Typical):  # its numbers are part of the graph
            kind = f"typical {self._acceptor.epsilon} {self._acceptor.alpha}"
        shape = "tree" if outline.dynamic else "chain" if outline.is_chain else f"tree{list(outline.parents or ())}"
        reads = "" if self._reads is None else f",reads {self._reads.layers}"
        return (
            f"verify[{outline.nodes + 1} {shape} of {outline.depth},{kind}{',drawn' if drawn else ''}"
            f",from {width} to {self._width}{reads}]"
        )


def root_of(tokens: Tensor, count: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """The last committed token and its row, both [B] int32: no decoder has read that token yet."""
    last = (count - 1).to(torch.int64).unsqueeze(1)
    return tokens.gather(1, last).squeeze(1), start + count - 1


def fitted(proposal: Proposal | None, nodes: int) -> Proposal | None:
    """A chain filled up with PAD to the number of nodes that the graph takes."""
    if proposal is None or proposal.tokens.shape[1] == nodes:
        return proposal
    missing = nodes - proposal.tokens.shape[1]
    tokens = nn.functional.pad(proposal.tokens, (0, missing), value=PAD)
    return Proposal(tokens, None, None if proposal.law is None else _pad_law(proposal.law, missing))


def _pad_law(law: Tensor, missing: int) -> Tensor:
    return nn.functional.pad(law, (0, 0, 0, missing))


def features_of(path: Tensor, features: Tensor) -> Tensor:
    """The states that predicted the committed tokens: those of the root and of every accepted node.

    path [B, D] int32, features [B, T, F] -> [B, D + 1, F]
    """
    rows = nn.functional.pad(path.clamp(min=0), (1, 0)).to(torch.int64)
    return features.gather(1, rows.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
