"""The network of a family: embedding, layers, norm and head, as described by its `Blueprint`.

It holds weights (of one rank, if the model is sharded) and reads the caches that it receives; it stores no length and
does not depend on backends or rounds. Activations are float32, whatever the type of the weights: they are rounded only
inside a matmul (`Kernels.linear`), so no fusion can change them. Each block ends with a sum over the ranks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.types import FeatureSpec
from paceline.decoder.kernels.protocol import (
    CachePosition,
)
from paceline.decoder.models.attention import Attention, LatentAttention
from paceline.decoder.models.experts import MixtureOfExperts
from paceline.decoder.models.family import parts
from paceline.decoder.models.layers import Mlp, Part, Rotation, Weights, biased, frozen, scaled
from paceline.decoder.models.rope import rope_tables, rotation_at
from paceline.decoder.parallel.vocab_parallel import embedded
from paceline.decoder.weights.quantize import matrix


class DecoderModel(nn.Module):
    """The network of one rank; rows of a window past ``positions`` read the last rotation, and are not used."""

    def __init__(self, part: Part, weights: Weights, positions: int) -> None:
        super().__init__()
        config, plan, outer = part.config, part.plan, part.names.outer
        self._kernels, self._group, self.plan = part.kernels, part.group, plan
        self.embedding = matrix(weights.pop(f"{outer['embedding']}.weight"))
        self.layers = nn.ModuleList(self.layer(part, weights, index) for index in range(config.num_layers))
        self.norm = part.norm(weights, outer["norm"])
        head = weights.pop(f"{outer['head']}.weight", None)
        self.head = self.embedding if head is None else matrix(head)
        self.first = part.norm(weights, outer.get("embedding norm", "")) if plan.embedding_norm else None
        self.learned = frozen(weights.pop(f"{outer['positions']}.weight")) if plan.learned else None
        self.head_bias = frozen(weights.pop(f"{outer['head']}.bias")) if plan.head_bias else None
        for name, rope in (("", config.rope), ("local_", config.local_rope)):
            if rope is not None and plan.rotated_share:
                slides = [index for index, window in enumerate(plan.windows) if bool(window) is bool(name)]
                rotated = config.of_layer(slides[0] if slides else 0).rotated
                for side, table in zip(("cos", "sin"), rope_tables(rope, rotated, positions), strict=True):
                    self.register_buffer(f"{name}{side}", table)
        self.register_buffer(
            "ids", torch.tensor(part.shard.ids, dtype=torch.int32)
        )  # of this rank's rows of both tables
        self._last = positions - 1

    ids: Tensor

    def layer(self, part: Part, weights: Weights, index: int) -> nn.Module:
        """Call one layer with hidden states [b, T, H], a `CachePosition`, its cache [slots, G, R, D] twice, which it
        changes in place, and the rotation of the positions, or None. -> hidden states
        """
        return DecoderLayer(part, weights, index)

    def forward(
        self,
        tokens: Tensor,
        place: CachePosition,
        caches: list[tuple[Tensor, Tensor]],
        *,
        reads: FeatureSpec | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [b, T] int32 -> hidden [b, T, H], before the head, and the requested features [b, T, F].

        Changes ``caches`` in place. With the caches of the first layers alone, the others are left out.
        """
        at = place.positions(tokens.shape[1]).clamp(max=self._last)
        hidden = self._entered(embedded(tokens, self.embedding, self.ids, group=self._group, kernels=self._kernels), at)
        streams = [hidden]
        for layer, cache, rotation in zip(self.layers, caches, self.rotations(at), strict=False):
            hidden = layer(hidden, place, cache, rotation)
            streams.append(hidden)
        hidden = self.norm(hidden)
        if reads is None:
            return hidden, None
        return hidden, torch.cat([streams[i] for i in reads.layers], -1) if reads.layers else hidden

    def _entered(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Embeddings [b, T, H] of positions [b, T] int32 -> what the first layer reads."""
        hidden = scaled(hidden, self.plan.embedding_scale)
        if self.learned is not None:
            hidden = hidden + self._kernels.embed(self.learned, at + self.plan.learned_from)
        return hidden if self.first is None else self.first(hidden)

    def rotations(self, at: Tensor) -> list[Rotation | None]:
        """Return the rotations of positions [b, T] int32, for each layer."""
        plan, count = self.plan, len(self.layers)
        if not plan.rotated_share:
            return [None] * count
        rotated_by = partial(rotation_at, at, kernels=self._kernels)
        default = local = rotated_by(self.get_buffer("cos"), self.get_buffer("sin"))
        if plan.local_rope:
            local = rotated_by(self.get_buffer("local_cos"), self.get_buffer("local_sin"))
        sides = [local if window else default for window in plan.windows or [0] * count]
        return [None if plan.unrotated and plan.unrotated[index] else side for index, side in enumerate(sides)]

    def logits(self, hidden: Tensor, count: Tensor | None = None) -> Tensor:
        """hidden [b, T, H] -> [b, T, n] float32, of this rank's ids; ``count`` [b] as in `Kernels.linear`."""
        logits = scaled(biased(self._kernels.linear(hidden, self.head, count), self.head_bias), self.plan.logit_scale)
        cap = self.plan.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms, each added to the residual stream.

    Kernels that compute a whole block, with its norm and its addition, are used for blocks equal to Llama's.
    """

    def __init__(self, part: Part, weights: Weights, index: int) -> None:
        super().__init__()
        prefix, plan = part.names.layer.format(i=index), part.plan
        inner = {name: prefix + rest for name, rest in part.names.inner.items()}
        after = plan.norms != "before"
        self._plan = plan
        self.norm = None if plan.norms == "after" else part.norm(weights, inner["norm"])
        self.attention: Attention | LatentAttention = (
            LatentAttention(part, weights, inner) if plan.latent else Attention(part, weights, inner, index=index)
        )
        self.post_norm = part.norm(weights, inner["post norm"]) if after else None
        self.mlp_norm = None if plan.norms == "after" or plan.shared_norm else part.norm(weights, inner["mlp norm"])
        self.mlp: Mlp | MixtureOfExperts
        if plan.experts is None:
            self.mlp = Mlp(part, weights, inner)
        elif plan.experts.dense and plan.experts.dense[index]:
            self.mlp = Mlp(part, weights, parts(inner, "dense"))
        else:
            self.mlp = MixtureOfExperts(part, weights, inner)
        self.post_mlp_norm = part.norm(weights, inner["post mlp norm"]) if after else None
        plain = plan.norm == "rms" and plan.norms == "before" and not plan.parallel and plan.residual_scale == 1.0
        self._fused = part.kernels.layers if plain else None

    def forward(
        self, hidden: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation | None
    ) -> Tensor:
        plan, fused = self._plan, self._fused
        if (
            fused is not None
            and rotation is not None
            and isinstance(self.attention, Attention)
            and self.attention.plain
        ):
            assert self.norm is not None
            between = fused.attention(
                hidden, self.attention.with_norm(self.norm), place, cache=cache, rotation=rotation
            )
            return self._added(between, None, place)
        x = hidden if self.norm is None else self.norm(hidden)
        attention = self.attention(x, place, cache, rotation)
        if self.post_norm is not None:
            attention = self.post_norm(attention)
        attention = scaled(attention, plan.residual_scale)
        if plan.parallel:
            return self._added(hidden, x, place) + attention
        return self._added(hidden + attention, None, place)

    def _added(self, hidden: Tensor, x: Tensor | None, place: CachePosition) -> Tensor:
        """hidden [b, T, H] with the MLP's part, which reads ``x`` where it shares attention's norm."""
        mlp, norm = self.mlp, self.mlp_norm
        if self._fused is not None and isinstance(mlp, Mlp) and mlp.plain:
            assert norm is not None
            return self._fused.mlp(hidden, mlp.with_norm(norm), place.real)
        if norm is not None or x is None:
            x = hidden if norm is None else norm(hidden)
        added = mlp(x, place.real)
        if self.post_mlp_norm is not None:
            added = self.post_mlp_norm(added)
        total: Tensor = hidden + scaled(added, self._plan.residual_scale)
        return total
