"""Blocks that families build their layers from. Each reads its tensors by their names in a checkpoint.

Each block ends with a sum over the ranks, where the model is divided. Not here: whole families, and the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.decoder.kernels.protocol import AttentionWeights, CachePosition, Kernels, MlpWeights
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.quantize import MatrixLike, Stored, joined, matrix

Weights = dict[str, Stored]
"""Tensors of a checkpoint by name, in the type a decoder computes with, or quantised."""
Rotation = tuple[Tensor, Tensor]
"""cos and sin of the positions of a window, each [b, T, 1, D]."""


class SelfAttention(nn.Module):
    """Query, key and value products, rotation, attention over the cache, output product; without norm and residual.

    Takes ``{prefix}{q,k,v,o}_proj.weight`` out of ``weights``, and their biases with ``bias``.
    """

    def __init__(
        self, shard: Shard, weights: Weights, kernels: Kernels, *, prefix: str, group: Collectives, bias: bool = False
    ) -> None:
        super().__init__()
        self._shard, self._kernels, self._group = shard, kernels, group
        self.qkv = joined([weights.pop(f"{prefix}{x}_proj.weight") for x in "qkv"])
        self.out = matrix(weights.pop(f"{prefix}o_proj.weight"))
        self.qkv_bias = joined_vectors(weights, [f"{prefix}{x}_proj.bias" for x in "qkv"]) if bias else None
        self.out_bias = frozen(weights.pop(f"{prefix}o_proj.bias")) if bias else None
        if shard.gathers:
            self.register_buffer("key_heads", torch.tensor(shard.key_heads, dtype=torch.int32))

    def with_norm(self, norm: Tensor, eps: float) -> AttentionWeights:
        """For kernels that know attention as a whole."""
        return AttentionWeights(norm, self.qkv, self.qkv_bias, self.out, self.out_bias, eps)

    def forward(self, x: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation) -> Tensor:
        """x [b, T, H] -> [b, T, H]; keys and values go to their rows of the cache [slots, G, R, D]."""
        mixed = biased(self._kernels.linear(x, self.qkv, place.real), self.qkv_bias)
        width, part = self._shard.config.head_dim, self._shard.key_part
        q, keys, values = mixed.split((self._shard.heads * width, part, part), dim=-1)
        k, v = self._key_heads(keys, values)
        q = q.view(*q.shape[:-1], -1, width)
        q, k = self._kernels.rotate(q, rotation), self._kernels.rotate(k, rotation)
        out = self._kernels.linear(self._kernels.attend((q, k, v), cache, place), self.out, place.real)
        return biased(self._group.reduce(out), self.out_bias)

    def _key_heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Products of this rank's rows of both matrices [b, T, n] -> the heads of its cache, [b, T, G, D] each."""
        shape = (*keys.shape[:-1], -1, self._shard.config.head_dim)
        if not self._shard.gathers:
            return keys.view(shape), values.view(shape)
        every = self._group.gather(torch.stack((keys, values)))  # [ranks, 2, b, T, n]
        heads = every.permute(1, 2, 3, 0, 4).reshape(2, *shape).index_select(3, self.get_buffer("key_heads"))
        return heads[0], heads[1]


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), without norm and residual.

    Takes ``{prefix}{gate,up,down}_proj.weight`` out of ``weights``, and their biases with ``bias``.
    """

    def __init__(
        self, weights: Weights, kernels: Kernels, *, prefix: str, group: Collectives, bias: bool = False
    ) -> None:
        super().__init__()
        self._kernels, self._group = kernels, group
        self.gate_up = joined([weights.pop(f"{prefix}{x}_proj.weight") for x in ("gate", "up")])
        self.down = matrix(weights.pop(f"{prefix}down_proj.weight"))
        self.gate_up_bias = (
            joined_vectors(weights, [f"{prefix}{x}_proj.bias" for x in ("gate", "up")]) if bias else None
        )
        self.down_bias = frozen(weights.pop(f"{prefix}down_proj.bias")) if bias else None

    def with_norm(self, norm: Tensor, eps: float) -> MlpWeights:
        """For kernels that know the MLP as a whole."""
        return MlpWeights(norm, self.gate_up, self.gate_up_bias, self.down, self.down_bias, eps)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        products = (self.gate_up, self.gate_up_bias, self.down, self.down_bias)
        return _gated(x, products, real, kernels=self._kernels, group=self._group)


def gated_mlp(
    hidden: Tensor, weights: MlpWeights, real: Tensor | None = None, *, kernels: Kernels, group: Collectives
) -> Tensor:
    """hidden [b, T, H] + MLP(norm(hidden)), summed over the ranks of ``group``."""
    if kernels.layers is not None:
        return kernels.layers.mlp(hidden, weights, real)
    x = kernels.norm(hidden, weights.norm, eps=weights.eps)
    products = (weights.gate_up, weights.gate_up_bias, weights.down, weights.down_bias)
    return hidden + _gated(x, products, real, kernels=kernels, group=group)


def _gated(
    x: Tensor,
    products: tuple[MatrixLike, Tensor | None, MatrixLike, Tensor | None],
    real: Tensor | None,
    *,
    kernels: Kernels,
    group: Collectives,
) -> Tensor:
    """x [b, T, H] -> [b, T, H]; the products are gate and up in one, down, and the biases after each."""
    gate_up, gate_up_bias, down, down_bias = products
    both = biased(kernels.linear(x, gate_up, real), gate_up_bias)
    out = kernels.linear(kernels.activate(both, "silu", gated=True), down, real)
    return biased(group.reduce(out), down_bias)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias, if there is one."""
    return x if bias is None else x + bias


def frozen(x: Stored) -> nn.Parameter:
    """A tensor that is never quantised, as a parameter that is not trained. For matrices: `matrix`."""
    assert isinstance(x, Tensor), "a matrix that may be quantised is wrapped by `matrix`"
    return nn.Parameter(x.contiguous(), requires_grad=False)


def joined_vectors(weights: Weights, names: list[str]) -> nn.Parameter:
    """Several biases as one. Takes them out of ``weights``."""
    return nn.Parameter(torch.cat([frozen(weights.pop(name)) for name in names]), requires_grad=False)


class LlamaLayer(nn.Module):
    """Attention and gated MLP, each behind a norm and added to the stream."""

    def __init__(self, shard: Shard, weights: Weights, kernels: Kernels, *, index: int, group: Collectives) -> None:
        super().__init__()
        config, prefix = shard.config, f"model.layers.{index}."
        self._kernels, self._layers, self._eps = kernels, kernels.layers, config.rms_norm_eps
        self.attention_norm = frozen(weights.pop(f"{prefix}input_layernorm.weight"))
        self.attention = SelfAttention(
            shard, weights, kernels, prefix=f"{prefix}self_attn.", group=group, bias=config.attention_bias
        )
        self.mlp_norm = frozen(weights.pop(f"{prefix}post_attention_layernorm.weight"))
        self.mlp = GatedMlp(weights, kernels, prefix=f"{prefix}mlp.", group=group, bias=config.mlp_bias)

    def forward(self, hidden: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation) -> Tensor:
        """See `DecoderModel`."""
        eps = self._eps
        if self._layers is not None:
            attention = self.attention.with_norm(self.attention_norm, eps)
            hidden = self._layers.attention(hidden, attention, place, cache=cache, rotation=rotation)
            return self._layers.mlp(hidden, self.mlp.with_norm(self.mlp_norm, eps), place.real)
        x = self._kernels.norm(hidden, self.attention_norm, eps=eps)
        hidden = hidden + self.attention(x, place, cache, rotation)
        mlp: Tensor = self.mlp(self._kernels.norm(hidden, self.mlp_norm, eps=eps), place.real)
        return hidden + mlp
