"""Rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1).

Keeps the target's distribution for chains whose tokens were sampled from a known distribution, and accepts more of
them than `Match`, but the output tokens differ from those of decoding without a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.acceptance.base import Needs, TargetView
from paceline.core.sampling import TOP_K_LIMIT
from paceline.core.types import PAD, Accepted, Proposal, SamplingKind, SamplingTensors


@dataclass(frozen=True, slots=True)
class Reject:
    """Rejection sampling on a chain. An `AcceptanceRule`.

    A proposal without ``draft_probs`` counts as sampled from point masses. A token outside the vocabulary is rejected
    like one with target probability 0; ``draft_probs`` is then cut to V, so its rows may sum to less than one.
    """

    name: ClassVar[str] = "reject"
    needs: ClassVar[Needs] = "probs"
    draft_probs: ClassVar[bool] = True
    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    on_host: ClassVar[bool] = True
    cache_key: ClassVar[str] = "reject"

    def __call__(self, proposal: Proposal, view: TargetView) -> Accepted:
        import torch

        from paceline.core import noise, reduce

        assert view.probs is not None
        drafts, target, sampling = proposal.tokens, view.probs, view.sampling
        slots, nodes = drafts.shape
        ids = torch.arange(target.shape[-1], dtype=torch.int32, device=target.device)
        picked = ids == drafts.unsqueeze(-1)  # [B, N, V]; a PAD picks nothing
        drawn = picked.to(torch.float32) if proposal.draft_probs is None else proposal.draft_probs
        zero = torch.zeros((), device=target.device)
        p = torch.where(picked, target[:, :nodes], zero).sum(-1)
        q = torch.where(picked, drawn, zero).sum(-1)
        u = noise.uniform(sampling.seeds, view.positions[:, :nodes], noise.ACCEPT)
        accepted = (u * q < p) & (q > 0)  # u < p / q, strict, without dividing by zero
        standing = (~accepted).to(torch.float32).cumsum(-1) == 0
        count = standing.to(torch.float32).sum(-1).to(torch.int32)
        here = torch.arange(nodes + 1, device=target.device) == count.unsqueeze(-1)  # [B, N + 1]
        at = torch.where(here.unsqueeze(-1), target, zero).sum(1)  # p at the first rejected row
        # A slot that proposed nothing at that row (PAD, or all accepted) subtracts nothing from p.
        proposed = torch.where((here[:, :nodes] & (drafts != PAD)).unsqueeze(-1), drawn, zero).sum(1)
        residual = (at - proposed).clamp(min=0)
        weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at)
        where = torch.where(here, view.positions, 0).sum(-1, keepdim=True, dtype=torch.int32)
        scores = torch.where(weights > 0, weights.clamp(min=1e-38).log(), reduce.NEGATIVE)
        drawn_from = _unfiltered(sampling)
        token = view.sample_tokens(scores.unsqueeze(1), where, drawn_from, stream=noise.RESIDUAL).squeeze(1)
        rows = torch.arange(1, nodes + 1, dtype=torch.int32, device=target.device).expand(slots, nodes)
        return Accepted(torch.where(standing, rows, PAD), count, token)


def _unfiltered(sampling: SamplingTensors) -> SamplingTensors:
    """Return the sampling values for a residual: temperature 1 where the row samples, and no filters, since p has them.

    The ids of a residual are among those of p. So if every row has a top-k of at most 256, the 256 largest are all that
    it contains, and a graph that reads only those costs a fraction of one over the vocabulary.
    """
    import torch

    hot = (sampling.params[:, :1] > 0).to(torch.float32)
    none, off = torch.zeros_like(hot), torch.ones_like(hot)
    if sampling.kind == "top-k":
        return SamplingTensors(torch.cat((hot, off * TOP_K_LIMIT, off, none), 1), sampling.seeds, "top-k")
    kind: SamplingKind = "greedy" if sampling.kind == "greedy" else "full"
    return SamplingTensors(torch.cat((hot, none, off, none), 1), sampling.seeds, kind)
