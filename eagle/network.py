"""Formulas of an EAGLE head, shared by decoding and training, and the module that is trained.

`EagleNetwork` is the mathematics over a set of weights and leaves attention to the caller: a decoder attends to a cache
(`paceline.eagle.head`), training to whole sequences, with the training-time test of EAGLE-3 (`TrainableHead`). Sources:
EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840).

Letters: b sequences or slots, n tokens of a call, S tokens of a sequence, H width of the head, F of a feature, V
vocabulary, U ids that can be drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.decoder.kernels.protocol import Kernels, MlpWeights
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.layers import biased, gated_mlp
from paceline.decoder.models.rope import rope_tables
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.parallel.vocab_parallel import whole
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import MatrixLike, matrix, quantize
from paceline.eagle.config import EagleConfig

Qkv = tuple[Tensor, Tensor, Tensor]
Past = list[tuple[Tensor, Tensor]]
"""Keys and values of every pass so far, each [b, heads, S, D]."""


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """All weights of a head; matrices with the same input are joined, so that one matmul reads them all.

    head  [U, H], the output layer; shared with the target in version 1
    """

    fc: MatrixLike
    fc_bias: Tensor | None
    hidden_norm: Tensor | None
    input_norm: Tensor | None
    qkv: MatrixLike
    qkv_bias: Tensor | None
    out: MatrixLike
    out_bias: Tensor | None
    mlp: MlpWeights
    norm: Tensor | None
    head: MatrixLike

    @classmethod
    def joined(cls, config: EagleConfig, tensors: Mapping[str, Tensor], head: MatrixLike) -> EagleWeights:
        """Build the weights from the tensors of a checkpoint, by our names; ``head`` is the output layer."""

        def rows(*names: str) -> Tensor:
            parts = [tensors[f"layer.{name}.weight"] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def bias(*names: str, present: bool) -> Tensor | None:
            return torch.cat([tensors[f"layer.{name}.bias"] for name in names]) if present else None

        qkv, gate_up = [f"self_attn.{side}_proj" for side in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
        attention_bias, mlp_bias = config.attention_bias, config.mlp_bias
        mlp = MlpWeights(
            tensors["layer.post_attention_layernorm.weight"],
            rows(*gate_up),
            bias(*gate_up, present=mlp_bias),
            rows("mlp.down_proj"),
            bias("mlp.down_proj", present=mlp_bias),
            config.rms_norm_eps,
        )
        return cls(
            fc=tensors["fc.weight"],
            fc_bias=tensors.get("fc.bias"),
            hidden_norm=tensors.get("layer.hidden_norm.weight"),
            input_norm=tensors.get("layer.input_layernorm.weight"),
            qkv=rows(*qkv),
            qkv_bias=bias(*qkv, present=attention_bias),
            out=rows("self_attn.o_proj"),
            out_bias=bias("self_attn.o_proj", present=attention_bias),
            mlp=mlp,
            norm=tensors.get("norm.weight"),
            head=head,
        )

    def quantized(self, form: WeightFormat, *, head: bool) -> EagleWeights:
        """Return the weights with quantised matrices, including the output layer only if ``head`` is set.

        Raises:
            ConfigurationError: the format has blocks, and a matrix has rows that are not a whole number of them.
        """

        def packed(weight: MatrixLike) -> MatrixLike:
            return matrix(quantize(weight, form)) if isinstance(weight, Tensor) else weight

        mlp = replace(self.mlp, gate_up=packed(self.mlp.gate_up), down=packed(self.mlp.down))
        output = packed(self.head) if head else self.head
        return replace(self, fc=packed(self.fc), qkv=packed(self.qkv), out=packed(self.out), mlp=mlp, head=output)


@dataclass(frozen=True, slots=True)
class EagleNetwork:
    """The head before and after attention, so that attention may look at more pairs than are multiplied.

    With a ``group`` of ranks, ``weights`` are this rank's shard (`paceline.eagle.division`): some of the heads.
    """

    config: EagleConfig
    weights: EagleWeights
    kernels: Kernels
    group: Collectives

    def fuse(self, features: Tensor, real: Tensor | None = None) -> Tensor:
        """Fuse features [b, n, F] to the hidden state [b, n, H] that a pair of real features reads."""
        return self._fc(features, real) if self.config.version == 3 else features

    def project(
        self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], *, real: Tensor | None = None
    ) -> tuple[Tensor, Qkv]:
        """Compute pairs before attention: embedded and hidden [b, n, H], cos and sin [.., n, 1, D]
        -> the residual stream [b, n, H]; q [b, n, heads, D], k and v [b, n, groups, D], rotated.
        """
        config, weights, norm, eps = self.config, self.weights, self.kernels.norm, self.config.rms_norm_eps
        if config.version == 3:
            assert weights.hidden_norm is not None and weights.input_norm is not None
            normed = norm(hidden, weights.hidden_norm, eps=eps)
            stream = normed if config.norm_before_residual else hidden
            x = torch.cat([norm(embedded, weights.input_norm, eps=eps), normed], -1)
        else:
            stream = self._fc(torch.cat([embedded, hidden], -1), real)
            x = stream if weights.input_norm is None else norm(stream, weights.input_norm, eps=eps)
        heads = weights.out.shape[1] // config.head_dim
        groups = (weights.qkv.shape[0] // config.head_dim - heads) // 2
        qkv = self._linear(x, weights.qkv, weights.qkv_bias, real=real)
        q, k, v = qkv.unflatten(-1, (heads + 2 * groups, config.head_dim)).split((heads, groups, groups), dim=2)
        return stream, (self.kernels.rotate(q, rotation), self.kernels.rotate(k, rotation), v)

    def finish(self, stream: Tensor, attended: Tensor, real: Tensor | None = None) -> Tensor:
        """Compute pairs after attention: stream [b, n, H], attended [b, n, heads * D] -> hidden [b, n, H]."""
        out = self.group.reduce(self.kernels.linear(attended.contiguous(), self.weights.out, real))
        stream = stream + biased(out, self.weights.out_bias)
        return gated_mlp(stream, self.weights.mlp, real, kernels=self.kernels, group=self.group)

    def scores(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        """Compute logits: hidden [b, n, H] -> [b, n, U] of the ids that can be drafted, or of this rank's part of
        them.
        """
        if self.weights.norm is not None:
            hidden = self.kernels.norm(hidden, self.weights.norm, eps=self.config.rms_norm_eps)
        return self.kernels.linear(hidden, self.weights.head, real)

    def _linear(self, x: Tensor, weight: MatrixLike, bias: Tensor | None, *, real: Tensor | None = None) -> Tensor:
        return biased(self.kernels.linear(x, weight, real), bias)

    def _fc(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Apply ``fc``: x [b, n, in] -> [b, n, H], gathered from all ranks."""
        product = whole(self.kernels.linear(x, self.weights.fc, real), self.config.hidden_size, self.group)
        return biased(product, self.weights.fc_bias)


class TrainingKernels(TorchKernels):
    """Kernels whose matmuls support autocast and gradients."""

    def linear(self, x: Tensor, weight: MatrixLike, count: Tensor | None = None) -> Tensor:
        assert isinstance(weight, Tensor), "training has no quantised matrices"
        return F.linear(x, weight)


class TrainableHead(nn.Module):
    """A head in training, over whole sequences.

    Its parameters carry our own names of a head's tensors, so that its state is a checkpoint. ``embedding`` [V, H] and,
    for version 1, ``head`` [V, H] are the target's and stay frozen.
    """

    cos: Tensor
    sin: Tensor
    start: str | None
    """Identifies the trained weights with which it began; None for a fresh head."""

    def __init__(self, config: EagleConfig, embedding: Tensor, head: Tensor | None) -> None:
        super().__init__()
        self.start = None
        assert config.version == 3 or head is not None, "version 1 borrows the target's output layer"
        self.config, self._kernels = config, TrainingKernels()
        for name, shape in config.shapes().items():
            _register(self, name, _initial(name, shape))
        cos, sin = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        for name, value in (("cos", cos), ("sin", sin), ("embedding", embedding), ("borrowed", head)):
            self.register_buffer(name, value, persistent=False)

    @property
    def network(self) -> EagleNetwork:
        """Formulas over the current parameters."""
        tensors = dict(self.named_parameters())
        head = tensors["lm_head.weight"] if self.config.version == 3 else self.get_buffer("borrowed")
        return EagleNetwork(self.config, EagleWeights.joined(self.config, tensors, head), self._kernels, SingleRank())

    def fuse(self, features: Tensor) -> Tensor:
        """Fuse features [b, S, F] to the hidden state [b, S, H] that the first pass reads."""
        return self.network.fuse(features)

    def forward(self, tokens: Tensor, hidden: Tensor, past: Past) -> Tensor:
        """Run pass ``len(past)``: position i reads token i + 1 + pass and the previous pass's hidden state at i.

        tokens [b, S] (already shifted), hidden [b, S, H] -> hidden [b, S, H], which predicts the token after that.
        Appends the keys and values of this pass to ``past``.
        """
        network, config = self.network, self.config
        embedded = F.embedding(tokens, self.get_buffer("embedding")).float()
        positions = torch.arange(tokens.shape[1], device=tokens.device) + len(past)
        rotation = (self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))
        stream, qkv = network.project(embedded, hidden, rotation)
        q, k, v = (x.transpose(1, 2) for x in qkv)
        repeats = config.num_heads // config.num_kv_heads
        past.append((k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
        if len(past) == 1:
            attended = F.scaled_dot_product_attention(q, *past[0], is_causal=True)
        else:
            attended = _attend_passes(q / math.sqrt(config.head_dim), past)
        return network.finish(stream, attended.transpose(1, 2).flatten(2))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: [..., H] -> [..., U] (version 1: U = V)."""
        return self.network.scores(hidden)


def _attend_passes(q: Tensor, past: Past) -> Tensor:
    """Attend in a later pass: q [b, H, S, D] (scaled) sees pass 0 up to its position, and only its position of the
    others.
    """
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


def _register(module: nn.Module, name: str, value: Tensor) -> None:
    """Register a parameter of a dotted name, in modules of its parts."""
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    module.register_parameter(last, nn.Parameter(value))


def _initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return initial values: those of `nn.Linear`; norms ones, biases zeros."""
    value = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5)) if len(shape) > 1 else value
