"""Many texts of a small Llama at once on one GPU: to make training data with, not how Paceline decodes.

Thousands of rows share a cache of fixed shape; a step of all rows is one CUDA graph. A row whose text has ended takes
the next prompt. Everything is plain PyTorch in the weights' type (bf16), with softmax and choice in float32, so a text
can differ from Paceline's where two tokens are nearly as likely. Without a GPU the same code runs step by step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

_LOOK = 16  # steps between two looks at which rows have ended
_PREFILL_TOKENS = 65_536  # of prompts that are read in one forward


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids to continue, at a temperature (0 is greedy), with at most ``new`` tokens."""

    ids: Sequence[int]
    temperature: float
    new: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer; what reads the same input is joined."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class GpuDecoder:
    """``rows`` texts of at most ``room`` tokens at a time. ``end`` is the id that ends a text."""

    def __init__(self, model: LlamaForCausalLM, *, rows: int, room: int, end: int) -> None:
        config, state = model.config, model.state_dict()
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._size, self._eps = config.hidden_size // self._heads, config.rms_norm_eps
        self._layers = [_layer(state, f"model.layers.{index}.") for index in range(config.num_hidden_layers)]
        self._embedding, self._norm = state["model.embed_tokens.weight"], state["model.norm.weight"]
        self._output = state.get("lm_head.weight", self._embedding)
        self._rows, self._room, self._end = rows, room, end
        device, dtype = self._embedding.device, self._embedding.dtype
        theta = config.rope_parameters["rope_theta"]
        angles = torch.arange(room, device=device)[:, None] * theta ** (
            -torch.arange(0, self._size, 2, device=device, dtype=torch.float64) / self._size
        )
        self._cos, self._sin = (torch.cat([f(angles)] * 2, -1).float() for f in (torch.cos, torch.sin))
        shape = (len(self._layers), rows, self._groups, room, self._size)
        self._keys, self._values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self._tokens, self._places = (torch.zeros(rows, device=device, dtype=torch.int64) for _ in range(2))
        self._last = torch.zeros(rows, device=device, dtype=torch.int64)  # place of the last token that a row may write
        self._heat = torch.zeros(rows, device=device)
        self._texts = torch.full((rows, room), end, device=device)
        self._index = torch.arange(rows, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def texts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Prompt and answer of each prompt, in order; an answer that ended with an end id includes it."""
        found: list[list[int]] = [[] for _ in prompts]
        waiting = list(range(len(prompts)))[::-1]
        owners: list[int | None] = [None] * self._rows
        self._places.zero_()
        self._last.zero_()
        while True:
            ended = ((self._tokens == self._end) | (self._places >= self._last)).tolist()
            free = [row for row, over in enumerate(ended) if over]
            done = [row for row in free if owners[row] is not None]
            if done:
                kept, sizes = self._texts[done].tolist(), (self._places[done] + 1).tolist()
                for row, text, size in zip(done, kept, sizes, strict=True):
                    found[owners[row]] = text[:size]  # type: ignore[index]
                    owners[row] = None
            if not waiting and all(owner is None for owner in owners):
                return found
            if waiting and (len(free) * 8 >= self._rows or len(free) >= len(waiting)):
                taken = [waiting.pop() for _ in range(min(len(free), len(waiting)))]
                for row, index in zip(free, taken, strict=False):
                    owners[row] = index
                self._read(free[: len(taken)], [prompts[index] for index in taken])
            for _ in range(_LOOK):
                self._run()

    def _read(self, rows: list[int], prompts: list[Prompt]) -> None:
        """Read prompts into rows; the first tokens of their answers are chosen."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        while order:
            longest = len(prompts[order[-1]].ids)
            part = [order.pop() for _ in range(min(len(order), max(1, _PREFILL_TOKENS // longest)))]
            device = self._tokens.device
            tokens = torch.full((len(part), longest), self._end)
            for line, index in enumerate(part):
                tokens[line, : len(prompts[index].ids)] = torch.tensor(prompts[index].ids)
            tokens = tokens.to(device)
            sizes = torch.tensor([len(prompts[index].ids) for index in part], device=device)
            where = torch.tensor([rows[index] for index in part], device=device)
            x = F.embedding(tokens, self._embedding)
            rotation = self._cos[:longest, None], self._sin[:longest, None]
            for number, layer in enumerate(self._layers):
                q, k, v = self._project(x, layer, rotation)
                self._keys[number, where, :, :longest] = k.transpose(1, 2)
                self._values[number, where, :, :longest] = v.transpose(1, 2)
                q, k, v = (y.transpose(1, 2) for y in (q, k, v))
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = self._finish(x, attended.transpose(1, 2).flatten(2), layer)
            self._texts[where, :longest] = tokens
            self._heat[where] = torch.tensor([prompts[index].temperature for index in part], device=device)
            limits = torch.tensor([prompts[index].new for index in part], device=device)
            self._last[where] = torch.minimum(sizes + limits, torch.full_like(sizes, self._room)) - 1
            chosen = self._choose(x[torch.arange(len(part), device=device), sizes - 1], self._heat[where])
            self._tokens[where], self._places[where] = chosen, sizes
            self._texts[where, sizes] = chosen

    def _run(self) -> None:
        if self._tokens.device.type != "cuda":
            self._step()
            return
        if self._graph is None:
            self._step()  # the libraries' first call, outside the graph
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        self._graph.replay()

    def _step(self) -> None:
        """One more token of every row; a row that has ended stays as it is."""
        x = F.embedding(self._tokens, self._embedding)[:, None]
        rotation = self._cos[self._places][:, None, None], self._sin[self._places][:, None, None]
        hidden = torch.arange(self._room, device=x.device) > self._places[:, None]
        bias = torch.zeros(hidden.shape, device=x.device).masked_fill(hidden, -math.inf)[:, None, None]
        share = self._heads // self._groups
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(x, layer, rotation)
            keys, values = self._keys[number], self._values[number]
            keys[self._index, :, self._places], values[self._index, :, self._places] = k[:, 0], v[:, 0]
            q = q.view(self._rows, self._groups, share, self._size)
            scores = (q @ keys.transpose(2, 3)).float() / math.sqrt(self._size) + bias
            attended = scores.softmax(-1).to(values.dtype) @ values
            x = self._finish(x, attended.view(self._rows, 1, -1), layer)
        chosen = self._choose(x[:, 0], self._heat)
        going = (self._tokens != self._end) & (self._places < self._last)
        self._places += going
        self._tokens.copy_(torch.where(going, chosen, self._tokens))
        self._texts[self._index, self._places] = self._tokens

    def _project(self, x: Tensor, layer: Layer, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, S, H] -> q [n, S, heads, D], k and v [n, S, groups, D], rotated."""
        joined = F.linear(self._normed(x, layer.norm), layer.qkv).unflatten(-1, (-1, self._size))
        q, k, v = joined.split((self._heads, self._groups, self._groups), 2)
        return self._rotated(q, rotation), self._rotated(k, rotation), v

    def _finish(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        x = x + F.linear(attended, layer.out)
        gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), self._eps).to(x.dtype)

    @staticmethod
    def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = rotation
        first, second = x.float().chunk(2, -1)
        return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    def _choose(self, x: Tensor, heat: Tensor) -> Tensor:
        """x [n, H], heat [n] -> ids [n]: the best one, or one drawn at the row's temperature (the Gumbel trick)."""
        logits = F.linear(self._normed(x, self._norm), self._output).float()
        noise = -torch.empty_like(logits).exponential_().log()
        return torch.where(heat[:, None] > 0, logits / heat[:, None].clamp(min=1e-6) + noise, logits).argmax(-1)


def _layer(state: dict[str, Tensor], prefix: str) -> Layer:
    def joined(*names: str) -> Tensor:
        return torch.cat([state[f"{prefix}{name}.weight"] for name in names])

    return Layer(
        norm=joined("input_layernorm"),
        qkv=joined(*(f"self_attn.{side}_proj" for side in "qkv")),
        out=joined("self_attn.o_proj"),
        mlp_norm=joined("post_attention_layernorm"),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )
