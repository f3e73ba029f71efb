"""A layer of the Llama family. Its tensors: `paceline.decoder.models.llama`."""

from __future__ import annotations

from torch import Tensor, nn

from paceline.decoder.kernels.protocol import CachePosition, Kernels
from paceline.decoder.models.layers import GatedMlp, Rotation, SelfAttention, Weights, frozen
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard


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
