"""Random EAGLE heads for the tiny target, and plain references of what they compute; no tests.

The references use no cache, no tree mask and no code of the head: every node is computed from its whole path.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.auto import SamplingDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.steps import prefill
from paceline.eagle import checkpoint, train
from paceline.eagle.checkpoint import Checkpoint
from paceline.eagle.config import EagleConfig
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.tree import DraftTree
from tests.decoder.tiny import VOCABULARY
from tests.draft.random_heads import random_weights

DRAFTED = 48
LAYERS = (0, 1, 2)
NEWER: dict[str, object] = {"qk_norm": True, "fc_norm": True, "norm_output": True, "num_layers": 2}
"""What EAGLE-3.1 and heads of several layers have beyond EAGLE-3."""
SHARED: dict[str, object] = {
    "shares_output": True, "draft_vocab_size": VOCABULARY, "num_layers": 2, "qk_norm": True,
    "norm_before_residual": True,
}  # fmt: skip
PARALLEL: dict[str, object] = {"mask_token": 95, "fc_norm": True, "num_layers": 2}
"""A P-EAGLE head."""


def config(target: ModelConfig, version: int, **changes: object) -> EagleConfig:
    """Sizes of a head; version 3 reads all streams of the tiny target and drafts half of its vocabulary."""
    made = train.default_config(target, version=version, layers=LAYERS, draft_vocab_size=DRAFTED)
    return replace(made, **changes)  # type: ignore[arg-type]


def random_head(sizes: EagleConfig, *, seed: int = 1) -> Checkpoint:
    weights = random_weights(sizes.shapes(), seed=seed)
    if sizes.version == 3:
        weights["ids"] = torch.randperm(sizes.vocab_size)[: sizes.draft_vocab_size].sort().values
    if sizes.mask_token is not None:
        weights["mask_hidden"] = torch.randn(sizes.feature_size)
    return Checkpoint(sizes, weights, None)


def drafter(
    folder: Path, target: SamplingDecoder, version: int, tree: DraftTree, *, divided: bool | None = None, **own: object
) -> EagleDrafter:
    """A drafter with a random head, through the disk; ``own``: changes of its sizes."""
    checkpoint.save(folder, random_head(config(target.config, version, **own)))
    return EagleDrafter.from_pretrained(folder, target, tree, divided=divided)


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
        self._head = self.weights.get("lm_head.weight", head.float())
        self.ids = made.weights["ids"] if made.config.version == 3 else torch.arange(VOCABULARY)

    def hidden(self, real: Tensor, tokens: list[int]) -> Tensor:
        """Hidden state after a path: ``real`` [n, F] features pair with the first n tokens, later tokens with what the
        head itself made of the pair before; in a P-EAGLE head they count only by their number. -> [H] of the last pair.
        """
        mask, known = self.config.mask_token, len(real)
        if mask is not None:
            tokens = [*tokens[:known], *[mask] * (len(tokens) - known)]
            real = torch.cat([real, self.weights["mask_hidden"].expand(len(tokens) - known, -1)])
        states = self._fused(real) if self.config.version == 3 else real
        while True:
            out = self._layers(self._embedding[tokens[: len(states)]], states)
            if self.config.norm_output:
                out = self._norm(out, "norm.weight")
            if len(states) == len(tokens):
                return out[-1]
            states = torch.cat([states, out[-1:]])

    def _fused(self, real: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            real = self._norm(real, "input_norm.weight")
        if self.config.fc_norm:
            width = self.config.target_hidden_size
            parts = [real[:, i * width : (i + 1) * width] for i in range(len(self.config.layers))]
            real = torch.cat([self._norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(parts)], -1)
        return real @ self.weights["fc.weight"].T

    def scores(self, hidden: Tensor) -> Tensor:
        """[H] -> [U]."""
        if self.config.version == 3 and not self.config.norm_output:
            hidden = self._norm(hidden, "norm.weight")
        return hidden @ self._head.T

    def _layers(self, embedded: Tensor, states: Tensor) -> Tensor:
        out = self._layer(embedded, states)
        for index in range(1, self.config.num_layers):
            prefix = f"layers.{index}."
            out = self._rest(out, self._norm(out, f"{prefix}input_layernorm.weight"), prefix)
        return out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config.rms_norm_eps)

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        if self.config.version == 1:
            joined = self._linear(torch.cat([embedded, states], -1), "fc")
            normed = self._norm(joined, "layer.input_layernorm.weight") if self.config.input_norm else joined
            return self._rest(joined, normed, "layer.")
        normed = self._norm(states, "layer.hidden_norm.weight")
        stream = normed if self.config.norm_before_residual else states
        x = torch.cat([self._norm(embedded, "layer.input_layernorm.weight"), normed], -1)
        return self._rest(stream, x, "layer.")

    def _rest(self, stream: Tensor, x: Tensor, prefix: str) -> Tensor:
        """A layer from its attention's input on."""
        stream = stream + self._attention(x, prefix)
        y = self._norm(stream, f"{prefix}post_attention_layernorm.weight")
        gate, up = (self._linear(y, f"{prefix}mlp.{part}_proj") for part in ("gate", "up"))
        return stream + self._linear(F.silu(gate) * up, f"{prefix}mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()))

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        """Every pair in a separate pass, over the pairs up to it."""
        sizes, size = self.config, len(x)
        q, k, v = (
            self._linear(x, f"{prefix}self_attn.{side}_proj").unflatten(-1, (-1, sizes.head_dim)) for side in "qkv"
        )
        if sizes.qk_norm:
            q, k = (self._norm(y, f"{prefix}self_attn.{side}_norm.weight") for side, y in (("q", q), ("k", k)))
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
        return self._linear(torch.stack(rows), f"{prefix}self_attn.o_proj")


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    both = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([both.real, both.imag], -1)
