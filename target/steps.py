"""The steps that verify: a commit and a proposal in, the next commit out; and a drafter's step fused with that.

They output only ids and counts, and features for drafters that read them. `paceline.target.verifier` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.core import tree
from paceline.core.acceptance.base import AcceptanceRule, TargetView, committed
from paceline.core.types import PAD, Commit, DraftShape, FeatureSpec, Proposal, SamplingKind, SamplingTensors
from paceline.decoder.decoder import FeatureBuffer, ModelWithCache
from paceline.decoder.kernels.protocol import Kernels, Tree


@dataclass(frozen=True, slots=True)
class _VerifyInputs:
    """Target inputs of a proposal.

    proposal  with PAD in place of every node that is not valid
    depth     [B, T] int32 (or [T] for a chain), distance of each row of the window from the root
    tree      None for a chain
    """

    proposal: Proposal
    depth: Tensor
    tree: Tree | None

    def reached(self) -> Tensor:
        """Return how deep the proposal goes without a gap in each slot. [B] int32"""
        gone = (self.proposal.tokens == PAD).to(torch.float32)
        if not gone.shape[1]:
            return gone.sum(-1).to(torch.int32)
        if self.tree is None:
            return (gone.cumsum(-1) == 0).to(torch.float32).sum(-1).to(torch.int32)
        broken = (self.tree.seen[:, 1:, 1:] * gone.unsqueeze(1)).sum(-1) > 0
        return torch.where(broken, 0, self.depth[:, 1:]).amax(-1).to(torch.int32)


class VerifyMask(nn.Module):
    """Drafts to a `_VerifyInputs`. The parents of a static tree are a buffer, since a graph holds no constants."""

    rows: Tensor

    def __init__(self, draft_shape: DraftShape) -> None:
        super().__init__()
        self.draft_shape = draft_shape
        parents = None if draft_shape.parents is None else torch.tensor([tree.verify_rows(draft_shape.parents)]).int()
        self.register_buffer("rows", parents)

    def forward(self, drafts: Tensor, parents: Tensor | None, *, limit: Tensor) -> _VerifyInputs:
        """drafts [B, N] int32, parents [B, N] int32 if dynamic, limit [B] int32"""
        slots, nodes = drafts.shape
        if self.draft_shape.is_chain:
            depth = torch.arange(nodes + 1, dtype=torch.int32, device=drafts.device)
            shown, level = None, depth[1:].unsqueeze(0)
        else:
            rows = self.rows if parents is None else nn.functional.pad(parents + 1, (1, 0), value=tree.ROOT)
            shown = Tree.of(rows.expand(slots, nodes + 1).contiguous())
            depth = shown.depth
            level = depth[:, 1:]
        # Ids out of range stay: no rule accepts them, and a sampled one counts as sampled, so that the distribution
        # stays exact.
        tokens = torch.where((level <= limit.unsqueeze(1)) & (drafts >= 0), drafts, PAD)
        return _VerifyInputs(Proposal(tokens, None if shown is None else shown.parents[:, 1:] - 1), depth, shown)


class VerifyStep(nn.Module):
    """Target pass over the root and the proposed tokens, probabilities, acceptance, and compaction of the cache.
    ``kind``: sampling mode of its rounds.
    """

    def __init__(
        self,
        body: ModelWithCache,
        bucket: int,
        *,
        draft_shape: DraftShape,
        rule: AcceptanceRule,
        reads: FeatureSpec | None = None,
        width: int | None = None,
        kind: SamplingKind = "full",
    ) -> None:
        super().__init__()
        self.body, self._bucket, self._rule, self._reads = body, bucket, rule, reads
        self.draft_shape, self.kind = draft_shape, kind
        self.window = VerifyMask(draft_shape)
        self._unused = 0 if width is None else width - draft_shape.depth - 1

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, limit: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """The fields of a Commit; then limit [B] int32, params [B, 4], seeds [B, 4]; then, if N > 0, what a drafter's
        step gives: drafts [B, N], parents [B, N] of a dynamic draft shape, draft_probs [B, N, V] if they were sampled.

        -> tokens [B, W] and count [B] of the next Commit, and its features if they are read. W is ``width`` if rounds
        of several depths share one commit shape, else D + 1.
        """
        params, seeds, *proposed = rest
        drafts = proposed.pop(0) if proposed else tokens[:, :0]
        parents = proposed.pop(0) if self.draft_shape.dynamic else None
        window = self.window(drafts, parents, limit=limit)
        return self.decide(
            window, Commit(tokens, count, first_row), SamplingTensors(params, seeds, self.kind), *proposed
        )

    def decide(
        self, window: _VerifyInputs, commit: Commit, sampling: SamplingTensors, *draft_probs: Tensor
    ) -> tuple[Tensor, ...]:
        token, row = root_of(commit.tokens, commit.count, commit.first_row)
        read = torch.cat((token.unsqueeze(1), window.proposal.tokens), 1)
        read = read.clamp(min=0, max=self.body.config.vocab_size - 1)
        # Rows after a chain's end, and so a draft that a limit cuts, cost nothing where kernels skip padding.
        used = window.reached() + 1 if window.tree is None and self.body.skips_idle else None
        hidden, features = self.body.window(
            read, row, self._bucket, tree=window.tree, reads=self._reads, sampling=sampling, used=used
        )
        positions = (row.unsqueeze(1) + 1 + window.depth).contiguous()
        proposal = window.proposal
        if self._rule.draft_probs and draft_probs:
            proposal = replace(proposal, draft_probs=pad_vocabulary(draft_probs[0], self.body.config.vocab_size))
        depth, kernels = self.draft_shape.depth, self.body.kernels
        if self._rule.needs == "choices":  # a sharded model need not gather its logits for these
            choices = self.body.sample_tokens(hidden, positions, sampling, used=used)
            seen = TargetView(positions, sampling, depth, choices, sample_tokens=kernels.sample_tokens)
        else:
            logits = self.body.logits(hidden, None if used is None else self.body.real_rows(sampling, used))
            seen = target_view(self._rule, logits, positions, sampling=sampling, depth=depth, kernels=kernels)
        accepted = self._rule(proposal, seen)
        if window.tree is not None:
            self.body.compact_path(row, accepted.path)
        out = (nn.functional.pad(committed(proposal, accepted), (0, self._unused), value=PAD), accepted.count + 1)
        if features is None:
            return out
        return (*out, nn.functional.pad(features_of(accepted.path, features), (0, 0, 0, self._unused)))


def target_view(
    rule: AcceptanceRule,
    logits: Tensor,
    positions: Tensor,
    *,
    sampling: SamplingTensors,
    depth: int,
    kernels: Kernels,
) -> TargetView:
    """Build a rule's inputs from the target's logits. logits [B, T, V] float32, positions [B, T] int32."""
    choices = None if rule.needs == "probs" else kernels.sample_tokens(logits, positions, sampling)
    probs = None if rule.needs == "choices" else kernels.probabilities(logits, sampling)
    return TargetView(positions, sampling, depth, choices, probs, kernels.sample_tokens)


class FusedStep(nn.Module):
    """A drafter's step and the verification of what it proposes, in one graph.

    With a ``carry`` the features of the commit stay in it instead of being outputs, and are read from it if none are
    given. ``lean`` returns as few tensors as possible, for devices whose outputs are copied. Elsewhere one more output
    costs the graph nothing and saves the host an operation.
    """

    def __init__(
        self, draft: nn.Module, verify: VerifyStep, carry: FeatureBuffer | None = None, *, lean: bool = True
    ) -> None:
        super().__init__()
        self.draft, self.verify, self.carry, self._lean = draft, verify, carry, lean
        self._limits_drafts = hasattr(draft, "takes_limit") and verify.body.skips_idle

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, limit: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """The fields of a Commit; limit [B] int32, params [B, 4], seeds [B, 4]; and features [B, W, F] if they are
        read.

        -> a report for the host, [B, W + 2] int32: tokens, count, and the proposal's depth; if not ``lean``, the next
        Commit's tokens, count and first_row, and its features if they are read and not kept.
        """
        params, seeds, *read = rest
        if self.carry is not None and not read:
            read = [self.carry.features]
        limits = {"limit": limit} if self._limits_drafts else {}
        proposed = self.draft(tokens, count, first_row, params, seeds, *read, **limits)
        missing = self.verify.draft_shape.num_draft_tokens - proposed[0].shape[1]
        if missing:  # a chain shorter than the window, and so are its probabilities, if it has any
            proposed = [
                nn.functional.pad(x, (0, missing), value=PAD) if x.dim() == 2 else pad_draft_probs(x, missing)
                for x in proposed
            ]
        drafts, *drawn = proposed
        window = self.verify.window(drafts, drawn.pop(0) if self.verify.draft_shape.dynamic else None, limit=limit)
        deep, sampling = window.reached(), SamplingTensors(params, seeds, self.verify.kind)
        following, accepted, *features = self.verify.decide(window, Commit(tokens, count, first_row), sampling, *drawn)
        if self.carry is not None:
            made = features.pop()
            unused = self.carry.features.shape[1] - made.shape[1]
            self.carry.features.copy_(nn.functional.pad(made, (0, 0, 0, unused)))
        report = torch.cat((following, accepted.unsqueeze(1), deep.unsqueeze(1)), 1)
        return (report, *features) if self._lean else (report, following, accepted, first_row + count, *features)


class AutoregressiveStep(nn.Module):
    """``steps`` target passes over one token each, unrolled, so that they share the host's time of one round.

    width  of a commit, at least ``steps``
    kind   sampling mode of its rounds
    """

    def __init__(
        self, body: ModelWithCache, bucket: int, *, steps: int, width: int, kind: SamplingKind = "full"
    ) -> None:
        super().__init__()
        self.body, self._bucket, self._steps, self._unused = body, bucket, steps, width - steps
        self._kind = kind

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, limit: Tensor, params: Tensor, seeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The fields of a Commit; limit [B] int32, tokens after the first; params [B, 4], seeds [B, 4]
        -> tokens and count of the next Commit.
        """
        sampling = SamplingTensors(params, seeds, self._kind)
        token, row = root_of(tokens, count, first_row)
        token = token.clamp(min=0).unsqueeze(1)
        chosen: list[Tensor] = []
        for step in range(self._steps):
            hidden, _ = self.body.window(chosen[-1] if chosen else token, row + step, self._bucket, sampling=sampling)
            position = (row + step + 1).unsqueeze(1)
            chosen.append(self.body.sample_tokens(hidden, position, sampling))
        place = torch.arange(self._steps, dtype=torch.int32, device=tokens.device)
        count = (limit + 1).clamp(max=self._steps)
        kept = torch.where(place < count.unsqueeze(1), torch.cat(chosen, 1), PAD)
        return nn.functional.pad(kept, (0, self._unused), value=PAD) if self._unused else kept, count


def root_of(tokens: Tensor, count: Tensor, first_row: Tensor) -> tuple[Tensor, Tensor]:
    """The last committed token and its row, both [B] int32: no decoder has read that token yet."""
    last = (count - 1).to(torch.int64).unsqueeze(1)
    return tokens.gather(1, last).squeeze(1), first_row + count - 1


def pad_draft_probs(draft_probs: Tensor, missing: int) -> Tensor:
    return nn.functional.pad(draft_probs, (0, 0, 0, missing))


def pad_vocabulary(draft_probs: Tensor, size: int) -> Tensor:
    """Return the draft's distribution over the target's ids, which may be more, or fewer. [B, N, V'] -> [B, N, size]"""
    return nn.functional.pad(draft_probs, (0, size - draft_probs.shape[-1]))


def features_of(path: Tensor, features: Tensor) -> Tensor:
    """Return the states that predicted the committed tokens: those of the root and of every accepted node.

    path [B, D] int32, features [B, T, F] -> [B, D + 1, F]
    """
    rows = nn.functional.pad(path.clamp(min=0), (1, 0)).to(torch.int64)
    return features.gather(1, rows.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
