"""The Llama family (Llama 2 and 3, and what shares their layout) as pure fixed-shape functions.

Holds weights (of one rank, where the model is divided) and reads caches that it is given; holds no length and knows
neither backends nor rounds. Activations are float32 throughout, whatever the type of the weights: no intermediate is
rounded, so no fusion can change one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.core.types import FeatureSpec
from paceline.decoder.kernels.protocol import AttentionWeights, CachePosition, Kernels, MlpWeights
from paceline.decoder.models.rope import apply_rope, rope_tables
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.parallel.vocab_parallel import embedded

Weights = dict[str, Tensor]


class LlamaModel(nn.Module):
    """Embedding, layers, norm and head. ``weights`` (parts of ``shard`` by Hugging Face's names) is emptied.

    ``positions`` is how long a text may be; rows of a window past it read the last rotation, and mean nothing.
    """

    cos: Tensor
    sin: Tensor
    ids: Tensor

    def __init__(self, shard: Shard, weights: Weights, kernels: Kernels, *, positions: int, group: Collectives) -> None:
        super().__init__()
        config = shard.config
        self.config, self._kernels, self._group = config, kernels, group
        self.embedding = _frozen(weights.pop("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(
            LlamaLayer(shard, weights, kernels, index=i, group=group) for i in range(config.num_layers)
        )
        self.norm = _frozen(weights.pop("model.norm.weight"))
        head = weights.pop("lm_head.weight", None)
        self.head = self.embedding if config.tie_word_embeddings or head is None else _frozen(head)
        cos, sin = rope_tables(config.rope, config.head_dim, positions)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("ids", torch.tensor(shard.ids, dtype=torch.int32))  # of this rank's rows of both tables

    def forward(
        self,
        tokens: Tensor,
        place: CachePosition,
        caches: list[tuple[Tensor, Tensor]],
        *,
        reads: FeatureSpec | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [b, T] int32 -> hidden [b, T, H], before the head, and the features [b, T, F] asked for.

        Changes ``caches`` in place.
        """
        hidden = embedded(tokens, self.embedding, self.ids, group=self._group)
        at = place.positions(tokens.shape[1]).clamp(max=self.cos.shape[0] - 1)
        rotation = (self.cos[at].unsqueeze(2), self.sin[at].unsqueeze(2))
        streams = [hidden]
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, place, cache, rotation)
            streams.append(hidden)
        hidden = rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        if reads is None:
            return hidden, None
        return hidden, torch.cat([streams[i] for i in reads.layers], -1) if reads.layers else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [b, T, H] -> [b, T, n] float32, of this rank's ids."""
        return self._kernels.linear(hidden, self.head)


class LlamaLayer(nn.Module):
    """Attention and gated MLP, each behind a norm and added to the stream; each ends with a sum over the ranks."""

    def __init__(self, shard: Shard, weights: Weights, kernels: Kernels, *, index: int, group: Collectives) -> None:
        super().__init__()
        config = shard.config
        self.config, self._shard, self._kernels, self._group = config, shard, kernels, group
        name = f"model.layers.{index}."
        self.attention_norm = _frozen(weights.pop(name + "input_layernorm.weight"))
        self.qkv = _joined(weights, [f"{name}self_attn.{x}_proj.weight" for x in "qkv"])
        self.out = _frozen(weights.pop(name + "self_attn.o_proj.weight"))
        self.mlp_norm = _frozen(weights.pop(name + "post_attention_layernorm.weight"))
        self.gate_up = _joined(weights, [f"{name}mlp.{x}_proj.weight" for x in ("gate", "up")])
        self.down = _frozen(weights.pop(name + "mlp.down_proj.weight"))
        attention, mlp = config.attention_bias, config.mlp_bias
        self.qkv_bias = _joined(weights, [f"{name}self_attn.{x}_proj.bias" for x in "qkv"]) if attention else None
        self.out_bias = _frozen(weights.pop(name + "self_attn.o_proj.bias")) if attention else None
        self.gate_up_bias = _joined(weights, [f"{name}mlp.{x}_proj.bias" for x in ("gate", "up")]) if mlp else None
        self.down_bias = _frozen(weights.pop(name + "mlp.down_proj.bias")) if mlp else None
        if shard.gathers:
            self.register_buffer("key_heads", torch.tensor(shard.key_heads, dtype=torch.int32))

    def forward(
        self, hidden: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        weights = AttentionWeights(
            self.attention_norm, self.qkv, self.qkv_bias, self.out, self.out_bias, self.config.rms_norm_eps
        )
        if self._kernels.layers is not None:
            hidden = self._kernels.layers.attention(hidden, weights, place, cache=cache, rotation=rotation)
        else:
            x = rms_norm(hidden, self.attention_norm, weights.eps)
            hidden = hidden + self._attention(x, place, cache=cache, rotation=rotation)
        mlp = MlpWeights(self.mlp_norm, self.gate_up, self.gate_up_bias, self.down, self.down_bias, weights.eps)
        return gated_mlp(hidden, mlp, place.real, kernels=self._kernels, group=self._group)

    def _attention(
        self, x: Tensor, place: CachePosition, *, cache: tuple[Tensor, Tensor], rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        mixed = _biased(self._kernels.linear(x, self.qkv, place.real), self.qkv_bias)
        width, part = self.config.head_dim, self._shard.key_part
        q, keys, values = mixed.split((self._shard.heads * width, part, part), dim=-1)
        k, v = self._key_heads(keys, values)
        q, k = apply_rope(q.view(*q.shape[:-1], -1, width), *rotation), apply_rope(k, *rotation)
        made = self._kernels.linear(self._kernels.attend((q, k, v), cache, place), self.out, place.real)
        return _biased(self._group.reduce(made), self.out_bias)

    def _key_heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Products of this rank's rows of both matrices [b, T, n] -> the heads of its cache, [b, T, G, D] each."""
        shape = (*keys.shape[:-1], -1, self.config.head_dim)
        if not self._shard.gathers:
            return keys.view(shape), values.view(shape)
        every = self._group.gather(torch.stack((keys, values)))  # [ranks, 2, b, T, n]
        heads = every.permute(1, 2, 3, 0, 4).reshape(2, *shape).index_select(3, self.get_buffer("key_heads"))
        return heads[0], heads[1]


def gated_mlp(
    hidden: Tensor, weights: MlpWeights, real: Tensor | None = None, *, kernels: Kernels, group: Collectives
) -> Tensor:
    """The second half of a layer: hidden [b, T, H] + MLP(norm(hidden)), summed over the ranks of ``group``."""
    if kernels.layers is not None:
        return kernels.layers.mlp(hidden, weights, real)
    x = rms_norm(hidden, weights.norm, weights.eps)
    gate, up = _biased(kernels.linear(x, weights.gate_up, real), weights.gate_up_bias).chunk(2, dim=-1)
    made = kernels.linear(nn.functional.silu(gate) * up, weights.down, real)
    return hidden + _biased(group.reduce(made), weights.down_bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x.contiguous(), requires_grad=False)


def _joined(weights: Weights, names: list[str]) -> nn.Parameter:
    """Several matrices as one, so that one product reads them all."""
    return _frozen(torch.cat([weights.pop(name) for name in names]))
