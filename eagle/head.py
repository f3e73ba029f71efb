"""An EAGLE head that decodes: one decoder layer with a cache of its own, on a backend's kernels.

Row p of its cache holds the *pair* of place p: the target's feature at p and the token at p + 1 (EAGLE's shift, so a
pair's row and position are one less than its token's). Rows after the last committed pair hold guesses, made from the
head's own output, and are written anew from real features before they count. Stores rows, never a length.
Not here: the formulas (`paceline.eagle.network`) and which tokens of a tree are drafted (`paceline.eagle.tree`).

Letters: b lines, n pairs of a call, H width of the head, F of a feature, U ids that can be drafted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from paceline.core import reduce
from paceline.core.types import SamplingTensors
from paceline.decoder.kernels.protocol import CachePosition, Kernels, MlpWeights
from paceline.decoder.models.rope import rope_tables, rotation_at
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.parallel.vocab_parallel import SharedHead, choose, embedded, rank, whole
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.weights.formats import WeightFormat
from paceline.draft.heads import AutoregressiveHead, at_index
from paceline.eagle.config import EagleConfig
from paceline.eagle.network import EagleNetwork, EagleWeights, Qkv


@dataclass(frozen=True, slots=True)
class LastPair:
    """The last committed pair, from which drafts grow.

    hidden  [B, 1, H], what the head made of it; it predicts the first drafts
    qkv     of that pair alone
    row     [B] int32, its row of the cache
    """

    hidden: Tensor
    qkv: Qkv
    row: Tensor


class EagleHead(AutoregressiveHead):
    """The head with its cache. ``weights`` is emptied.

    ``lent`` is the target's, not copied: the embedding, unless ``embedding`` [V, H] is the head's own, and the output
    layer of version 1. Over a divided target both are this rank's rows. With a ``group`` of more than one rank, which
    is the target's then, so is everything else: ``weights`` and ``embedding`` are this rank's part
    (`paceline.eagle.division`). Without one everything else is the same on every rank. ``form``: what the head's own
    matrices are quantised to; a table of its own and what is lent stay as they are.
    """

    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    ids: Tensor
    places: Tensor
    rows: Tensor
    part_ids: Tensor

    def __init__(
        self,
        config: EagleConfig,
        weights: dict[str, Tensor],
        *,
        lent: SharedHead,
        embedding: Tensor | None = None,
        kernels: Kernels,
        options: DecoderOptions,
        group: Collectives | None = None,
        form: WeightFormat | None = None,
    ) -> None:
        super().__init__(kernels, options)
        self.form = form
        self.group: Collectives = group or SingleRank()
        self.config, self.reads = config, config.reads
        three = config.version == 3
        ids = weights.pop("ids") if three else torch.arange(config.vocab_size)
        part_ids = weights.pop("part_ids").to(torch.int32) if three and self.group.degree > 1 else lent.ids
        key_heads = weights["layer.self_attn.k_proj.weight"].shape[0] // config.head_dim
        self.embedding = lent.embedding if embedding is None else _frozen(embedding)
        every = EagleWeights.joined(config, weights, weights["lm_head.weight"] if three else lent.head)
        weights.clear()
        self._keep(every if form is None else every.quantized(form, head=three))
        self._groups: tuple[Collectives, Collectives] = (
            lent.group if embedding is None else self.group,
            self.group if three else lent.group,
        )
        cos, sin = rope_tables(config.rope, config.head_dim, options.n_positions)
        places = torch.full((config.vocab_size,), config.draft_vocab_size, dtype=torch.int32)
        places[ids.to(torch.int64)] = torch.arange(config.draft_vocab_size, dtype=torch.int32)
        keys, values = self.allocate_cache(key_heads, config.head_dim)
        buffers = {
            "cos": cos,
            "sin": sin,
            "keys": keys,
            "values": values,
            "ids": ids.to(torch.int32),  # the target's id of every id that can be drafted
            "places": places,  # and back; U where there is none
            # Needed only where tables are divided: the ids of this rank's rows of the embedding, and of its logits.
            "rows": lent.ids if lent.group.degree > 1 else lent.ids[:0],
            "part_ids": part_ids if self._groups[1].degree > 1 else lent.ids[:0],
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def _keep(self, weights: EagleWeights) -> None:
        """Hold the weights as parameters of this module: a graph finds its state there."""
        for name in _OWN:
            weight = getattr(weights, name)
            self._keep_one(name, weight)
        for name in _OF_MLP:
            self._keep_one(f"mlp_{name}", getattr(weights.mlp, name))

    def _keep_one(self, name: str, weight: Tensor | nn.Module | None) -> None:
        if isinstance(weight, nn.Module):  # a quantised matrix
            self.add_module(name, weight)
        else:
            self.register_parameter(name, _optional(weight))

    @property
    def network(self) -> EagleNetwork:
        """The formulas over this head's weights."""
        mlp = MlpWeights(**{name: getattr(self, f"mlp_{name}") for name in _OF_MLP}, eps=self.config.rms_norm_eps)
        weights = EagleWeights(**{name: getattr(self, name) for name in _OWN}, mlp=mlp)
        return EagleNetwork(self.config, weights, self.kernels, self.group)

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.keys, self.values)]

    def real_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        divided = any(group.degree > 1 for group in (self.group, *self._groups))  # as in the target's own windows
        return None if divided else self.seated_rows(sampling, window)

    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        return self.last_pair(tokens, features, place, last=last).hidden

    def last_pair(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> LastPair:
        """As `read`, with what a tree needs besides."""
        assert features is not None, "commits carry the features that `reads` asks for"
        hidden = self.network.fuse(features, place.real)
        stream, qkv = self.project(tokens, hidden, place.positions(tokens.shape[1]), real=place.real)
        attended = self.attend(qkv, place)
        stream, attended, q, k, v = (at_index(x, last) for x in (stream, attended, *qkv))
        row = (place.row + last).clamp(min=0, max=self.options.n_positions - 1)
        real = None if place.real is None else place.real.clamp(max=1)
        return LastPair(self.network.finish(stream, attended, real), (q, k, v), row)

    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        stream, qkv = self.project(token, hidden, place.row.unsqueeze(1), real=place.real)
        return self.network.finish(stream, self.attend(qkv, place), place.real)

    def project(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, *, real: Tensor | None = None
    ) -> tuple[Tensor, Qkv]:
        """Pairs before attention. tokens [b, n] int32, hidden [b, n, H], positions [b, n] int32."""
        inputs = embedded(tokens, self.embedding, self.rows, group=self._groups[0], kernels=self.kernels)
        at = positions.clamp(max=self.cos.shape[0] - 1)
        return self.network.project(
            inputs, hidden, rotation_at(at, self.cos, self.sin, kernels=self.kernels), real=real
        )

    def attend(self, qkv: Qkv, place: CachePosition) -> Tensor:
        """Write pairs to their rows and attend to those before them. -> [b, n, heads of this rank * D]"""
        return self.kernels.attend(qkv, (self.keys, self.values), place)

    def logits(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        return self.spread(self.scores(hidden, real))

    def scores(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        """[b, n, H] -> [b, n, U] float32."""
        return whole(self.network.scores(hidden, real), self.config.draft_vocab_size, self._groups[1])

    @property
    def part(self) -> VocabPart:
        """The ids that this rank's `EagleNetwork.scores` are of."""
        sizes, group = self.config, self._groups[1]
        ids = self.part_ids if group.degree > 1 else self.ids
        return VocabPart(ids, sizes.vocab_size, group, gaps=sizes.draft_vocab_size < sizes.vocab_size)

    def sample_tokens(self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        part, real = self.part, self.real_rows(sampling, hidden.shape[1])
        if part.gaps and not self.kernels.sampling_kinds:
            # The first of a ranking is the same token, without a row over the whole vocabulary.
            return self.rank_tokens(hidden, positions, sampling, count=1)[0].squeeze(-1)
        return choose(self.network.scores(hidden, real), positions, sampling, part=part, kernels=self.kernels)

    def rank_tokens(
        self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors, *, count: int
    ) -> tuple[Tensor, Tensor]:
        """The first choices of a position, as `Kernels.rank_tokens`. hidden [b, n, H] -> [b, n, count] twice"""
        part, real = self.part, self.real_rows(sampling, hidden.shape[1])
        if part.gaps and part.divided and not self.kernels.sampling_kinds:
            every = self.scores(hidden, real).contiguous()
            of_all = VocabPart(self.ids, part.size, SingleRank(), gaps=True)
            return self.kernels.rank_tokens(every, positions, sampling, count=count, part=of_all)
        scores = self.network.scores(hidden, real)
        return rank(scores, positions, sampling, count=count, part=part, kernels=self.kernels)

    def spread(self, scores: Tensor) -> Tensor:
        """[b, n, U] -> [b, n, V], `reduce.NEGATIVE` for ids that cannot be drafted."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return scores
        nothing = torch.full_like(scores[..., :1], reduce.NEGATIVE)
        return torch.cat([scores, nothing], -1).index_select(-1, self.places)


_OWN = tuple(field.name for field in fields(EagleWeights) if field.name != "mlp")
_OF_MLP = tuple(field.name for field in fields(MlpWeights) if field.name != "eps")


def _frozen(x: Tensor) -> nn.Parameter:
    """As a parameter without a gradient; what is one already (the target's) stays the very same."""
    return x if isinstance(x, nn.Parameter) else nn.Parameter(x.contiguous(), requires_grad=False)


def _optional(x: Tensor | None) -> nn.Parameter | None:
    return None if x is None else _frozen(x)
