"""A decoding EAGLE head: decoder layers with their own caches, on a backend's kernels.

Row p of its cache holds the *pair* of position p: the target's feature at p and the token at p + 1 (EAGLE's shift, so a
pair's row and position are one less than its token's). Rows after the last committed pair hold guesses, made from the
head's own output, and are overwritten from real features before they count. Stores rows, never a length.

Letters: b batch rows, n pairs of a call, H width of the head, F of a feature, U ids that can be drafted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.types import SamplingTensors
from paceline.decoder.kernels.protocol import CachePosition, Kernels, MlpWeights
from paceline.decoder.models.layers import frozen
from paceline.decoder.models.rope import rope_tables
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.parallel.vocab_parallel import SharedHead, choose, rank, whole
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.weights.formats import WeightFormat
from paceline.draft.heads import AutoregressiveHead, at_index
from paceline.draft.table_head import TableHead
from paceline.eagle.config import EagleConfig
from paceline.eagle.network import Attend, EagleNetwork, EagleWeights, LayerWeights, Qkv


@dataclass(frozen=True, slots=True)
class LastPair:
    """The last committed pair, from which drafts grow.

    hidden  [B, 1, H], the head's output for it, which predicts the first drafts
    qkv     queries, keys and values of that pair only, of every layer
    row     [B] int32, its row of the cache
    """

    hidden: Tensor
    qkv: tuple[Qkv, ...]
    row: Tensor


class _Held(nn.Module):
    """Some weights as parameters of a module, where a graph finds its state."""

    def __init__(self, weights: EagleWeights | LayerWeights) -> None:
        super().__init__()
        for name in _FLAT[type(weights)]:
            self._hold(name, getattr(weights, name))
        if isinstance(weights, LayerWeights):
            for name in _OF_MLP:
                self._hold(f"mlp_{name}", getattr(weights.mlp, name))

    def _hold(self, name: str, weight: Tensor | nn.Module | None) -> None:
        if isinstance(weight, nn.Module):  # a quantised matrix
            self.add_module(name, weight)
        else:
            self.register_parameter(name, None if weight is None else frozen(weight))

    def flat(self, kind: type[EagleWeights] | type[LayerWeights]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FLAT[kind]}


class _Layer(_Held):
    """Weights of a layer, and its cache."""

    keys: Tensor
    values: Tensor

    def __init__(self, weights: LayerWeights, cache: tuple[Tensor, Tensor]) -> None:
        super().__init__(weights)
        for name, value in zip(("keys", "values"), cache, strict=True):
            self.register_buffer(name, value)

    def weights(self, eps: float) -> LayerWeights:
        mlp = MlpWeights(**{name: getattr(self, f"mlp_{name}") for name in _OF_MLP}, eps=eps)
        return LayerWeights(**self.flat(LayerWeights), mlp=mlp)


class EagleHead(TableHead, AutoregressiveHead):
    """The head with its caches. ``weights`` is emptied.

    ``shared``: weights of the target, not copied: the embedding, unless ``embedding`` [V, H] is the head's own,
    and the output layer where it is not. With a sharded target both are this rank's rows. With a ``group`` of more than
    one rank, the target's group, ``weights`` and ``embedding`` are this rank's shard too (`paceline.eagle.division`);
    without one they are replicated. ``form``: format of the head's own matrices; its own embedding and shared weights
    are not converted. Of a P-EAGLE head, ``weights`` have ``masked`` [H] (`paceline.eagle.network.masked_state`).
    """

    ids: Tensor
    part_ids: Tensor
    masked: Tensor
    layers: nn.ModuleList

    def __init__(
        self,
        config: EagleConfig,
        weights: dict[str, Tensor],
        *,
        shared: SharedHead,
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
        own = config.owns_output
        ids = weights.pop("ids") if config.version == 3 else torch.arange(config.vocab_size)
        part_ids = weights.pop("part_ids").to(torch.int32) if own and self.group.degree > 1 else shared.ids
        key_heads = weights["layer.self_attn.k_proj.weight"].shape[0] // config.head_dim
        self.share(
            shared,
            rope_tables(config.rope, config.head_dim, options.n_positions),
            embedding=embedding,
            owns_output=own,
            group=self.group,
            drafted=(ids, config.vocab_size),
        )
        masked = weights.pop("masked", shared.ids[:0])
        every = EagleWeights.joined(config, weights, weights["lm_head.weight"] if own else shared.head)
        weights.clear()
        every = every if form is None else every.quantized(form, head=own)
        self.held, self.fc_norms = _Held(every), nn.ParameterList([frozen(x) for x in every.fc_norms])
        self.layers = nn.ModuleList(
            _Layer(layer, self.allocate_cache(key_heads, config.head_dim)) for layer in every.layers
        )
        buffers = {
            "ids": ids.to(torch.int32),  # the target's id of every id that can be drafted
            # Needed only for a sharded output layer: the ids of this rank's logits.
            "part_ids": part_ids if self.groups[1].degree > 1 else shared.ids[:0],
            "masked": masked,  # P-EAGLE: the fused state of a position not yet known
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    @property
    def network(self) -> EagleNetwork:
        layers = tuple(layer.weights(self.config.rms_norm_eps) for layer in self.layers)  # type: ignore[operator]
        flat = self.held.flat(EagleWeights)
        weights = EagleWeights(**flat, fc_norms=tuple(self.fc_norms), layers=layers)
        return EagleNetwork(self.config, weights, self.kernels, self.group)

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.keys, layer.values) for layer in self.layers]  # type: ignore[misc]

    @property
    def _skips(self) -> bool:
        """Whether rows that are not used cost nothing; over several ranks they do, as in the target's own windows."""
        return self.kernels.skips_padding and not self.divided

    @property
    def divided(self) -> bool:
        return super().divided or self.group.degree > 1

    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        return self.last_pair(tokens, features, place, last=last).hidden

    def last_pair(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> LastPair:
        """Read a commit as `read`, and return the values that a tree needs."""
        assert features is not None, "commits carry the features that `reads` asks for"
        pairs: list[Qkv] = []

        def attend(layer: int, qkv: Qkv) -> Tensor:
            q, k, v = (at_index(x, last) for x in qkv)
            pairs.append((q, k, v))
            return self.attend(layer, qkv, place)

        fused = self.network.fuse(features, place.real)
        positions, last_row = place.positions(tokens.shape[1]), partial(at_index, index=last)
        hidden = self.run(tokens, fused, attend, positions=positions, real=place.real, kept=last_row)
        return LastPair(hidden, tuple(pairs), (place.row + last).clamp(min=0, max=self.options.n_positions - 1))

    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        attend = partial(self.attend, place=place)
        return self.run(token, hidden, attend, positions=place.row.unsqueeze(1), real=place.real)

    def ahead(
        self,
        tokens: Tensor,
        count: Tensor,
        features: Tensor,
        *,
        place: CachePosition,
        k: int,
        sampling: SamplingTensors,
    ) -> Tensor:
        """P-EAGLE: read a commit and k - 1 positions not yet known after it, in one pass -> hidden [B, k, H], which
        predict the next k tokens.

        tokens [B, W], count [B], features [B, W, F]; ``place`` has W + k - 1 rows.
        """
        window, used = tokens.shape[1] + k - 1, None
        if self._skips:
            used = sampling.seated * count
            place = replace(place, count=used + sampling.seated * (k - 1), padded=True)
        steps = torch.arange(window, dtype=torch.int32, device=tokens.device)
        known = steps < count.unsqueeze(1)
        # What is known is fused first, so that ``fc`` is applied to no more than a commit has.
        fused = nn.functional.pad(self.network.fuse(features, used), (0, 0, 0, k - 1))
        tokens = nn.functional.pad(tokens, (0, k - 1))
        assert self.config.mask_token is not None, "only a P-EAGLE head drafts all tokens at once"
        tokens = torch.where(known, tokens, self.config.mask_token)
        fused = torch.where(known.unsqueeze(-1), fused, self.masked)
        index = (count - 1).unsqueeze(1) + steps[:k]
        return self.run(
            tokens,
            fused,
            partial(self.attend, place=place),
            positions=place.positions(window),
            real=place.real,
            kept=lambda x: x.gather(1, index.to(torch.int64).unsqueeze(-1).expand(-1, -1, x.shape[-1])),
        )

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        attend: Attend,
        *,
        positions: Tensor,
        real: Tensor | None = None,
        kept: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Compute pairs: tokens [b, n] int32, hidden [b, n, H], positions [b, n] int32 -> [b, n, H], or those ``kept``
        (`EagleNetwork.run`).
        """
        rotation = self.rotation(positions)
        return self.network.run(self.embed(tokens), hidden, attend, rotation=rotation, real=real, kept=kept)

    def attend(self, layer: int, qkv: Qkv, place: CachePosition) -> Tensor:
        """Write pairs to their rows of a layer's cache, and attend to those before them. -> [b, n, heads of this rank *
        D]
        """
        return self.kernels.attend(qkv, self.caches()[layer], place)

    def logits(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        return self.spread(self.scores(hidden, real))

    def scores(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        """Compute scores: [b, n, H] -> [b, n, U] float32."""
        return whole(self.network.scores(hidden, real), self.config.draft_vocab_size, self.groups[1])

    @property
    def part(self) -> VocabPart:
        """Ids of this rank's `EagleNetwork.scores`."""
        sizes, group = self.config, self.groups[1]
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
        part, real = self.part, self.real_rows(sampling, hidden.shape[1])
        if part.gaps and part.divided and not self.kernels.sampling_kinds:
            every = self.scores(hidden, real).contiguous()
            of_all = VocabPart(self.ids, part.size, SingleRank(), gaps=True)
            return self.kernels.rank_tokens(every, positions, sampling, count=count, part=of_all)
        scores = self.network.scores(hidden, real)
        return rank(scores, positions, sampling, count=count, part=part, kernels=self.kernels)


_GROUPS = ("mlp", "layers", "fc_norms")
_FLAT = {kind: [one.name for one in fields(kind) if one.name not in _GROUPS] for kind in (EagleWeights, LayerWeights)}
_OF_MLP = tuple(field.name for field in fields(MlpWeights) if field.name != "eps")
