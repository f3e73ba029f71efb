"""Acceptance rules: which drafted tokens stand, and the target's own token after them.

`Match` keeps a drafted token exactly when it equals the target's own choice at its place. It needs no draft law, is
exact for every kind of drafter, and gives the same tokens as plain decoding with the same seed.
`Reject` is rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1): exact in law for chains whose tokens
were drawn from a known law, with a higher acceptance, but not token for token.

Both are pure, stay on the device and have static shapes. Neither makes probabilities: they come from `law`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import noise, probs, reduce, tree
from paceline.core.types import PAD, Accepted, Proposal, SamplingTensors


@dataclass(frozen=True, slots=True)
class Match:
    """Keep what equals the target's own choice."""

    def __call__(self, proposal: Proposal, choices: Tensor, depth: int | None = None) -> Accepted:
        """Proposal of N nodes, choices [B, N + 1] int32 (the target's own token after each row) -> Verdict.

        ``depth`` is how many nodes can be accepted at most; only parents given as a tensor do not say so themselves.
        """
        slots, nodes = proposal.tokens.shape
        if not nodes:
            return Accepted(proposal.tokens, choices.new_zeros(slots), choices[:, 0])
        if proposal.parents is None:
            return _match_chain(proposal.tokens, choices)
        if isinstance(proposal.parents, tuple):
            depth = max(tree.depths(proposal.parents))
        assert depth is not None, "a tree of tensors does not say how deep it is"
        parents = tree.parents_of(proposal)
        agreed = proposal.tokens == choices.gather(1, (parents + 1).to(torch.int64))
        above = tree.ancestor_mask(parents)
        broken = (above * (~agreed | (proposal.tokens == PAD)).to(torch.float32).unsqueeze(1)).sum(-1)
        return _walk(broken == 0, above.sum(-1), choices, depth=depth)


@dataclass(frozen=True, slots=True)
class Reject:
    """Rejection sampling on a chain; a proposal without a law counts as drawn from a point mass."""

    def __call__(
        self,
        proposal: Proposal,
        law: Tensor,
        positions: Tensor,
        sampling: SamplingTensors,
        *,
        choose: Callable[..., Tensor] = probs.sample_tokens,
    ) -> Accepted:
        """Proposal of a chain of N, law [B, N + 1, V] float32, positions [B, N + 1] int32 -> Verdict.

        ``positions`` are those of the tokens decided by each row; ``choose`` is `probs.sample_tokens` or a kernel
        equal to it. A draft outside the vocabulary is refused like one the target gives no mass; ``proposal.law`` is
        then cut to V, so that its rows may sum to less than one.
        """
        drafts = proposal.tokens
        slots, nodes = drafts.shape
        ids = torch.arange(law.shape[-1], dtype=torch.int32, device=law.device)
        picked = ids == drafts.unsqueeze(-1)  # [B, N, V]; a PAD picks nothing
        drawn = picked.to(torch.float32) if proposal.draft_probs is None else proposal.draft_probs
        zero = torch.zeros((), device=law.device)
        p = torch.where(picked, law[:, :nodes], zero).sum(-1)
        q = torch.where(picked, drawn, zero).sum(-1)
        u = noise.uniform(sampling.seeds, positions[:, :nodes], noise.ACCEPT)
        accepted = (u * q < p) & (q > 0)  # u < p / q, strict, without dividing by zero
        standing = (~accepted).to(torch.float32).cumsum(-1) == 0
        count = standing.to(torch.float32).sum(-1).to(torch.int32)
        here = torch.arange(nodes + 1, device=law.device) == count.unsqueeze(-1)  # [B, N + 1]
        at = torch.where(here.unsqueeze(-1), law, zero).sum(1)  # the law at the first rejected row
        # A slot that proposed nothing at that row (PAD, or all accepted) takes nothing away from p.
        proposed = torch.where((here[:, :nodes] & (drafts != PAD)).unsqueeze(-1), drawn, zero).sum(1)
        residual = (at - proposed).clamp(min=0)
        weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at)
        where = torch.where(here, positions, 0).sum(-1, keepdim=True, dtype=torch.int32)
        scores = torch.where(weights > 0, weights.clamp(min=1e-38).log(), reduce.NEGATIVE)
        hot = (sampling.params[:, :1] > 0).to(torch.float32)
        unfiltered = torch.cat((hot, torch.zeros_like(hot), torch.ones_like(hot), torch.zeros_like(hot)), 1)
        drawn_from = SamplingTensors(unfiltered, sampling.seeds)
        token = choose(scores.unsqueeze(1), where, drawn_from, stream=noise.RESIDUAL).squeeze(1)
        rows = torch.arange(1, nodes + 1, dtype=torch.int32, device=law.device).expand(slots, nodes)
        return Accepted(torch.where(standing, rows, PAD), count, token)


def _match_chain(drafts: Tensor, choices: Tensor) -> Accepted:
    """The walk of a chain, as a running count of disagreements."""
    nodes = drafts.shape[1]
    broken = (drafts != choices[:, :nodes]) | (drafts == PAD)
    standing = broken.to(torch.float32).cumsum(-1) == 0
    rows = torch.arange(1, nodes + 1, dtype=torch.int32, device=drafts.device)
    count = standing.to(torch.float32).sum(-1).to(torch.int32)
    token = choices.gather(1, count.to(torch.int64).unsqueeze(1)).squeeze(1)
    return Accepted(torch.where(standing, rows, PAD), count, token)


def _walk(alive: Tensor, level: Tensor, choices: Tensor, *, depth: int) -> Accepted:
    """Read the accepted path off the nodes whose whole path agreed. alive [B, N] bool, level [B, N] float32, from 1."""
    nodes = alive.shape[1]
    rows = torch.arange(1, nodes + 1, dtype=torch.float32, device=choices.device)
    levels = torch.arange(1, depth + 1, dtype=torch.float32, device=choices.device)
    at_level = alive.unsqueeze(1) & (level.unsqueeze(1) == levels.unsqueeze(-1))  # [B, D, N]
    # Twins with the same token both live: the lower node stands for both.
    first = torch.where(at_level, rows, float(nodes + 1)).amin(-1)
    found = first <= nodes
    path = torch.where(found, first, float(PAD)).to(torch.int32)
    count = found.to(torch.float32).sum(-1).to(torch.int32)
    last = torch.where(found, first, 0.0).amax(-1).to(torch.int64)
    return Accepted(path, count, choices.gather(1, last.unsqueeze(1)).squeeze(1))


def committed(proposal: Proposal, verdict: Accepted) -> Tensor:
    """Accepted tokens, then the target's own, then PAD. -> [B, D + 1] int32."""
    depth = verdict.path.shape[1]
    if not depth:
        return verdict.token.unsqueeze(1)
    nodes = (verdict.path - 1).clamp(min=0).to(torch.int64)
    tokens = torch.nn.functional.pad(proposal.tokens.gather(1, nodes), (0, 1), value=PAD)
    place = torch.arange(depth + 1, device=tokens.device)
    count = verdict.count.unsqueeze(1)
    after = torch.where(place == count, verdict.token.unsqueeze(1), PAD)
    return torch.where(place < count, tokens, after).to(torch.int32)
