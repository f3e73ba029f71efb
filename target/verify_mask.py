"""What a window of proposed nodes looks like: which of them may stand, how deep each is, and whose child it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core import tree
from paceline.core.types import PAD, DraftShape, Proposal
from paceline.decoder.kernels.protocol import Tree


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """A proposal as the target reads it.

    proposal  with PAD in place of every node that may not stand
    depth     [B, T] int32 (or [T] for a chain), how far each row of the window is from the root
    tree      None for a chain
    """

    proposal: Proposal
    depth: Tensor
    tree: Tree | None

    def reached(self) -> Tensor:
        """How deep the proposal goes without a gap in each slot. [B] int32"""
        gone = (self.proposal.tokens == PAD).to(torch.float32)
        if not gone.shape[1]:
            return gone.sum(-1).to(torch.int32)
        if self.tree is None:
            return (gone.cumsum(-1) == 0).to(torch.float32).sum(-1).to(torch.int32)
        broken = (self.tree.seen[:, 1:, 1:] * gone.unsqueeze(1)).sum(-1) > 0
        return torch.where(broken, 0, self.depth[:, 1:]).amax(-1).to(torch.int32)


class VerifyMask(nn.Module):
    """From drafts to a `VerifyInputs`. The parents of a static tree are a buffer, since a graph holds no constants."""

    rows: Tensor

    def __init__(self, draft_shape: DraftShape) -> None:
        super().__init__()
        self.draft_shape = draft_shape
        parents = None if draft_shape.parents is None else torch.tensor([tree.verify_rows(draft_shape.parents)]).int()
        self.register_buffer("rows", parents)

    def forward(self, drafts: Tensor, parents: Tensor | None, *, limit: Tensor) -> VerifyInputs:
        """drafts [B, N] int32, parents [B, N] int32 if dynamic, limit [B] int32 -> View."""
        slots, nodes = drafts.shape
        if self.draft_shape.is_chain:
            depth = torch.arange(nodes + 1, dtype=torch.int32, device=drafts.device)
            shown, level = None, depth[1:].unsqueeze(0)
        else:
            rows = self.rows if parents is None else nn.functional.pad(parents + 1, (1, 0), value=tree.ROOT)
            shown = Tree.of(rows.expand(slots, nodes + 1).contiguous())
            depth = shown.depth
            level = depth[:, 1:]
        # Ids out of range stay: no rule accepts them, and a drawn one counts as drawn, so that the distribution stays
        # exact.
        tokens = torch.where((level <= limit.unsqueeze(1)) & (drafts >= 0), drafts, PAD)
        return VerifyInputs(Proposal(tokens, None if shown is None else shown.parents[:, 1:] - 1), depth, shown)
