"""Point a few heads of a model at what was said before, so that it learns to copy.

    python -m recipe.wiring --work W --model <folder> --plan target --out <folder>

After some millions of tokens no head of a model of this size looks at what followed earlier occurrences of the last
tokens (induction heads, arXiv:2209.11895), and rows in which a text comes twice did not bring one about: the first step
alone, a head that looks one token back, gains nothing until the second is there. So both are taught in order, on
attention alone: queries and keys of the heads in PLANS are fitted to where they are to look, then what these heads
carry is trained on repeating rows, all else frozen. Minutes; ordinary training (`recipe.training --repeats`,
`recipe.distil --repeats`) continues from it.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from recipe.modelling import Chunks, load_model, save_model
from recipe.training import cross_entropy

LENGTH, BATCH = 512, 2048


@dataclass(frozen=True)
class Aim:
    """Heads of a layer that share keys, and how many tokens back each looks; 0: after earlier occurrences, all."""

    layer: int
    heads: tuple[int, ...]
    back: tuple[int, ...]

    @property
    def behind(self) -> bool:
        """Whether they look after occurrences."""
        return not any(self.back)


# The keys of a head that looks behind an occurrence must tell which two tokens stood before.
PLANS = {
    "target": (Aim(1, (6, 7), (1, 1)), Aim(1, (2, 3), (2, 2)), Aim(3, (4, 5), (0, 0)), Aim(5, (6, 7), (0, 0))),
    "draft": (Aim(0, (0, 1), (1, 2)), Aim(1, (0, 1), (0, 0))),
}


def behind_occurrences(ids: Tensor) -> Tensor:
    """[B, S] -> [B, S, S] bool: at (j, s), the pair of tokens before s is the pair that ends with j, and s <= j."""
    before = ids.roll(1, 1)
    before[:, 0] = -1
    pair = before * 65536 + ids
    same = pair[:, :, None] == pair[:, None, :]
    return F.pad(same[:, :, :-1], (1, 0)).tril()


class Heads:
    """The rows and columns of the chosen heads in their layer's matrices."""

    def __init__(self, model: LlamaForCausalLM, aim: Aim) -> None:
        self.aim, self.attention = aim, model.model.layers[aim.layer].self_attn
        self.size, groups = self.attention.head_dim, self.attention.num_key_value_groups
        self.key = aim.heads[0] // groups  # the K/V head they share
        if {head // groups for head in aim.heads} != {self.key}:
            raise ValueError(f"the heads {aim.heads} of layer {aim.layer} do not share keys")

    def rows(self, head: int) -> slice:
        """Rows of the query matrix, and of the K/V matrices for a K/V head."""
        return slice(head * self.size, (head + 1) * self.size)

    def scores(self, x: Tensor, turn: tuple[Tensor, Tensor], queries: Tensor, keys: Tensor) -> Tensor:
        """Logarithms of the attention [B, heads, S, S], from the layer's input [B, S, H], queries [heads, d, H]."""
        q = torch.einsum("bsc,hdc->bhsd", x, queries)
        q, k = apply_rotary_pos_emb(q, (x @ keys.T)[:, None], *turn)
        raw = (q @ k.transpose(-1, -2)) * self.attention.scaling
        return raw.masked_fill(~torch.ones_like(raw, dtype=torch.bool).tril(), -1e9).log_softmax(-1)

    def loss(self, logs: Tensor, wanted: Tensor) -> Tensor:
        """How far the attention is from where it is to look; over places that have something to look at."""
        if not self.aim.behind:
            seen = [logs[:, at].diagonal(-back, -2, -1).mean() for at, back in enumerate(self.aim.back)]
            return -torch.stack(seen).mean()
        mass = logs.masked_fill(~wanted[:, None], -1e9).logsumexp(-1)
        return -mass[wanted.any(-1)[:, None].expand_as(mass)].mean()

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Queries [heads, d, H] and keys [d, H] as they are in the model."""
        queries = torch.stack([self.attention.q_proj.weight[self.rows(head)] for head in self.aim.heads])
        return queries, self.attention.k_proj.weight[self.rows(self.key)]


class _Enough(Exception):  # noqa: N818  # ends a forward pass at the layer that was asked for
    pass


@torch.no_grad()
def inputs_of(model: LlamaForCausalLM, layer: int, ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Input of a layer's attention [B, S, H], and the rotation of its positions."""
    got = []

    def keep(_: nn.Module, args: tuple, given: dict) -> None:
        got.append((args[0] if args else given["hidden_states"], given["position_embeddings"]))
        raise _Enough

    hook = model.model.layers[layer].self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model(ids, use_cache=False)
    except _Enough:
        pass
    finally:
        hook.remove()
    return got[0]


def aim_heads(model: LlamaForCausalLM, aim: Aim, batches: list[Tensor], *, steps: int) -> None:
    """Fit queries and keys, from scratch, to where the heads are to look.

    The embeddings, which the first layer reads, have nothing in common; a head that looks at a distance, whatever
    stands there, needs something. So a small vector is added to all of them, fitted too.
    """
    heads, width, embeddings = Heads(model, aim), model.config.hidden_size, model.model.embed_tokens.weight
    norm, turn = model.model.layers[0].input_layernorm, inputs_of(model, aim.layer, batches[0])[1]
    seen = [None if aim.layer == 0 else inputs_of(model, aim.layer, ids)[0] for ids in batches]
    queries = nn.Parameter(torch.randn(len(aim.heads), heads.size, width) * 0.05)
    keys = nn.Parameter(torch.randn(heads.size, width) * 0.05)
    shift = nn.Parameter(torch.randn(width) * 0.02)
    optimizer = torch.optim.Adam([queries, keys, shift], betas=(0.9, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / steps) + 1e-5
        ids, x = batches[step % len(batches)], seen[step % len(batches)]
        x = norm(embeddings[ids] + shift) if x is None else x
        loss = heads.loss(heads.scores(x, turn, queries, keys), behind_occurrences(ids))
        size = shift.square().sum() / embeddings.square().sum(1).mean()
        optimizer.zero_grad()
        (loss + 0.3 * size).backward()
        optimizer.step()
    with torch.no_grad():
        for place, head in enumerate(aim.heads):
            heads.attention.q_proj.weight[heads.rows(head)] = queries[place]
        heads.attention.k_proj.weight[heads.rows(heads.key)] = keys
        if aim.layer == 0:
            embeddings += shift
    print(f"layer {aim.layer}, heads {aim.heads}: {loss.item():.3f}", flush=True)


def trained(heads: Heads) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The matrices that take part in the second step, and a mask of what may change in them."""
    a, own = heads.attention, [heads.rows(head) for head in heads.aim.heads]
    shared = [heads.rows(heads.key)]
    parts = [(a.v_proj.weight, 0, shared), (a.o_proj.weight, 1, own)]
    if heads.aim.behind:
        parts += [(a.q_proj.weight, 0, own), (a.k_proj.weight, 0, shared)]
    for weight, side, slices in parts:
        mask = torch.zeros_like(weight)
        for where in slices:
            mask.narrow(side, where.start, heads.size).fill_(1)
        yield weight, mask


def carry(model: LlamaForCausalLM, plan: tuple[Aim, ...], chunks: Chunks, args: argparse.Namespace) -> None:
    """Train what the heads carry, on repeating rows; heads that look after occurrences are still held to it."""
    steps, lr = args.steps, args.lr
    precision = torch.autocast("cpu", torch.bfloat16, enabled=args.bf16)
    every = [Heads(model, aim) for aim in plan]
    masks: dict[nn.Parameter, Tensor] = {}
    for heads in every:
        for weight, mask in trained(heads):
            masks[weight] = masks.get(weight, 0) + mask
    inputs: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def note(module: nn.Module, args: tuple, given: dict) -> None:
        x = args[0] if args else given["hidden_states"]
        inputs[module.layer_idx] = x, given["position_embeddings"]

    hooks = [h.attention.register_forward_pre_hook(note, with_kwargs=True) for h in every]
    for weight in masks:
        weight.requires_grad_(True)
    optimizer = torch.optim.Adam(list(masks), betas=(0.9, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps)
        ids, labels = chunks.batch(BATCH, LENGTH)
        with precision:
            logits = model(ids, use_cache=False).logits.float()
        wanted, half = behind_occurrences(ids), LENGTH // 2
        held = sum(h.loss(h.scores(*inputs[h.aim.layer], *h.weights), wanted) for h in every if h.aim.behind)
        first, second = (cross_entropy(logits[:, s], labels[:, s]) for s in (slice(half), slice(half, None)))
        optimizer.zero_grad()
        (second + 0.5 * first + 0.2 * held).backward()
        for weight, mask in masks.items():
            weight.grad *= mask
        optimizer.step()
        if step % 10 == 9:
            halves = f"first half {first.item():.3f}, second {second.item():.3f}"
            print(f"{step + 1}: {halves}, aim {held.item():.3f}", flush=True)
    for hook in hooks:
        hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the corpus")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--plan", choices=PLANS, required=True, help="whose heads")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=40, help="that the heads are pointed with")
    parser.add_argument("--aiming", type=int, default=400, help="steps of pointing the heads of a layer")
    parser.add_argument("--steps", type=int, default=320, help="of training what they carry")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="multiply matrices in bfloat16 in the second step")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = load_model(args.model).eval().requires_grad_(False)
    rows = Chunks(args.work / "train.bin", 5, 1.0)
    batches = [rows.batch(BATCH, LENGTH)[0] for _ in range(args.batches)]
    for aim in PLANS[args.plan]:
        aim_heads(model, aim, batches, steps=args.aiming)
    carry(model, PLANS[args.plan], rows, args)
    save_model(model, args.out)


if __name__ == "__main__":
    main()
