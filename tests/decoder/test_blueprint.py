"""Fused kernels are used where a blueprint allows them. `test_families.py` tests what its options compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.decoder.kernels.protocol import AttentionWeights, CachePosition, MlpWeights
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.blueprint import LLAMA_NAMES, Blueprint, Experts
from paceline.decoder.models.config import ModelConfig, RopeConfig
from paceline.decoder.models.family import Family
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.parallel.sharding import Shard
from tests.decoder.other_kernels import numbers

NAMES = LLAMA_NAMES.but(
    post_norm="post_norm", post_mlp_norm="post_mlp_norm", router="router", shared_router="shared_router",
    shared_gate="shared.gate", shared_up="shared.up", shared_down="shared.down",
)  # fmt: skip
FAMILY = Family("tiny", "", names=NAMES)


@dataclass
class Counting(TorchKernels):
    """Kernels that know halves of a layer, and say which were asked of them."""

    asked: list[str] = field(default_factory=list)

    @property
    def layers(self) -> Any:
        return self

    def attention(self, hidden: Tensor, weights: AttentionWeights, place: CachePosition, **_: object) -> Tensor:
        self.asked.append("attention")
        return hidden

    def mlp(self, hidden: Tensor, weights: MlpWeights, count: Tensor | None = None) -> Tensor:
        self.asked.append("mlp")
        return hidden


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        (Blueprint(), ["attention", "mlp"]),
        (Blueprint(qkv_bias=True, out_bias=True, mlp_bias=True), ["attention", "mlp"]),
        (Blueprint(activation="gelu"), ["attention"]),
        (Blueprint(experts=Experts(1, 1, True)), ["attention"]),
        (Blueprint(head_norms="head"), ["mlp"]),
        (Blueprint(windows=(3,)), ["mlp"]),
        (Blueprint(score_cap=2.0), ["mlp"]),
        (Blueprint(query_scale=0.2), ["mlp"]),
        (Blueprint(rotated_share=0.67), ["mlp"]),
        (Blueprint(rotated_share=0.0), ["mlp"]),
        (Blueprint(unrotated=(True,)), ["mlp"]),
        (Blueprint(alibi=True), ["mlp"]),
        (Blueprint(norm="layer"), []),
        (Blueprint(norms="both"), []),
        (Blueprint(norms="after"), []),
        (Blueprint(residual_scale=0.5), []),
        (Blueprint(parallel=True), []),
        (Blueprint(parallel=True, shared_norm=True), []),
    ],
)
def test_llama_like_layers_use_the_fused_kernels(plan: Blueprint, asked: list[str]) -> None:
    made = ModelConfig(
        "tiny", 16, 24, 20, 1, 4, 2, 6, 1e-3, 64, RopeConfig(), False, False, False, "silu", (), None, None, plan
    )
    weights = {name: numbers(*spec.shape) for name, spec in FAMILY.tensors(made).items()}
    kernels, tokens = Counting(), torch.tensor([[5, 9, 3, 7]], dtype=torch.int32)
    model = FAMILY.build(Shard(made), weights, kernels, positions=8, group=SingleRank())
    place = CachePosition(*(torch.tensor([n], dtype=torch.int32) for n in (0, 4, 0)), 8)
    with torch.no_grad():
        model(tokens, place, [(torch.zeros(1, 2, 8, 6), torch.zeros(1, 2, 8, 6))])
    assert kernels.asked == asked
