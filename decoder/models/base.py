"""The forward pass that model families share: embedding, layers, norm, head. What a family says of its checkpoints:
`paceline.decoder.models.family`.

Holds weights (of one rank, where the model is divided) and reads caches that it is given; holds no length and knows
neither backends nor rounds. Activations are float32 throughout, whatever the type of the weights: none is rounded but
inside of a product (`Kernels.linear`), so no fusion can change one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.core.types import FeatureSpec
from paceline.decoder.kernels.protocol import CachePosition, Kernels
from paceline.decoder.models.layers import Rotation, frozen
from paceline.decoder.models.rope import rope_tables, rotation_at
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.parallel.vocab_parallel import embedded
from paceline.decoder.weights.quantize import Stored, matrix


class DecoderModel(nn.Module):
    """The network of one rank. A layer is called with hidden states [b, T, H], a
    `CachePosition`, its cache [slots, G, R, D] twice, which it changes in place, and the rotation of the positions; it
    gives hidden states.

    embedding  [rows of this rank, H]
    norm       [H], of the last hidden states
    head       [rows of this rank, H]; None = the embedding serves as the head
    positions  how long a text may be; rows of a window past it read the last rotation, and mean nothing
    """

    cos: Tensor
    sin: Tensor
    ids: Tensor

    def __init__(
        self,
        shard: Shard,
        kernels: Kernels,
        *,
        embedding: Stored,
        layers: Iterable[nn.Module],
        norm: Stored,
        head: Stored | None,
        positions: int,
        group: Collectives,
    ) -> None:
        super().__init__()
        self._config, self._kernels, self._group = shard.config, kernels, group
        self.embedding = matrix(embedding)
        self.layers = nn.ModuleList(layers)
        self.norm = frozen(norm)
        self.head = self.embedding if head is None else matrix(head)
        cos, sin = rope_tables(shard.config.rope, shard.config.head_dim, positions)
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
        at = place.positions(tokens.shape[1]).clamp(max=self.cos.shape[0] - 1)
        hidden = self.entered(embedded(tokens, self.embedding, self.ids, group=self._group, kernels=self._kernels), at)
        streams = [hidden]
        for layer, cache, rotation in zip(self.layers, caches, self.rotations(at), strict=True):
            hidden = layer(hidden, place, cache, rotation)
            streams.append(hidden)
        hidden = self.left(hidden)
        if reads is None:
            return hidden, None
        return hidden, torch.cat([streams[i] for i in reads.layers], -1) if reads.layers else hidden

    def entered(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Embeddings [b, T, H] of positions [b, T] int32 -> what the first layer reads."""
        return hidden

    def rotations(self, at: Tensor) -> list[Rotation]:
        """Of positions [b, T] int32, for each layer."""
        return [rotation_at(at, self.cos, self.sin, kernels=self._kernels)] * len(self.layers)

    def left(self, hidden: Tensor) -> Tensor:
        """What the last layer gives [b, T, H] -> what the head reads."""
        return self._kernels.norm(hidden, self.norm, eps=self._config.rms_norm_eps)

    def logits(self, hidden: Tensor, count: Tensor | None = None) -> Tensor:
        """hidden [b, T, H] -> [b, T, n] float32, of this rank's ids; of the first ``count`` [b] rows of every line, as
        in `Kernels.linear`.
        """
        return self._kernels.linear(hidden, self.head, count)
