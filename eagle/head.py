"""An EAGLE head that decodes: one decoder layer with a cache of its own, on a backend's kernels.

Row p of its cache holds the *pair* of place p: the target's feature at p and the token at p + 1 (EAGLE's shift, so a
pair's row and position are one less than its token's). Rows behind the last committed pair hold guesses, made from the
head's own output, and are written anew from real features before they count. Stores rows, never a length.
Not here: which tokens are drafted (`paceline.eagle.tree`) and the training (`paceline.eagle.network`).

Letters: b lines, n pairs of a call, H width of the head, F of a feature, U ids that can be drafted, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.core import reduce
from paceline.decoder.kernels.protocol import CachePosition, Kernels, MlpWeights, Tree
from paceline.decoder.models.layers import gated_mlp, rms_norm
from paceline.decoder.models.rope import apply_rope, rope_tables
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.parallel.vocab_parallel import SharedHead, embedded, whole
from paceline.eagle.config import EagleConfig

Qkv = tuple[Tensor, Tensor, Tensor]
Weights = dict[str, Tensor]


class EagleLayer(nn.Module):
    """The layer, in two halves, so that attention may look at more pairs than are multiplied. Empties ``weights``."""

    def __init__(self, config: EagleConfig, weights: Weights, kernels: Kernels) -> None:
        super().__init__()
        self.config, self._kernels = config, kernels
        three = config.version == 3
        self.hidden_norm = _frozen(weights.pop("layer.hidden_norm.weight")) if three else None
        normed = three or config.input_norm
        self.input_norm = _frozen(weights.pop("layer.input_layernorm.weight")) if normed else None
        self.mlp_norm = _frozen(weights.pop("layer.post_attention_layernorm.weight"))
        attention, mlp = config.attention_bias, config.mlp_bias
        qkv, gate_up = [f"self_attn.{side}_proj" for side in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
        self.qkv, self.qkv_bias = _joined(weights, qkv, bias=attention)
        self.out, self.out_bias = _joined(weights, ["self_attn.o_proj"], bias=attention)
        self.gate_up, self.gate_up_bias = _joined(weights, gate_up, bias=mlp)
        self.down, self.down_bias = _joined(weights, ["mlp.down_proj"], bias=mlp)

    def project(
        self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], *, real: Tensor | None
    ) -> tuple[Tensor, Qkv]:
        """embedded and hidden [b, n, H] -> the residual stream [b, n, H]; q, k, v of the pairs, rotated."""
        eps = self.config.rms_norm_eps
        stream = hidden
        if self.hidden_norm is not None and self.input_norm is not None:
            normed = rms_norm(hidden, self.hidden_norm, eps)
            stream = normed if self.config.norm_before_residual else hidden
            x = torch.cat([rms_norm(embedded, self.input_norm, eps), normed], -1)
        else:
            x = hidden if self.input_norm is None else rms_norm(hidden, self.input_norm, eps)
        heads, groups, width = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        mixed = self._linear(x, self.qkv, self.qkv_bias, real=real)
        q, k, v = mixed.unflatten(-1, (heads + 2 * groups, width)).split((heads, groups, groups), dim=2)
        return stream, (apply_rope(q, *rotation), apply_rope(k, *rotation), v)

    def finish(self, stream: Tensor, mixed: Tensor) -> Tensor:
        """stream [b, n, H], what attention gave [b, n, .] -> hidden [b, n, H]."""
        mixed = mixed.contiguous()
        stream = stream + self._linear(mixed, self.out, self.out_bias)
        eps = self.config.rms_norm_eps
        mlp = MlpWeights(self.mlp_norm, self.gate_up, self.gate_up_bias, self.down, self.down_bias, eps)
        return gated_mlp(stream, mlp, kernels=self._kernels, group=SingleRank())

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, real: Tensor | None = None) -> Tensor:
        made = self._kernels.linear(x, weight, real)
        return made if bias is None else made + bias


class EagleHead(nn.Module):
    """The head with its cache. ``weights`` is emptied.

    ``lent`` is the target's, not copied: the embedding, unless ``embedding`` [V, H] is the head's own, and the output
    layer of version 1. Over a divided target both are this rank's rows; everything else is the same on every rank.
    """

    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    ids: Tensor
    places: Tensor
    rows: Tensor

    def __init__(
        self,
        config: EagleConfig,
        weights: Weights,
        *,
        lent: SharedHead,
        embedding: Tensor | None = None,
        kernels: Kernels,
        options: DecoderOptions,
    ) -> None:
        super().__init__()
        self.config, self.kernels, self._options = config, kernels, options
        self.embedding = lent.embedding if embedding is None else _frozen(embedding)
        self.fc = _frozen(weights.pop("fc.weight"))
        self.fc_bias = _frozen(weights.pop("fc.bias")) if config.fc_bias else None
        self.layer = EagleLayer(config, weights, kernels)
        three = config.version == 3
        self.norm = _frozen(weights.pop("norm.weight")) if three else None
        self.head = _frozen(weights.pop("lm_head.weight")) if three else lent.head
        self._tables: tuple[Collectives, Collectives] = (
            lent.group if embedding is None else SingleRank(),
            SingleRank() if three else lent.group,
        )
        cos, sin = rope_tables(config.rope, config.head_dim, options.n_positions)
        ids = weights.pop("ids") if three else torch.arange(config.vocab_size)
        places = torch.full((config.vocab_size,), config.draft_vocab_size, dtype=torch.int32)
        places[ids.to(torch.int64)] = torch.arange(config.draft_vocab_size, dtype=torch.int32)
        shape = (options.batch_size, config.num_kv_heads, options.rows, config.head_dim)
        buffers = {
            "cos": cos,
            "sin": sin,
            "keys": torch.zeros(shape, dtype=options.dtype),
            "values": torch.zeros(shape, dtype=options.dtype),
            "slots": torch.arange(options.batch_size, dtype=torch.int32),
            "ids": ids.to(torch.int32),  # the target's id of every id that can be drafted
            "places": places,  # and back; U where there is none
            "rows": lent.ids if lent.group.degree > 1 else lent.ids[:0],  # needed only where tables are divided
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def fuse(self, features: Tensor, real: Tensor | None = None) -> Tensor:
        """features [b, n, F] -> the hidden state [b, n, H] that a pair of real features reads."""
        return self.kernels.linear(features, self.fc, real) if self.config.version == 3 else features

    def project(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, *, real: Tensor | None = None
    ) -> tuple[Tensor, Qkv]:
        """Pairs before attention. tokens [b, n] int32, hidden [b, n, H], positions [b, n] int32."""
        read = embedded(tokens, self.embedding, self.rows, group=self._tables[0])
        if self.config.version == 1:
            hidden = self.kernels.linear(torch.cat([read, hidden], -1), self.fc, real)
            hidden = hidden if self.fc_bias is None else hidden + self.fc_bias
        at = positions.clamp(max=self.cos.shape[0] - 1)
        stream, qkv = self.layer.project(
            read, hidden, (self.cos[at].unsqueeze(2), self.sin[at].unsqueeze(2)), real=real
        )
        return stream, qkv

    def attend(self, qkv: Qkv, place: CachePosition) -> Tensor:
        """Write pairs to their rows and look back. -> [b, n, .]"""
        return self.kernels.attend(qkv, (self.keys, self.values), place)

    def place(self, row: Tensor, count: int, *, reach: int, tree: Tree | None = None) -> CachePosition:
        """``count`` pairs in every slot from row [B] on."""
        return CachePosition(row, torch.full_like(row, count), self.slots, reach, tree=tree)

    def row(self, row: Tensor) -> Tensor:
        """Rows [B] pulled back into the text's positions: what a slot computes elsewhere is not used by anyone."""
        return row.clamp(min=0, max=self._options.n_positions - 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[b, n, H] -> [b, n, U] float32."""
        if self.norm is not None:
            hidden = rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return whole(self.kernels.linear(hidden, self.head), self.config.draft_vocab_size, self._tables[1])

    def spread(self, logits: Tensor) -> Tensor:
        """[b, n, U] -> [b, n, V], `reduce.NEGATIVE` for ids that cannot be drafted."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return logits
        nothing = torch.full_like(logits[..., :1], reduce.NEGATIVE)
        return torch.cat([logits, nothing], -1).index_select(-1, self.places)


def _frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x.contiguous(), requires_grad=False)


def _joined(weights: Weights, names: list[str], *, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Several matrices as one, and their biases, so that one product reads them all."""
    matrix, rest = (
        [weights.pop(f"layer.{name}.{kind}") for name in names] if wanted else []
        for kind, wanted in (("weight", True), ("bias", bias))
    )
    return _frozen(torch.cat(matrix)), _frozen(torch.cat(rest)) if bias else None
