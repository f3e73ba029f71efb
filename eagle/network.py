"""The head as a plain full-sequence network for training, with the training-time test of EAGLE-3.

Its parameters carry our own names of a head's tensors, so that its state is a checkpoint. It shares no code with the
head that decodes (`paceline.eagle.head`), which tests compare with it. Sources: EAGLE (arXiv 2401.15077), EAGLE-3
(arXiv 2503.01840).

Letters: b texts, S tokens of a text, H width of the head, F of a feature, V vocabulary, U of it what is drafted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.decoder.models.rope import rope_tables
from paceline.eagle.config import EagleConfig

Past = list[tuple[Tensor, Tensor]]


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps))


class Attention(nn.Module):
    """Causal attention of pass j over pass 0, and over a place's own earlier passes."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self._shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.qkv_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.qkv_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.qkv_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], past: Past) -> Tensor:
        """x [b, S, .] -> [b, S, H]. Appends this pass's keys and values to ``past``."""
        heads, groups, width = self._shape
        q, k, v = (
            made.unflatten(-1, (count, width)).transpose(1, 2)
            for made, count in ((self.q_proj(x), heads), (self.k_proj(x), groups), (self.v_proj(x), groups))
        )
        q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        past.append((k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)))
        if len(past) == 1:
            mixed = F.scaled_dot_product_attention(q, *past[0], is_causal=True)
        else:
            mixed = _mixed(q / math.sqrt(width), past)
        found: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return found


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Layer(nn.Module):
    """The one layer of a head."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self._config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        if config.version == 3:
            self.hidden_norm = Norm(size, eps)
        if config.version == 3 or config.input_norm:
            self.input_layernorm = Norm(size, eps)
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.post_attention_layernorm = Norm(size, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], past: Past) -> Tensor:
        """Version 1 gets what ``fc`` made as ``hidden`` and reads no embedding. [b, S, H] -> [b, S, H]"""
        stream = hidden
        if self._config.version == 3:
            normed = self.hidden_norm(hidden)
            stream = normed if self._config.norm_before_residual else hidden
            x = torch.cat([self.input_layernorm(embedded), normed], -1)
        else:
            x = self.input_layernorm(hidden) if self._config.input_norm else hidden
        stream = stream + self.self_attn(x, rotation, past)
        found: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return found


class EagleNetwork(nn.Module):
    """A head that learns. ``embedding`` [V, H] and, for version 1, ``head`` [V, H] are the target's and stay frozen."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: EagleConfig, embedding: Tensor, head: Tensor | None) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        if config.version == 3:
            self.fc = nn.Linear(config.feature_size, size, bias=False)
            self.norm = Norm(size, config.rms_norm_eps)
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        else:
            assert head is not None, "version 1 borrows the target's output layer"
            self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layer = Layer(config)
        cos, sin = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        for name, value in (("cos", cos), ("sin", sin), ("embedding", embedding), ("borrowed", head)):
            self.register_buffer(name, value, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """features [b, S, F] -> the hidden state [b, S, H] that the first pass reads."""
        made: Tensor = self.fc(features) if self.config.version == 3 else features
        return made

    def forward(self, tokens: Tensor, hidden: Tensor, past: Past) -> Tensor:
        """Pass ``len(past)``: place i reads token i + 1 + pass and the hidden state the pass before left there.

        tokens [b, S] (already shifted), hidden [b, S, H] -> hidden [b, S, H], which predicts the token behind.
        """
        embedded = F.embedding(tokens, self.get_buffer("embedding")).float()
        at = torch.arange(tokens.shape[1]) + len(past)
        rotation = (self.cos[at], self.sin[at])
        if self.config.version == 1:
            hidden = self.fc(torch.cat([embedded, hidden], -1))
        made: Tensor = self.layer(embedded, hidden, rotation, past)
        return made

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., U] (version 1: U = V)."""
        if self.config.version == 3:
            made: Tensor = self.lm_head(self.norm(hidden))
            return made
        return F.linear(hidden, self.get_buffer("borrowed"))


def _mixed(q: Tensor, past: Past) -> Tensor:
    """Attention of a later pass: q [b, H, S, D] (scaled) sees pass 0 up to its place and its own place of the rest."""
    (first, values), later = past[0], past[1:]
    size = q.shape[2]
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    scores = (q @ first.transpose(2, 3)).masked_fill(~causal, -math.inf)
    own = [(q * keys).sum(-1, keepdim=True) for keys, _ in later]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    mixed = weights[..., :size] @ values
    for index, (_, value) in enumerate(later):
        mixed = mixed + weights[..., size + index, None] * value
    return mixed


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, H, S, D], cos and sin [S, D or D / 2]."""
    half = x.shape[-1] // 2
    cos, sin = (t[..., :half] for t in (cos, sin))
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
