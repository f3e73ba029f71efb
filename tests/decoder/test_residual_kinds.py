"""Tokens that `reject` samples after a rejection, by sampling mode: the same tokens, and the cost of that mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.core.acceptance.base import TargetView
from paceline.core.acceptance.rejection import Reject
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import Proposal, SamplingKind, SamplingTensors
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.step_work import step_work

K, SLOTS = 4, 64


class Rejecting(nn.Module):
    """The rule, with the kernels of a graph, in rounds of a kind."""

    def __init__(self, kind: SamplingKind) -> None:
        super().__init__()
        self._kind = kind

    def forward(
        self,
        drafts: Tensor,
        draft_probs: Tensor,
        distribution: Tensor,
        positions: Tensor,
        params: Tensor,
        seeds: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sampling = SamplingTensors(params, seeds, self._kind)
        seen = TargetView(positions, sampling, K, None, distribution, TraceableKernels().sample_tokens)
        accepted = Reject()(Proposal(drafts, None, draft_probs), seen)
        return accepted.path, accepted.count, accepted.token


@pytest.mark.parametrize("greedy", [False, True])
def test_a_residual_of_few_ids_gives_the_same_token_in_every_mode(greedy: bool) -> None:
    """Some rows are greedy, or all; the target has up to 256 ids of 700, as after top-k, and the draft has others."""
    dice = torch.Generator().manual_seed(2)
    rows = [
        Sampling(temperature=0.0 if greedy or slot % 5 == 0 else 1.3, top_k=(1, 7, 256)[slot % 3], seed=slot)
        for slot in range(SLOTS)
    ]
    sampling = sampling_tensors(rows)
    distribution = TorchKernels().probabilities(torch.randn(SLOTS, K + 1, 700, generator=dice) * 2, sampling)
    draft_probs = torch.softmax(torch.randn(SLOTS, K, 700, generator=dice) * 2, -1)
    drafts = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=dice).view(SLOTS, K).to(torch.int32)
    positions = torch.arange(9, 10 + K, dtype=torch.int32).expand(SLOTS, -1)
    given = (drafts, draft_probs, distribution, positions, sampling.params, sampling.seeds)
    kinds: tuple[SamplingKind, ...] = ("greedy", "top-k", "full", "wide") if greedy else ("top-k", "full", "wide")
    path, count, token = Rejecting("wide")(*given)
    assert (count < K).sum() > SLOTS // 2, "most slots draw from a residual"
    for kind in kinds:
        made = Rejecting(kind)(*given)
        assert all(map(torch.equal, made, (path, count, token))), kind


@pytest.mark.full  # a cost of graphs for Neuron
@pytest.mark.parametrize(("kind", "passes", "topk"), [("greedy", 32, 0), ("top-k", 30, 1), ("full", 90, 2)])
def test_the_cost_of_a_residual_is_that_of_its_sampling_mode(kind: SamplingKind, passes: int, topk: int) -> None:
    """In rows of the vocabulary, for a chain of four: the ratio tests and the residual, without the probabilities."""
    width = 128_256
    sampling, ids = sampling_tensors([Sampling()]), [torch.zeros(1, rows, dtype=torch.int32) for rows in (K, K + 1)]
    given = (ids[0], torch.zeros(1, K, width), torch.zeros(1, K + 1, width), ids[1])
    given = (*given, sampling.params, sampling.seeds)
    found = step_work(Rejecting(kind), given, width, tile=128 * 512).rows
    assert found.passes <= passes and found.topk <= topk and found.gathered <= 256, found
