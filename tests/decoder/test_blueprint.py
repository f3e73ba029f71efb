"""Each option of a blueprint against plain PyTorch; and which layers use fused kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decoder.kernels.protocol import AttentionWeights, CachePosition, MlpWeights
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.blueprint import LLAMA_NAMES, Blueprint, Experts
from paceline.decoder.models.config import ModelConfig, RopeConfig
from paceline.decoder.models.family import Family
from paceline.decoder.models.network import DecoderModel
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.parallel.sharding import Shard

TOKENS = torch.tensor([[5, 9, 3, 7]], dtype=torch.int32)
NAMES = LLAMA_NAMES.but(
    post_norm="post_norm", post_mlp_norm="post_mlp_norm", router="router", shared_router="shared_router",
    shared_gate="shared.gate", shared_up="shared.up", shared_down="shared.down",
)  # fmt: skip
FAMILY = Family("tiny", "", names=NAMES)


def config(plan: Blueprint, layers: int = 1) -> ModelConfig:
    return ModelConfig(
        "tiny", 16, 24, 20, layers, 4, 2, 6, 1e-3, 64, RopeConfig(), False, False, False, "silu", (), None, None, plan
    )  # fmt: skip


def weights(made: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(spec.shape, generator=generator) * 0.5 for name, spec in FAMILY.tensors(made).items()
    }  # fmt: skip


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


def network(plan: Blueprint, kernels: TorchKernels | None = None, layers: int = 1) -> DecoderModel:
    made = config(plan, layers)
    return FAMILY.build(Shard(made), dict(weights(made)), kernels or TorchKernels(), positions=8, group=SingleRank())


def run(model: DecoderModel, layers: int = 1) -> Tensor:
    place = CachePosition(*(torch.tensor([n], dtype=torch.int32) for n in (0, 4, 0)), 8)
    caches = [(torch.zeros(1, 2, 8, 6), torch.zeros(1, 2, 8, 6)) for _ in range(layers)]
    with torch.no_grad():
        hidden: Tensor = model(TOKENS, place, caches)[0]
        return model.logits(hidden)


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
    kernels = Counting()
    run(network(plan, kernels))
    assert kernels.asked == asked


# ---- plain PyTorch


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-3)


def turn(x: Tensor) -> Tensor:
    """x [T, n, D]"""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).view(-1, 1, 1) * (10000.0 ** -(torch.arange(half) / half))
    a, b = x.split(half, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def reference(plan: Blueprint) -> Tensor:
    """Logits of a layer that may differ from Llama in what these tests choose."""
    w = weights(config(plan))
    own = {name.removeprefix("model.layers.0.").removesuffix(".weight"): x for name, x in w.items()}
    stream = w["model.embed_tokens.weight"][TOKENS[0].long()] * plan.embedding_scale
    x = stream if plan.norms == "after" else norm(stream, own["input_layernorm"])
    q, k, v = (F.linear(x, own[f"self_attn.{side}_proj"]) for side in "qkv")
    if plan.head_norms == "whole":
        q, k = norm(q, own["self_attn.q_norm"]), norm(k, own["self_attn.k_norm"])
    q, k, v = (side.unflatten(-1, (-1, 6)) for side in (q, k, v))
    if plan.head_norms in ("head", "own"):
        ones = torch.ones(6)
        q, k = norm(q, ones) * own["self_attn.q_norm"], norm(k, ones) * own["self_attn.k_norm"]
    if not plan.unrotated:
        q, k = turn(q), turn(k)
    k, v = (side.repeat_interleave(2, 1) for side in (k, v))
    mixed = F.scaled_dot_product_attention(
        *(side.transpose(0, 1) for side in (q, k, v)), is_causal=True, scale=plan.query_scale or None
    )
    added = F.linear(mixed.transpose(0, 1).flatten(1), own["self_attn.o_proj"])
    if plan.norms != "before":
        added = norm(added, own["post_norm"])
    stream = stream + plan.residual_scale * added
    x = stream if plan.norms == "after" else norm(stream, own["post_attention_layernorm"])

    def mlp(*names: str) -> Tensor:
        gate, up, down = (own[name] for name in names)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    added = mlp("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    if plan.experts is not None:  # a single one, which all choose
        added = added + torch.sigmoid(F.linear(x, own["shared_router"])) * mlp(
            "shared.gate", "shared.up", "shared.down"
        )
    if plan.norms != "before":
        added = norm(added, own["post_mlp_norm"])
    stream = stream + plan.residual_scale * added
    return F.linear(norm(stream, w["model.norm.weight"]), w["lm_head.weight"]) * plan.logit_scale


CHOICES = {
    "llama": Blueprint(),
    "norms after": Blueprint(norms="after"),
    "norms on both sides": Blueprint(norms="both"),
    "a norm of each head": Blueprint(head_norms="head"),
    "a norm of its own for each head": Blueprint(head_norms="own"),
    "a norm over all heads": Blueprint(head_norms="whole"),
    "no rotation": Blueprint(unrotated=(True,)),
    "scaled scores": Blueprint(query_scale=0.3),
    "scaled embeddings": Blueprint(embedding_scale=3.0),
    "scaled residuals": Blueprint(residual_scale=0.3),
    "scaled logits": Blueprint(logit_scale=0.3),
    "a shared expert": Blueprint(experts=Experts(1, 1, True, shared=12)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_blueprint_option_equals_plain_pytorch(name: str) -> None:
    plan = CHOICES[name]
    torch.testing.assert_close(run(network(plan))[0], reference(plan), atol=1e-5, rtol=1e-5)
    if name != "llama":
        assert not torch.allclose(run(network(plan)), run(network(Blueprint())))


def test_layers_may_differ_in_rotation() -> None:
    """A layer that does not turn, before one that does: neither of the two that are alike."""
    every = {plan: run(network(replace(Blueprint(), unrotated=plan), layers=2), 2)
             for plan in ((False, False), (True, True), (True, False), (False, True))}  # fmt: skip
    assert torch.equal(every[False, False], run(network(Blueprint(), layers=2), 2))
    assert len({tuple(x.flatten().tolist()) for x in every.values()}) == 4
