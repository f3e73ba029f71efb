"""A decoding EAGLE head: one decoder layer with its own cache, on a backend's kernels.

Row p of its cache holds the *pair* of position p: the target's feature at p and the token at p + 1 (EAGLE's shift, so a
pair's row and position are one less than its token's). Rows after the last committed pair hold guesses, made from the
head's own output, and are overwritten from real features before they count. Stores rows, never a length.
Formulas are in `paceline.eagle.network`, the selection of a tree's tokens in `paceline.eagle.tree`.

Letters: b batch rows, n pairs of a call, H width of the head, F of a feature, U ids that can be drafted, V vocabulary.
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

    hidden  [B, 1, H], the head's output for it, which predicts the first drafts
    qkv     queries, keys and values of that pair only
    row     [B] int32, its row of the cache
    """

    hidden: Tensor
    qkv: Qkv
    row: Tensor


class EagleHead(AutoregressiveHead):
    """The head with its cache. ``weights`` is emptied.

    ``lent``: weights shared with the target, not copied: the embedding, unless ``embedding`` [V, H] is the head's own,
    and the output layer of version 1. With a sharded target both are this rank's rows. With a ``group`` of more than
    one rank, the target's group, ``weights`` and ``embedding`` are this rank's shard too (`paceline.eagle.division`);
    without one they are replicated. ``form``: format of the head's own matrices; its own embedding and shared weights
    are not converted.
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
            "places": places,  # inverse map; U for ids that cannot be drafted
            # Needed only for sharded tables: the ids of this rank's rows of the embedding, and of its logits.
            "rows": lent.ids if lent.group.degree > 1 else lent.ids[:0],
            "part_ids": part_ids if self._groups[1].degree > 1 else lent.ids[:0],
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def _keep(self, weights: EagleWeights) -> None:
        """Hold the weights as parameters of this module, where a graph finds its state."""
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
        """Formulas over this head's weights."""
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
        """Read a commit as `read`, and return the values that a tree needs."""
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
        """Compute pairs before attention. tokens [b, n] int32, hidden [b, n, H], positions [b, n] int32."""
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
        """Compute scores: [b, n, H] -> [b, n, U] float32."""
        return whole(self.network.scores(hidden, real), self.config.draft_vocab_size, self._groups[1])

    @property
    def part(self) -> VocabPart:
        """Ids of this rank's `EagleNetwork.scores`."""
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
        """Rank the best ``count`` tokens of a position, as `Kernels.rank_tokens`. hidden [b, n, H] -> [b, n, count]
        twice
        """
        part, real = self.part, self.real_rows(sampling, hidden.shape[1])
        if part.gaps and part.divided and not self.kernels.sampling_kinds:
            every = self.scores(hidden, real).contiguous()
            of_all = VocabPart(self.ids, part.size, SingleRank(), gaps=True)
            return self.kernels.rank_tokens(every, positions, sampling, count=count, part=of_all)
        scores = self.network.scores(hidden, real)
        return rank(scores, positions, sampling, count=count, part=part, kernels=self.kernels)

    def spread(self, scores: Tensor) -> Tensor:
        """Spread scores over the vocabulary: [b, n, U] -> [b, n, V], `reduce.NEGATIVE` for ids that cannot be
        drafted.
        """
        if self.config.draft_vocab_size == self.config.vocab_size:
            return scores
        nothing = torch.full_like(scores[..., :1], reduce.NEGATIVE)
        return torch.cat([scores, nothing], -1).index_select(-1, self.places)


_OWN = tuple(field.name for field in fields(EagleWeights) if field.name != "mlp")
_OF_MLP = tuple(field.name for field in fields(MlpWeights) if field.name != "eps")


def _frozen(x: Tensor) -> nn.Parameter:
    """Return x as a parameter without a gradient; an existing parameter (the target's) is returned unchanged."""
    return x if isinstance(x, nn.Parameter) else nn.Parameter(x.contiguous(), requires_grad=False)


def _optional(x: Tensor | None) -> nn.Parameter | None:
    return None if x is None else _frozen(x)
