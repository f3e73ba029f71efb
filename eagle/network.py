"""Formulas of an EAGLE head, shared by decoding and training, and the module that is trained.

`EagleNetwork` leaves attention to the caller: a decoder attends to a cache (`paceline.eagle.head`), training to whole
sequences, with the training-time test of EAGLE-3 (`TrainableHead`). Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv
2503.01840).

Letters: b sequences or slots, n tokens of a call, S tokens of a sequence, H width of the head, F of a feature, V
vocabulary, U ids that can be drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.decoder.kernels.protocol import Kernels, MlpWeights
from paceline.decoder.models.layers import biased, gated_mlp
from paceline.decoder.models.rope import rope_tables
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.parallel.vocab_parallel import whole
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import MatrixLike, matrix, quantize
from paceline.eagle.config import EagleConfig, layer_prefix
from paceline.heads.trainable import TrainingKernels, initial, register

Qkv = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[int, Qkv], Tensor]
"""Attention of a layer by its number: q [b, n, heads, D], k and v [b, n, groups, D] -> [b, m, heads * D]."""
Past = list[list[tuple[Tensor, Tensor]]]
"""Keys and values of every pass so far, of every layer, each [b, heads, S, D]."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; matrices with the same input are joined, so that one matmul reads them all.

    hidden_norm  of the state that the first layer of version 3 reads beside the token
    """

    hidden_norm: Tensor | None
    input_norm: Tensor | None
    qkv: MatrixLike
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: MatrixLike
    out_bias: Tensor | None
    mlp: MlpWeights

    @classmethod
    def joined(cls, config: EagleConfig, tensors: Mapping[str, Tensor], index: int) -> LayerWeights:
        """Build a layer's weights from the tensors of a checkpoint, by our names."""
        prefix = layer_prefix(index)

        def rows(*names: str) -> Tensor:
            parts = [tensors[f"{prefix}{name}.weight"] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def bias(*names: str, present: bool) -> Tensor | None:
            return torch.cat([tensors[f"{prefix}{name}.bias"] for name in names]) if present else None

        qkv, gate_up = [f"self_attn.{side}_proj" for side in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
        attention_bias, mlp_bias = config.attention_bias, config.mlp_bias
        mlp = MlpWeights(
            tensors[f"{prefix}post_attention_layernorm.weight"],
            rows(*gate_up),
            bias(*gate_up, present=mlp_bias),
            rows("mlp.down_proj"),
            bias("mlp.down_proj", present=mlp_bias),
            config.rms_norm_eps,
        )
        return cls(
            hidden_norm=tensors.get(f"{prefix}hidden_norm.weight"),
            input_norm=tensors.get(f"{prefix}input_layernorm.weight"),
            qkv=rows(*qkv),
            qkv_bias=bias(*qkv, present=attention_bias),
            q_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
            k_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
            out=rows("self_attn.o_proj"),
            out_bias=bias("self_attn.o_proj", present=attention_bias),
            mlp=mlp,
        )


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """All weights of a head.

    fc_norms  of every stream of the target, or one of all of them joined; empty: none
    head      [U, H], the output layer; the target's, unless `EagleConfig.owns_output`
    """

    fc: MatrixLike
    fc_bias: Tensor | None
    fc_norms: tuple[Tensor, ...]
    layers: tuple[LayerWeights, ...]
    norm: Tensor | None
    head: MatrixLike

    @classmethod
    def joined(cls, config: EagleConfig, tensors: Mapping[str, Tensor], head: MatrixLike) -> EagleWeights:
        """Build the weights from the tensors of a checkpoint, by our names; ``head`` is the output layer."""
        return cls(
            fc=tensors["fc.weight"],
            fc_bias=tensors.get("fc.bias"),
            fc_norms=tuple(tensors[name] for name in config.fc_norms),
            layers=tuple(LayerWeights.joined(config, tensors, index) for index in range(config.num_layers)),
            norm=tensors.get("norm.weight"),
            head=head,
        )

    def quantized(self, form: WeightFormat, *, head: bool) -> EagleWeights:
        """Return the weights with quantised matrices; the output layer only if ``head`` is set."""

        def packed(weight: MatrixLike) -> MatrixLike:
            return matrix(quantize(weight, form)) if isinstance(weight, Tensor) else weight

        def layer(weights: LayerWeights) -> LayerWeights:
            mlp = replace(weights.mlp, gate_up=packed(weights.mlp.gate_up), down=packed(weights.mlp.down))
            return replace(weights, qkv=packed(weights.qkv), out=packed(weights.out), mlp=mlp)

        output = packed(self.head) if head else self.head
        return replace(self, fc=packed(self.fc), layers=tuple(map(layer, self.layers)), head=output)


@dataclass(frozen=True, slots=True)
class EagleNetwork:
    """The head without attention, which the caller computes: it may look at more pairs than are multiplied.

    With a ``group`` of ranks, ``weights`` are this rank's shard (`paceline.eagle.division`): some of the heads.
    """

    config: EagleConfig
    weights: EagleWeights
    kernels: Kernels
    group: Collectives

    def fuse(self, features: Tensor, real: Tensor | None = None) -> Tensor:
        """Fuse features [b, n, F] to the hidden state [b, n, H] that a pair of real features reads."""
        if self.config.version == 1:
            return features
        if norms := self.weights.fc_norms:
            parts = features.split(features.shape[-1] // len(norms), -1)
            features = torch.cat([self._norm(x, weight) for x, weight in zip(parts, norms, strict=True)], -1)
        return self._fc(features, real)

    def run(
        self,
        embedded: Tensor,
        hidden: Tensor,
        attend: Attend,
        *,
        rotation: tuple[Tensor, Tensor],
        real: Tensor | None = None,
        kept: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run all layers: embedded and hidden [b, n, H], cos and sin [.., n, 1, D] -> hidden [b, n, H].

        kept  selects the pairs [b, m, ...] whose result is wanted; the last layer computes nothing of the others after
              its attention
        """
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            stream, qkv = self._project(layer, embedded, hidden, rotation=rotation, real=real)
            attended = attend(index, qkv)
            if kept is not None and index == last:
                stream, attended = kept(stream), kept(attended)
                real = None if real is None else real.clamp(max=stream.shape[1])
            hidden = self._finish(layer, stream, attended, real=real)
        return self._normed(hidden) if self.config.norm_output else hidden

    def scores(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        """Compute logits: hidden [b, n, H] -> [b, n, U] of the ids that can be drafted, or this rank's part."""
        hidden = hidden if self.config.norm_output else self._normed(hidden)
        return self.kernels.linear(hidden, self.weights.head, real)

    def _project(
        self,
        weights: LayerWeights,
        embedded: Tensor,
        hidden: Tensor,
        *,
        rotation: tuple[Tensor, Tensor],
        real: Tensor | None,
    ) -> tuple[Tensor, Qkv]:
        """Compute a layer before attention -> the residual stream [b, n, H]; q, k and v, rotated."""
        config = self.config
        if weights.hidden_norm is not None and weights.input_norm is not None:
            normed = self._norm(hidden, weights.hidden_norm)
            stream = normed if config.norm_before_residual else hidden
            x = torch.cat([self._norm(embedded, weights.input_norm), normed], -1)
        else:
            stream = self._fc(torch.cat([embedded, hidden], -1), real) if config.version == 1 else hidden
            x = stream if weights.input_norm is None else self._norm(stream, weights.input_norm)
        heads = weights.out.shape[1] // config.head_dim
        groups = (weights.qkv.shape[0] // config.head_dim - heads) // 2
        qkv = biased(self.kernels.linear(x, weights.qkv, real), weights.qkv_bias)
        q, k, v = qkv.unflatten(-1, (heads + 2 * groups, config.head_dim)).split((heads, groups, groups), dim=2)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)
        return stream, (self.kernels.rotate(q, rotation), self.kernels.rotate(k, rotation), v)

    def _finish(self, weights: LayerWeights, stream: Tensor, attended: Tensor, *, real: Tensor | None) -> Tensor:
        """Compute a layer after attention: stream [b, n, H], attended [b, n, heads * D] -> hidden [b, n, H]."""
        out = self.group.reduce(self.kernels.linear(attended.contiguous(), weights.out, real))
        stream = stream + biased(out, weights.out_bias)
        return gated_mlp(stream, weights.mlp, real, kernels=self.kernels, group=self.group)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.norm(x, weight, eps=self.config.rms_norm_eps)

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self.weights.norm is None else self._norm(hidden, self.weights.norm)

    def _fc(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Apply ``fc``: x [b, n, in] -> [b, n, H], gathered from all ranks."""
        product = whole(self.kernels.linear(x, self.weights.fc, real), self.config.hidden_size, self.group)
        return biased(product, self.weights.fc_bias)


def masked_state(config: EagleConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return what a P-EAGLE head reads in place of the fused features of a position not yet known, [H] float32.
    ``tensors``: of a checkpoint, by our names, whole.
    """
    every = {name: x.float() for name, x in tensors.items() if name.startswith(("fc", "input_norm", "mask_hidden"))}
    norms = tuple(every[name] for name in config.fc_norms)
    weights = EagleWeights(every["fc.weight"], every.get("fc.bias"), norms, (), None, every["fc.weight"])
    network = EagleNetwork(config, weights, TrainingKernels(), SingleRank())
    return network.fuse(every["mask_hidden"].view(1, 1, -1)).flatten()


class TrainableHead(nn.Module):
    """A head in training, over whole sequences.

    Its parameters carry our own names of a head's tensors, so that its state is a checkpoint. ``embedding`` [V, H] and,
    where it is not the head's own, ``head`` [V, H] are the target's and stay frozen.
    """

    cos: Tensor
    sin: Tensor
    start: str | None
    """Identifies the trained weights with which it began; None for a fresh head."""

    def __init__(self, config: EagleConfig, embedding: Tensor, head: Tensor | None) -> None:
        super().__init__()
        self.start = None
        assert config.owns_output or head is not None, "it borrows the target's output layer"
        self.config, self._kernels = config, TrainingKernels()
        for name, shape in config.shapes().items():
            register(self, name, initial(name, shape))
        cos, sin = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        for name, value in (("cos", cos), ("sin", sin), ("embedding", embedding), ("borrowed", head)):
            self.register_buffer(name, value, persistent=False)

    @property
    def network(self) -> EagleNetwork:
        tensors = dict(self.named_parameters())
        head = tensors["lm_head.weight"] if self.config.owns_output else self.get_buffer("borrowed")
        return EagleNetwork(self.config, EagleWeights.joined(self.config, tensors, head), self._kernels, SingleRank())

    def fuse(self, features: Tensor) -> Tensor:
        return self.network.fuse(features)

    def unknown(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of a P-EAGLE head at positions not yet known: tokens [b, S], hidden [b, S, H]."""
        hidden = self.fuse(self.get_parameter("mask_hidden").view(1, 1, -1))
        return torch.full_like(tokens, self.config.mask_token or 0), hidden.expand(*tokens.shape, -1)

    def forward(self, tokens: Tensor, hidden: Tensor, past: Past) -> Tensor:
        """Run pass ``len(past)``: position i reads token i + 1 + pass and the previous pass's hidden state at i.

        tokens [b, S] (already shifted), hidden [b, S, H] -> hidden [b, S, H], which predicts the token after that.
        Appends the keys and values of this pass to ``past``.
        """
        config = self.config
        embedded = F.embedding(tokens, self.get_buffer("embedding")).float()
        positions = torch.arange(tokens.shape[1], device=tokens.device) + len(past)
        rotation = (self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))
        past.append([])

        def attend(layer: int, qkv: Qkv) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in qkv)
            repeats = config.num_heads // config.num_kv_heads
            past[-1].append((k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
            if len(past) == 1:
                attended = F.scaled_dot_product_attention(q, *past[0][layer], is_causal=True)
            else:
                attended = _attend_passes(q / math.sqrt(config.head_dim), [one[layer] for one in past])
            return attended.transpose(1, 2).flatten(2)

        return self.network.run(embedded, hidden, attend, rotation=rotation)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: [..., H] -> [..., U] (version 1: U = V)."""
        return self.network.scores(hidden)


def _attend_passes(q: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend in a later pass: q [b, H, S, D] (scaled) sees pass 0 up to its position, and of the others only that."""
    (first, values), later = past[0], past[1:]
    size = q.shape[2]
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    scores = (q @ first.transpose(2, 3)).masked_fill(~causal, -math.inf)
    own_scores = [(q * keys).sum(-1, keepdim=True) for keys, _ in later]
    weights = torch.cat([scores, *own_scores], -1).softmax(-1)
    attended = weights[..., :size] @ values
    for index, (_, value) in enumerate(later):
        attended = attended + weights[..., size + index, None] * value
    return attended
