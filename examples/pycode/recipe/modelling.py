"""The two models: building, warm starts (also of a narrower draft from a wider one), attention, data."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.decoder.token_files import read_tokens

CONTEXT = 1024  # the longest training sequence; short ones are parts of such a chunk
BLOCK = 128  # query rows per block in `blocked_causal_attention`
END_ID, PAD_ID = 4094, 4095


def blocked_causal_attention(
    module: torch.nn.Module,  # noqa: ARG001  # the interface of transformers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention in blocks of query rows, for packed batches: no padding, no cache.

    Once compiled this is faster on a CPU than the fused kernel for short sequences.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length, rows = query.shape[2], []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        scores = (query[:, :, start:end] @ key[:, :, :end].transpose(-1, -2)).float() * scaling
        visible = torch.arange(start, end)[:, None] >= torch.arange(end)[None]
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1).to(value.dtype)
        rows.append(weights @ value[:, :, :end])
    return torch.cat(rows, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("blocked_causal", blocked_causal_attention)


def new_model(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads,
            intermediate_size=intermediate,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=END_ID,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )
    )


def load_model(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def parse_shape(text: str) -> list[int]:
    shape = [int(part) for part in text.split(",")]
    if len(shape) != 5:
        raise ValueError("a shape is hidden,layers,heads,kv_heads,intermediate")
    return shape


@torch.no_grad()
def residual_directions(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Orthogonal directions of the residual stream, the ones with most variance first."""
    states = model(ids, output_hidden_states=True).hidden_states[:-1]
    rows = torch.cat([F.normalize(s.flatten(0, 1), dim=-1) for s in states])
    return torch.linalg.eigh((rows.T @ rows).double())[1].flip(-1).float()


@torch.no_grad()
def narrow(model: LlamaForCausalLM, hidden: int, ids: torch.Tensor) -> LlamaForCausalLM:
    """A copy with fewer hidden channels and narrower heads, cut along the directions that matter least.

    Norm weights go into the matrices behind them, the residual stream is rotated to its principal
    directions and cut; queries and keys keep the rotary pairs whose frequencies are nearest to the new
    ones; values and output projections are cut by a singular value decomposition.
    """
    old = model.config
    small = new_model(
        hidden, old.num_hidden_layers, old.num_attention_heads, old.num_key_value_heads, old.intermediate_size
    )
    keep = residual_directions(model, ids)[:, :hidden]
    for p in small.parameters():
        if p.dim() == 1:  # the mean square is now over fewer channels
            p.fill_(math.sqrt(old.hidden_size / hidden))
    small.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ keep)
    small.lm_head.weight.copy_(model.lm_head.weight * model.model.norm.weight @ keep)
    for a, b in zip(model.model.layers, small.model.layers, strict=True):
        behind = a.post_attention_layernorm.weight
        b.mlp.gate_proj.weight.copy_(a.mlp.gate_proj.weight * behind @ keep)
        b.mlp.up_proj.weight.copy_(a.mlp.up_proj.weight * behind @ keep)
        b.mlp.down_proj.weight.copy_(keep.T @ a.mlp.down_proj.weight)
        narrow_attention(a, b, keep, old.head_dim, small.config.head_dim)
    return small


def narrow_attention(a: torch.nn.Module, b: torch.nn.Module, keep: torch.Tensor, old: int, new: int) -> None:
    """The attention part of `narrow`, for one layer and heads of size `old` to `new`."""
    gain = a.input_layernorm.weight
    pairs = torch.tensor([min(old // 2 - 1, round(i * old / new)) for i in range(new // 2)])
    rows = torch.cat([pairs, pairs + old // 2])
    # Score sizes stay the same: the model divides by sqrt(new) where it divided by sqrt(old).
    scale = math.sqrt(new / old)
    for name, factor in ("q_proj", scale), ("k_proj", 1.0):
        weight = (getattr(a.self_attn, name).weight * gain @ keep).unflatten(0, (-1, old))
        getattr(b.self_attn, name).weight.copy_(weight[:, rows].flatten(0, 1) * factor)
    values = (a.self_attn.v_proj.weight * gain @ keep).unflatten(0, (-1, old))
    outputs = (keep.T @ a.self_attn.o_proj.weight).unflatten(1, (len(values), -1, old))
    for g, value in enumerate(values):
        heads = outputs[:, g].transpose(0, 1)  # heads of this group, hidden, old
        u, s, vt = torch.linalg.svd(heads.flatten(0, 1) @ value, full_matrices=False)
        half = s[:new].sqrt()
        b.self_attn.v_proj.weight[g * new : (g + 1) * new] = half[:, None] * vt[:new]
        parts = (u[:, :new] * half).unflatten(0, (heads.shape[0], -1))
        for h, part in enumerate(parts):
            at = (g * len(parts) + h) * new
            b.self_attn.o_proj.weight[:, at : at + new] = part


class Chunks:
    """Chunks of CONTEXT tokens in random order, handed out as rows of some shorter length.

    In a share ``repeats`` of the rows a piece of the text comes a second time, with one of its tokens exchanged: see
    `repeated`.
    """

    def __init__(self, path: Path, seed: int, repeats: float = 0.0) -> None:
        self.data = read_tokens(path)
        self.rng = np.random.default_rng(seed)
        self.order: list[int] = []
        self.repeats = repeats

    def batch(self, tokens: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows: list[np.ndarray] = []
        while len(rows) * length < tokens:
            if not self.order:
                self.order = self.rng.permutation((len(self.data) - 1) // CONTEXT).tolist()
            start = self.order.pop() * CONTEXT
            rows += [self.data[at : at + length + 1] for at in range(start, start + CONTEXT, length)]
        if self.repeats:
            rows = [repeated(row, self.rng) if self.rng.random() < self.repeats else row for row in rows]
        stacked = torch.from_numpy(np.stack(rows).astype(np.int64))
        return stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()


def held_out_batches(args: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Fixed batches of text that nothing is trained on."""
    fixed = Chunks(args.work / "held_out.bin", 0)
    return [fixed.batch(2048, 512) for _ in range(args.eval_batches)]


def repeated(row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A text whose first half stands again in its second: in up to 12 pieces that changed places, one id exchanged.

    In a third of the cases the ids of that half are shuffled first, so that only the copy tells what comes next. Files
    rarely repeat themselves at such length: a small model would see too little of it to learn to copy.
    """
    half = len(row) // 2
    first = rng.permutation(row[:half]) if rng.random() < 1 / 3 else row[:half].copy()
    cuts = np.sort(rng.choice(np.arange(1, half), size=int(rng.integers(0, 12)), replace=False))
    pieces = np.split(first, cuts)
    again = np.concatenate([pieces[i] for i in rng.permutation(len(pieces))])
    again[again == rng.choice(again)] = rng.choice(row)
    return np.concatenate((first, again, row[2 * half :]))


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Save weights and configuration; the file appears whole or not at all."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(part)
    model.set_attn_implementation(attention)
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.iterdir():
        file.replace(folder / file.name)
    part.rmdir()


def append_json(path: Path, row: dict) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    with Path(path).open("a") as file:
        file.write(line + "\n")
