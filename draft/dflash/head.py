"""A decoding DFlash head: layers whose keys and values are made of the target's hidden states, and a block of mask
tokens that looks at them.

Row p of the cache of a layer holds the key and value of position p, made of the target's state there. A step has one
window: the states that came with the last commit, then the block, the last committed token and mask tokens, at the
positions after them. The block's rows are overwritten by the next round's states. Sources: DFlash (arXiv 2602.06036),
z-lab/dflash, DSpark (deepseek-ai/DeepSpec).

Letters: B slots, W width of a commit, T rows of the block, n rows of a call, H width, D width of an attention head, R
rank of a selector, U ids that can be drafted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core import reduce
from paceline.core.types import SamplingKind, SamplingTensors
from paceline.decoder.kernels.protocol import AttentionRule, CachePosition, Kernels, MlpWeights
from paceline.decoder.models.layers import Rotation, biased, frozen, gated_mlp, scaled
from paceline.decoder.models.rope import rope_tables
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.parallel.vocab_parallel import SharedHead, whole
from paceline.decoder.parallel.vocab_part import topk
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import MatrixLike, matrix, quantize
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.drafted_tokens import DraftedTokens, Kept
from paceline.draft.heads import at_index
from paceline.draft.table_head import TableHead

_ITSELF = AttentionRule(window=1)


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of a step: the states of the last commit, the block, and padding.

    states    [B, W + T, H], what keys of positions with a state are made of; anything in later rows
    in_block  [B, W + T, 1] bool, whether a row is of the block, or padding
    row_of    [B, W + T], row of the block
    own       [B, T], rows of the window that are the block's
    real      [B] int32, rows of the block to compute in each slot; None = all
    """

    states: Tensor
    in_block: Tensor
    row_of: Tensor
    own: Tensor
    place: CachePosition
    rotation: Rotation
    real: Tensor | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a step's tokens.

    hidden     [B, k, H] of the block's rows that predict them
    anchor     [B, 1] int32, the last committed token
    positions  [B, k] int32, of the tokens
    drafts     the tokens chosen so far
    """

    hidden: Tensor
    anchor: Tensor
    positions: Tensor
    drafts: DraftedTokens

    def add(self, place: int, logits: Tensor) -> Tensor:
        """Choose the token at a place by its logits [B, 1, V]; return it, [B, 1] int32."""
        self.drafts.choose(logits, self.positions[:, place : place + 1])
        return self.drafts.last


class Convolution(nn.Module):
    """DFlash 2's causal convolutions before and after a part of a layer, whose kernels depend on the token.

    base  [2, taps, H], what the token's kernels are added to
    """

    def __init__(self, config: DFlashConfig, weights: Mapping[str, Tensor], prefix: str, *, kernels: Kernels) -> None:
        super().__init__()
        self._kernels, self._group = kernels, config.conv_group
        self.base = frozen(weights[f"{prefix}.base_kernel"].float())
        self.projection = frozen(weights[f"{prefix}.kernel_projection.weight"])

    def before(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve what the part reads, [B, T, H]; return it and the kernels for what the part makes."""
        taps = self.base.shape[1]
        made = self._kernels.linear(x, self.projection, real).unflatten(-1, (2, taps, -1))
        return self._convolved(x, made[:, :, 0], self.base[0]), made[:, :, 1]

    def after(self, x: Tensor, made: Tensor) -> Tensor:
        """Convolve what the part makes, [B, T, H]."""
        return self._convolved(x, made, self.base[1])

    def _convolved(self, x: Tensor, made: Tensor, base: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for tap in range(len(base)):
            before = x if tap == 0 else F.pad(x[:, :-tap], (0, 0, tap, 0))
            kernel = base[tap].unflatten(0, (-1, self._group)) + made[:, :, tap].unsqueeze(-1)
            total = total + before * kernel.flatten(2)
        return total


class Layer(nn.Module):
    """A layer of Qwen3 whose keys and values are those of the target's states and of the block."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        index: int,
        *,
        kernels: Kernels,
        form: WeightFormat | None,
    ) -> None:
        super().__init__()
        self._config, self._kernels, self._rule = config, kernels, config.rules[index]
        prefix = f"layers.{index}."

        def rows(*names: str) -> MatrixLike:
            joined = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
            return _matrix(joined, form)

        def bias(*sides: str) -> nn.Parameter | None:
            names = [f"{prefix}self_attn.{side}_proj.bias" for side in sides]
            return frozen(torch.cat([weights[name] for name in names])) if config.attention_bias else None

        def norm(name: str) -> nn.Parameter:
            return frozen(weights[f"{prefix}{name}.weight"])

        self.q, self.q_bias = rows("self_attn.q_proj"), bias("q")
        self.kv, self.kv_bias = rows("self_attn.k_proj", "self_attn.v_proj"), bias("k", "v")
        self.out, self.out_bias = rows("self_attn.o_proj"), bias("o")
        self.gate_up, self.down = rows("mlp.gate_proj", "mlp.up_proj"), rows("mlp.down_proj")
        self.norm, self.mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        made = partial(Convolution, config, weights, kernels=kernels) if config.conv_size else None
        self.attention_conv = None if made is None else made(f"{prefix}attention_conv")
        self.mlp_conv = None if made is None else made(f"{prefix}mlp_conv")

    def forward(self, x: Tensor, window: Window, cache: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the block [B, T, H]; keys and values of the whole window go to the cache."""
        kernels, real, after = self._kernels, window.real, None
        y = kernels.norm(x, self.norm, eps=self._config.rms_norm_eps)
        if self.attention_conv is not None:
            y, after = self.attention_conv.before(y, real)
        q = self._heads(biased(kernels.linear(y, self.q, real), self.q_bias), self.q_norm)
        every = torch.where(window.in_block, rows_at(y, window.row_of), window.states)
        k, v = self.keys(every, window.rotation, window.place.real)
        q = kernels.rotate(rows_at(q.flatten(2), window.row_of).view(*every.shape[:2], *q.shape[2:]), window.rotation)
        place, rule = replace(window.place, both_ways=not self._rule.causal), AttentionRule(self._rule.window)
        mixed = rows_at(kernels.attend((q, k, v), cache, place, rule=rule), window.own)
        made = biased(kernels.linear(mixed, self.out, real), self.out_bias)
        if self.attention_conv is not None and after is not None:
            made = self.attention_conv.after(made, after)
        return self._mlp(x + made, real)

    def keys(self, x: Tensor, rotation: Rotation, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute keys, rotated, and values of rows [B, n, H]. -> [B, n, groups, D] twice"""
        keys, values = biased(self._kernels.linear(x, self.kv, real), self.kv_bias).chunk(2, -1)
        return self._kernels.rotate(self._heads(keys, self.k_norm), rotation), values.unflatten(
            -1, (-1, self._config.head_dim)
        )

    def _heads(self, x: Tensor, norm: Tensor) -> Tensor:
        return self._kernels.norm(x.unflatten(-1, (-1, self._config.head_dim)), norm, eps=self._config.rms_norm_eps)

    def _mlp(self, x: Tensor, real: Tensor | None) -> Tensor:
        kernels, eps = self._kernels, self._config.rms_norm_eps
        if self.mlp_conv is None:
            weights = MlpWeights(self.mlp_norm, self.gate_up, None, self.down, None, eps)
            return gated_mlp(x, weights, real, kernels=kernels, group=SingleRank())
        y, after = self.mlp_conv.before(kernels.norm(x, self.mlp_norm, eps=eps), real)
        inner = kernels.activate(kernels.linear(y, self.gate_up, real), "silu", gated=True)
        return x + self.mlp_conv.after(kernels.linear(inner, self.down, real), after)


class DFlashHead(TableHead):
    """The head with its caches. ``weights``: of a checkpoint, with ``ids`` [U], the target's ids of those that can be
    drafted, and without tables that are the target's.

    ``shared``: the target's weights that it uses, this rank's rows of sharded ones. ``form``: format of the layers'
    matrices, which are replicated on a sharded target.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        *,
        shared: SharedHead,
        kernels: Kernels,
        options: DecoderOptions,
        form: WeightFormat | None = None,
    ) -> None:
        super().__init__(kernels, options)
        self.config, self.reads, self.form = config, config.reads, form
        output, embedding = weights.get("lm_head.weight"), weights.get("embed_tokens.weight")
        self.output = shared.head if output is None else frozen(output)
        self.share(
            shared,
            rope_tables(config.rope, config.head_dim, options.n_positions),
            embedding=embedding,
            owns_output=output is not None,
            drafted=(weights["ids"], config.vocab_size),
        )
        self.fc = _matrix(weights["fc.weight"], form)
        self.hidden_norm, self.norm = (frozen(weights[f"{name}.weight"]) for name in ("hidden_norm", "norm"))
        self.layers = nn.ModuleList(
            Layer(config, weights, index, kernels=kernels, form=form) for index in range(len(config.rules))
        )
        self.selector = nn.ParameterDict(
            {
                name.partition(".")[2].removesuffix(".weight").replace(".", "_"): frozen(x)
                for name, x in weights.items()
                if name.startswith(("candidate_selector.", "markov_head."))
            }
        )
        for index in range(len(config.rules)):
            for side, cache in zip(
                ("keys", "values"), self.allocate_cache(config.num_kv_heads, config.head_dim), strict=True
            ):
                self.register_buffer(f"{side}_{index}", cache)

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (self.get_buffer(f"keys_{index}"), self.get_buffer(f"values_{index}"))
            for index in range(len(self.config.rules))
        ]

    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        return BlockStep(self, k, bucket, kind=kind)

    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        assert features is not None, "commits carry the features that `reads` asks for"
        states = self.states(features, place.real)
        rotation = self.rotation(place.positions(states.shape[1]))
        for layer, cache in zip(self.layers, self.caches(), strict=True):
            assert isinstance(layer, Layer)
            k, v = layer.keys(states, rotation, place.real)
            self.kernels.attend((k, k, v), cache, place, rule=_ITSELF)  # only to write them
        return states[:, :1]

    def states(self, features: Tensor, real: Tensor | None = None) -> Tensor:
        """Fuse the target's states of several layers: [B, n, F] -> [B, n, H]."""
        fused = self.kernels.linear(features, self.fc, real)
        return self.kernels.norm(fused, self.hidden_norm, eps=self.config.rms_norm_eps)

    def window(
        self, features: Tensor, count: Tensor, size: int, *, place: CachePosition, real: Tensor | None
    ) -> Window:
        """Arrange a step: features [B, W, F], the first ``count`` [B] of them real, and a block of ``size`` tokens."""
        states = self.states(features, None if real is None else real.clamp(max=1) * count)
        rows = torch.arange(features.shape[1] + size, dtype=torch.int32, device=features.device)
        behind = rows - count.unsqueeze(1)
        return Window(
            F.pad(states, (0, 0, 0, size)),
            (behind >= 0).unsqueeze(-1),
            behind.clamp(min=0, max=size - 1),
            count.unsqueeze(1) + rows[:size],
            place,
            self.rotation(place.positions(len(rows))),
            real,
        )

    def block(self, tokens: Tensor, window: Window) -> Tensor:
        """Compute the block's tokens [B, T] int32 -> hidden [B, T, H], after the last norm."""
        x = scaled(self.embed(tokens), self.config.embedding_scale)
        for layer, cache in zip(self.layers, self.caches(), strict=True):
            x = layer(x, window, cache)
        return self.kernels.norm(x, self.norm, eps=self.config.rms_norm_eps)

    def scores(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        """Compute logits [B, n, H] -> [B, n, U] of the ids that can be drafted, without a selector's."""
        config = self.config
        made = whole(self.kernels.linear(hidden, self.output, real), config.draft_vocab_size, self.groups[1])
        made = scaled(made, config.logit_scale)
        return config.logit_cap * torch.tanh(made / config.logit_cap) if config.logit_cap else made

    def choose(self, choice: Choice, real: Tensor | None) -> None:
        scores = self.scores(choice.hidden, real)
        if self.config.selector_rank:
            self._select(scores, choice)
        elif self.config.markov_rank:
            self._follow(scores, choice)
        else:
            choice.drafts.choose(self.spread(scores), choice.positions)

    def _select(self, scores: Tensor, choice: Choice) -> None:
        """DFlash 2: choose among the best of each position, by their fit to the token before."""
        embed, own, token = self.kernels.embed, self.selector, choice.anchor
        best, ids = topk(scores.contiguous(), self.config.selector_top)
        seen = self.kernels.linear(choice.hidden, own["hidden_projection"])
        for place in range(seen.shape[1]):
            context = embed(own["predecessor_codebook"], token) * seen[:, place : place + 1]
            fit = (context * embed(own["successor_codebook"], ids[:, place])).sum(-1)
            token = choice.add(place, self._spread_some(scores[:, :1], ids[:, place], best[:, place] + fit))

    def _spread_some(self, like: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Logits [B, 1, V] of the values [B, n] of ids [B, n], `reduce.NEGATIVE` for others."""
        if not self.kernels.sampling_kinds:
            return torch.full_like(like, reduce.NEGATIVE).scatter(
                -1, ids.to(torch.int64).unsqueeze(1), values.unsqueeze(1)
            )
        every = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
        one = (ids.unsqueeze(-1) == every).to(torch.float32)  # graphs of accelerators have no scatter
        some = (one * values.unsqueeze(-1)).sum(1, keepdim=True)
        return torch.where(one.sum(1, keepdim=True) > 0, some, reduce.NEGATIVE)

    def _follow(self, scores: Tensor, choice: Choice) -> None:
        """DSpark: choose with a bias by the token before; kinds with a gate also read the block's hidden state."""
        own, kind, linear, token = self.selector, self.config.markov, self.kernels.linear, choice.anchor
        state = torch.zeros_like(choice.hidden[:, :1, :1]).expand(-1, -1, self.config.markov_rank)
        for place in range(scores.shape[1]):
            before, here = self.kernels.embed(own["markov_w1"], token), choice.hidden[:, place : place + 1]
            if kind == "gated":
                gate = linear(torch.cat([here, before], -1), own["gate_proj"]) + own["gate_proj_bias"]
                before = _sigmoid(gate) * before
            elif kind == "rnn":
                joint = linear(torch.cat([state, before, here], -1), own["joint_proj"]) + own["joint_proj_bias"]
                gate, candidate, made = joint.chunk(3, -1)
                candidate = torch.tanh(candidate)
                state = candidate + _sigmoid(gate) * (state - candidate)
                before = torch.tanh(made)
            bias = linear(before, own["markov_w2"])
            token = choice.add(place, self.spread(scores[:, place : place + 1] + bias))


class BlockStep(nn.Module):
    """Read a commit's states and draft ``k`` tokens from a block. ``kind``: sampling mode of its rounds."""

    def __init__(
        self, head: DFlashHead, k: int, bucket: int, *, kept: Kept | None = None, kind: SamplingKind = "full"
    ) -> None:
        super().__init__()
        self.head, self._k, self._bucket, self._kept, self._kind = head, k, bucket, kept or Kept(), kind
        self.register_buffer("nodes", self._kept.nodes())

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor, features: Tensor
    ) -> tuple[Tensor, ...]:
        """The inputs of a `ChainStep` -> outputs of `DraftedTokens`."""
        head, k, sampling = self.head, self._k, SamplingTensors(params, seeds, self._kind)
        size = k if head.config.from_anchor else k + 1
        anchor = at_index(tokens, count - 1)
        place = head.place_real(first_row - 1, count + size, self._bucket, sampling=sampling)
        real = head.real_rows(sampling, size)
        window = head.window(features, count, size, place=place, real=real)
        block = F.pad(anchor, (0, size - 1), value=head.config.mask_token)
        hidden = head.block(block, window)[:, size - k :]
        ahead = torch.arange(k, dtype=torch.int32, device=tokens.device)
        positions = (first_row + count).unsqueeze(1) + ahead
        drafts = DraftedTokens(head.kernels, sampling, self._kept, nodes=self.get_buffer("nodes"))
        head.choose(Choice(hidden.contiguous(), anchor, positions, drafts), head.real_rows(sampling, k))
        return drafts.outputs()


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` [B, m] of x [B, n, width] -> [B, m, width]."""
    return x.gather(1, index.to(torch.int64).unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _sigmoid(x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * x) + 0.5  # made of operators that are known to lower to HLO


def _matrix(weight: Tensor, form: WeightFormat | None) -> MatrixLike:
    return matrix(weight if form is None else quantize(weight, form))
