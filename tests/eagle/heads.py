"""Random EAGLE heads for the tiny target, and plain references of what they compute; no tests in here.

The references use no cache, no tree mask and no code of the head: every node is computed from its whole path, and the
layer of version 1 is transformers' own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from paceline.auto import SamplingDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.steps import prefill
from paceline.eagle import checkpoint, train
from paceline.eagle.checkpoint import Checkpoint
from paceline.eagle.config import EagleConfig
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.tree import DraftTree
from tests.decoder.tiny import VOCABULARY

DRAFTED = 48
LAYERS = (0, 1, 2)


def config(target: ModelConfig, version: int, **changes: object) -> EagleConfig:
    """Sizes of a head; version 3 reads all streams of the tiny target and drafts half of its vocabulary."""
    made = train.default_config(target, version=version, layers=LAYERS, draft_vocab_size=DRAFTED)
    return replace(made, **changes)  # type: ignore[arg-type]


def random_head(sizes: EagleConfig, *, seed: int = 1) -> Checkpoint:
    """Weights that are neither zero nor one anywhere, so that no mix-up is hidden."""
    torch.manual_seed(seed)
    weights = {
        name: torch.randn(shape) * (0.3 if len(shape) > 1 else 0.2) + (1.0 if "norm" in name else 0.0)
        for name, shape in sizes.shapes().items()
    }
    if sizes.version == 3:
        weights["ids"] = torch.randperm(sizes.vocab_size)[: sizes.draft_vocab_size].sort().values
    return Checkpoint(sizes, weights, None)


def drafter(
    folder: Path,
    target: SamplingDecoder,
    version: int,
    draft_tree: DraftTree,
    *,
    divided: bool | None = None,
    **changes: object,
) -> EagleDrafter:
    """A drafter with a random head, through the disk."""
    made = random_head(config(target.config, version, **changes))
    checkpoint.save(folder, made)
    return EagleDrafter.from_pretrained(folder, target, draft_tree, divided=divided)


def features(target: SamplingDecoder, ids: list[int], made: EagleDrafter) -> Tensor:
    """[S, F] of a text, from the target's prefill (in slot 0)."""
    found = prefill(target, 0, ids, reads=made.reads)[1]
    assert found is not None
    return found


class Plain:
    """A head as formulas over a whole path, for one text."""

    def __init__(self, made: Checkpoint, embedding: Tensor, head: Tensor) -> None:
        self.config, self.weights = made.config, {name: x.float() for name, x in made.weights.items()}
        self._embedding = embedding.float()
        self._head = self.weights["lm_head.weight"] if made.config.version == 3 else head.float()
        self.ids = made.weights["ids"] if made.config.version == 3 else torch.arange(VOCABULARY)

    def hidden(self, real: Tensor, tokens: list[int]) -> Tensor:
        """Hidden state after a path: ``real`` [n, F] features pair with the first n tokens, later tokens with what the
        head itself made of the pair before. -> [H] of the last pair.
        """
        states = real @ self.weights["fc.weight"].T if self.config.version == 3 else real
        while True:
            out = self._layer(self._embedding[tokens[: len(states)]], states)
            if len(states) == len(tokens):
                return out[-1]
            states = torch.cat([states, out[-1:]])

    def scores(self, hidden: Tensor) -> Tensor:
        """[H] -> [U]."""
        if self.config.version == 3:
            hidden = self._norm(hidden, "norm.weight")
        return hidden @ self._head.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config.rms_norm_eps)

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        if self.config.version == 1:
            joined = torch.cat([embedded, states], -1) @ self.weights["fc.weight"].T
            return self._transformers(joined + self.weights.get("fc.bias", torch.zeros(())))
        normed = self._norm(states, "layer.hidden_norm.weight")
        stream = normed if self.config.norm_before_residual else states
        x = torch.cat([self._norm(embedded, "layer.input_layernorm.weight"), normed], -1)
        stream = stream + self._attention(x)
        y = self._norm(stream, "layer.post_attention_layernorm.weight")
        gate, up = y @ self.weights["layer.mlp.gate_proj.weight"].T, y @ self.weights["layer.mlp.up_proj.weight"].T
        return stream + (F.silu(gate) * up) @ self.weights["layer.mlp.down_proj.weight"].T

    def _attention(self, x: Tensor) -> Tensor:
        """Every pair by itself, over the pairs up to it."""
        sizes, size = self.config, len(x)
        q, k, v = (
            (x @ self.weights[f"layer.self_attn.{side}_proj.weight"].T).unflatten(-1, (-1, sizes.head_dim))
            for side in "qkv"
        )
        angles = torch.arange(size)[:, None] / sizes.rope.theta ** (torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (_turned(y, turn) for y in (q, k))
        rows = []
        for i in range(size):
            heads = []
            for h in range(sizes.num_heads):
                g = h * sizes.num_kv_heads // sizes.num_heads
                weights = (k[: i + 1, g] @ q[i, h] / sizes.head_dim**0.5).softmax(0)
                heads.append(weights @ v[: i + 1, g])
            rows.append(torch.cat(heads))
        return torch.stack(rows) @ self.weights["layer.self_attn.o_proj.weight"].T

    def _transformers(self, x: Tensor) -> Tensor:
        """The layer of transformers, which a head of version 1 is but for its first norm."""
        sizes = self.config
        made = LlamaConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            rms_norm_eps=sizes.rms_norm_eps,
            attention_bias=sizes.attention_bias,
            mlp_bias=sizes.mlp_bias,
            attn_implementation="eager",
        )
        layer = LlamaDecoderLayer(made, 0).eval()
        own = {n.removeprefix("layer."): w for n, w in self.weights.items() if n.startswith("layer.")}
        left = layer.load_state_dict(own, strict=False)
        assert not left.unexpected_keys and set(left.missing_keys) <= {"input_layernorm.weight"}
        if left.missing_keys:
            layer.input_layernorm = torch.nn.Identity()
        size = len(x)
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        places = torch.arange(size)[None]
        turn = LlamaRotaryEmbedding(made)(x[None], places)
        with torch.no_grad():
            out = layer(x[None], attention_mask=mask, position_ids=places, position_embeddings=turn)
        return (out[0] if isinstance(out, tuple) else out).view(size, -1)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    both = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([both.real, both.imag], -1)
