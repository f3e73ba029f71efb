"""Sampling of a token in operations that graph compilers support, efficient for a vocabulary of 128,000.

The distribution is that of `paceline.core.probs`. Each sampling mode computes only what it needs, over rows of logits
that may be sharded over ranks:

    greedy  the largest logit
    top-k   the 256 largest logits, by the compiler's top-k; all else is computed on those
    full    noise on every id; the best 127 by logit plus noise are candidates, and seven halvings find which of them
            the top-p nucleus holds. A nucleus inside of the 256 largest logits is decided on those.
    wide    as full, for top-k above 256: two searches over the row find its border and the nucleus

Equals at the border of top-k and of the nucleus are kept or cut together, so that their order in the compiler's top-k
does not matter (`paceline.decoder.parallel.vocab_part.topk`). No sort, no table, no integer above 2**24, and nothing is
gathered from a row by its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.core import noise, reduce
from paceline.core.sampling import TOP_K_LIMIT
from paceline.core.types import SamplingKind, SamplingTensors
from paceline.decoder.parallel.vocab_part import VocabPart, topk

_NOWHERE = 2 * reduce.NEGATIVE
"""A score below every score that is cut."""


class _Part(VocabPart):
    """A vocabulary part with the operations of a sampler on a row that may be sharded."""

    @classmethod
    def of(cls, part: VocabPart) -> _Part:
        return cls(part.ids, part.size, part.group, part.gaps)

    def real(self, logits: Tensor) -> Tensor:
        """Return logits [b, T, n] in which padding ids are never sampled."""
        filled_up = self.divided and (self.gaps or len(self.ids) * self.group.degree > self.size)
        return torch.where(self.ids < self.size, logits, _NOWHERE) if filled_up else logits

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of numbers [b, T, 1]."""
        return self.group.reduce(x) if self.divided else x

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest number of a row [b, T, n] on any rank. -> [b, T, 1]"""
        high = x.amax(-1, keepdim=True)
        return self.group.gather(high).amax(0) if self.divided else high

    def best(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ``count`` largest numbers of this rank's part of a row [b, T, n], descending, and their ids.

        -> [b, T, min(count, n)] float32 and int32
        """
        values, places = topk(x, min(count, x.shape[-1]))
        if self.gaps:
            return values, self.ids.index_select(0, places.flatten()).reshape(places.shape)
        return values, places + self.ids[0] if self.divided else places

    def falling(self, values: Tensor, count: int) -> Tensor:
        """Return the ``count`` largest of all ranks' numbers, of which this rank has [b, T, K], descending.

        -> [b, T, count], or all if fewer; without sharding, ``values`` unchanged
        """
        return self.largest_of_all(values, count) if self.divided else values

    def largest_of_all(self, values: Tensor, count: int) -> Tensor:
        """Return the ``count`` largest of all ranks' numbers, in any order on this rank; see `falling`."""
        every = self._joined(values)
        return topk(every, min(count, every.shape[-1]))[0]

    def merged(self, keys: Tensor, values: Tensor, ids: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
        """Return all ranks' values and ids by the largest keys. [b, T, K] each -> [b, T, count] twice"""
        if not self.divided:
            return values, ids
        places = topk(self._joined(keys), count)[1].to(torch.int64)
        gathered = self._joined(ids.to(torch.float32)).gather(-1, places)  # float32 is exact for ids
        return self._joined(values).gather(-1, places), gathered.to(torch.int32)

    def _joined(self, x: Tensor) -> Tensor:
        """Concatenate x [b, T, K] of all ranks."""
        return self.group.gather(x).movedim(0, -2).flatten(-2) if self.divided else x


CANDIDATES = 127
"""Number of candidates in mode "full"; one less than a power of two, so that seven halvings find how many of them the
nucleus holds.

It holds none with a probability of at most (1 - top_p)**127, and only if the 256 largest logits hold less than top_p.
The token is then sampled among those 256.
"""

_LEAST = -88.0
"""Below this exp is 0 in float32."""
_HALVINGS = 30  # of the range of 88 below the largest score: finer than float32 resolves there


@dataclass(frozen=True, slots=True)
class _Params:
    """Columns of `SamplingTensors.params`, each [b, 1, 1]; ``temperature`` is 1 in a greedy row."""

    hot: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, sampling: SamplingTensors) -> _Params:
        temperature, top_k, top_p, min_p = (sampling.params[:, i].view(-1, 1, 1) for i in range(4))
        hot = temperature > 0
        return cls(hot, torch.where(hot, temperature, 1.0), top_k, top_p, min_p)


@dataclass(frozen=True, slots=True)
class _Choices:
    """Candidate ids of every row, some on each rank.

    ids     [b, T, K] int32
    drawn   [b, T, K] float32, logits over temperature, plus noise where a row samples
    stands  [b, T, K] bool, whether the filters keep it
    """

    ids: Tensor
    drawn: Tensor
    stands: Tensor
    part: _Part

    def best(self) -> Tensor:
        """Return the sampled token: the lowest id among the kept ones with the largest score. -> [b, T] int32"""
        return _largest(torch.where(self.stands, self.drawn, _NOWHERE), self.ids, self.part)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Return ids and scores of the best tokens, cut ones after all kept ones. -> [b, T, count] each"""
        keys = torch.where(self.stands, self.drawn, reduce.NEGATIVE)
        keys, best = topk(keys, min(count, keys.shape[-1]))
        places = best.to(torch.int64)
        drawn, ids = self.drawn.gather(-1, places), self.ids.gather(-1, places)
        drawn, ids = self.part.merged(keys, drawn, ids, count=count)
        return ids, drawn


class _Rows:
    """Rows of logits [b, T, n] of this rank's ids, their sampling parameters, and the noise of their positions."""

    def __init__(
        self, logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, part: VocabPart, stream: int
    ) -> None:
        self.part = _Part.of(part)
        self.logits = self.part.real(logits.to(torch.float32))
        self.params = _Params.of(sampling)
        self._positions, self._seeds, self._stream = positions, sampling.seeds, stream

    def gumbel(self, ids: Tensor) -> Tensor:
        """Return Gumbel noise of ids [n] or [b, T, n] int32 -> [b, T, n]"""
        return noise.gumbel(self._seeds, self._positions, ids, stream=self._stream, traced=True)

    @cached_property
    def scaled(self) -> Tensor:
        return self.logits / self.params.temperature

    @cached_property
    def high(self) -> Tensor:
        return self.part.largest(self.scaled)

    @cached_property
    def weights(self) -> Tensor:
        return torch.exp(self.scaled - self.high)

    @cached_property
    def mass(self) -> Tensor:
        return self.part.sum(self.weights.sum(-1, keepdim=True))

    @cached_property
    def drawn(self) -> Tensor:
        """Scores with noise in every row, including greedy rows."""
        return self.scaled + self.gumbel(self.part.ids)

    def filtered(self) -> Tensor:
        """Scores with noise in sampling rows, and far below all others if the filters cut them. [b, T, n]"""
        drawn = torch.where(self.params.hot, self.drawn, self.scaled)
        inside = _inside(self.scaled - self.high, self.weights, self.params, part=self.part)
        return torch.where(inside, drawn, _NOWHERE)

    def of_list(self, *, limit: int = TOP_K_LIMIT, full: bool = False) -> tuple[_Choices, Tensor]:
        """Return candidates among the ``limit`` largest logits; and whether they hold the nucleus, [b, T, 1] bool.

        ``full``: see `border`.
        """
        params = self.params
        values, ids = self.part.best(self.logits, limit)
        scores = values / params.temperature
        falling = self.part.falling(scores, limit)
        border, decided = self.border(falling, full=full)
        drawn = torch.where(params.hot, scores + self.gumbel(ids), scores)
        if self.part.divided:  # the largest of one rank need not be among the largest of all
            drawn = torch.where(scores >= falling[..., -1:], drawn, _NOWHERE)
        return _Choices(ids, drawn, scores >= border, self.part), decided

    def border(self, falling: Tensor, *, full: bool) -> tuple[Tensor, Tensor]:
        """Return, from the largest scores of every row, descending [b, T, K], the smallest that the filters keep, [b,
        T, 1]; and whether they contain the nucleus, [b, T, 1] bool.

        ``full``: rows without top-k sample too, and there top-p is a part of the whole row's mass.
        """
        params, size = self.params, falling.shape[-1]
        count = torch.where(params.top_k > 0, params.top_k, float(size)).clamp(max=float(size))
        high, border = falling[..., :1], _at(falling, count.to(torch.int32) - 1)
        weights = torch.where(falling >= border, torch.exp(falling - high), 0.0)
        running = weights.cumsum(-1)
        total = running[..., -1:]
        target = params.top_p * (torch.where(params.top_k > 0, total, self.mass) if full else total)
        before = torch.nn.functional.pad(running[..., :-1], (1, 0))
        holds = (weights >= params.min_p) & ((before < target) | (params.top_p >= 1.0))
        border = torch.maximum(border, torch.where(holds, falling, -reduce.NEGATIVE).amin(-1, keepdim=True))
        return border, (total >= target) & (params.top_p < 1.0)

    def of_candidates(self) -> tuple[_Choices, Tensor]:
        """Return candidates of rows without top-k, by logit plus noise; and whether any is kept, [b, T, 1] bool."""
        params, part = self.params, self.part
        drawn, ids = part.best(self.drawn, CANDIDATES)
        best, gumbel = part.falling(drawn, CANDIDATES), self.gumbel(ids)
        # The noise as added, to the last bits; a score that is less than that above it counts as its equal.
        scores = drawn - gumbel
        scores = scores + (drawn.abs() + gumbel.abs()) * 2.0**-22
        scores = torch.where(drawn >= best[..., -1:], scores, _NOWHERE)
        falling = part.largest_of_all(scores, best.shape[-1])
        count = _count_inside(falling, self.scaled, self.weights, target=params.top_p * self.mass, part=part)
        border = _at(falling, count - 1)  # of the last candidate inside the nucleus
        stands = ((scores >= border) & (count > 0)) | (params.top_p >= 1.0)
        stands = stands & (torch.exp(scores - self.high) >= params.min_p)
        return _Choices(ids, drawn, stands, part), part.largest(stands.to(torch.float32)) > 0


def sample_tokens(
    logits: Tensor,
    positions: Tensor,
    sampling: SamplingTensors,
    *,
    stream: int = noise.TARGET,
    part: VocabPart | None = None,
) -> Tensor:
    """Sample tokens from logits of this rank's ids (None: all). [b, T, n] -> [b, T] int32"""
    rows = _Rows(logits, positions, sampling, part=part or VocabPart.whole(logits), stream=stream)
    own = rows.part
    if sampling.kind == "greedy":
        return _largest(rows.logits, own.ids, own)
    if sampling.kind == "top-k":
        return rows.of_list()[0].best()
    if sampling.kind == "wide":
        return _largest(rows.filtered(), own.ids, own)
    (listed, decided), (candidates, any_stands) = rows.of_list(full=True), rows.of_candidates()
    of_list = ~rows.params.hot | (rows.params.top_k > 0) | decided | ~any_stands
    return torch.where(of_list.squeeze(-1), listed.best(), candidates.best())


def rank_tokens(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, count: int, part: VocabPart | None = None
) -> tuple[Tensor, Tensor]:
    """Rank tokens from logits of this rank's ids (None: all). [b, T, n] -> [b, T, count] twice

    Tokens that a filter cuts come after all kept ones, in any order.
    """
    rows = _Rows(logits, positions, sampling, part=part or VocabPart.whole(logits), stream=noise.TARGET)
    own = rows.part
    if sampling.kind in ("greedy", "wide"):
        scores = rows.logits if sampling.kind == "greedy" else rows.filtered()
        values, ids = own.best(scores, count)
        values, ids = own.merged(values, values, ids, count=count)
        return ids, _log_softmax(values, scores, part=own)
    listed, decided = rows.of_list(limit=max(TOP_K_LIMIT, count), full=sampling.kind == "full")
    ids, values = listed.first(count)
    values = _log_softmax(values, listed.drawn, part=own)
    if sampling.kind == "top-k":
        return ids, values
    candidates, any_stands = rows.of_candidates()
    others, scores = candidates.first(count)
    of_list = ~rows.params.hot | (rows.params.top_k > 0) | decided | ~any_stands
    return torch.where(of_list, ids, others), torch.where(of_list, values, _log_softmax(scores, rows.drawn, part=own))


def probabilities(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return probabilities, as `paceline.core.probs.probabilities`, without sharding. [b, T, V] -> [b, T, V] float32"""
    part = VocabPart.whole(logits)
    one_hot = (part.ids == reduce.argmax(logits).unsqueeze(-1)).to(torch.float32)
    if sampling.kind == "greedy":
        return one_hot
    nowhere = torch.zeros(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    rows = _Rows(logits, nowhere, sampling, part=part, stream=noise.TARGET)
    weights = torch.where(_standing(rows, sampling.kind), rows.weights, 0.0)
    return torch.where(rows.params.hot, weights / weights.sum(-1, keepdim=True), one_hot)


def _standing(rows: _Rows, kind: SamplingKind) -> Tensor:
    """Return which ids of whole rows the filters keep; if the largest logits suffice, by their border.

    -> [b, T, n] bool
    """
    below, params = rows.scaled - rows.high, rows.params
    if kind == "wide":
        return _inside(below, rows.weights, params, part=rows.part)
    falling = topk(rows.scaled, min(TOP_K_LIMIT, rows.scaled.shape[-1]))[0]
    border, decided = rows.border(falling, full=kind == "full")
    listed = rows.scaled >= border
    if kind == "top-k":
        return listed
    nucleus = _nucleus(below, rows.weights, params, part=rows.part)
    return torch.where((params.top_k > 0) | decided, listed, nucleus)


def _largest(scores: Tensor, ids: Tensor, part: _Part) -> Tensor:
    """Return the id of the largest score of all ranks, the lowest of equals. Ranks send the best and its id.

    scores [b, T, K] of ids [K] or [b, T, K] int32 -> [b, T] int32
    """
    best = reduce.max_with_index(scores, ids.to(torch.float32), part.size)
    if not part.divided:
        return reduce.clamp_ids(best[1], part.size)
    pair = part.group.gather(torch.stack(best, -1))
    _, winner = reduce.max_with_index(pair[..., 0].movedim(0, -1), pair[..., 1].movedim(0, -1), part.size)
    return reduce.clamp_ids(winner, part.size)


def _at(falling: Tensor, place: Tensor) -> Tensor:
    """Return the number at an index of every list, or 0. [b, T, K], [b, T or 1, 1] int32 -> [b, T, 1]"""
    places = torch.arange(falling.shape[-1], dtype=torch.int32, device=falling.device)
    return torch.where(places == place, falling, 0.0).sum(-1, keepdim=True)


def _count_inside(falling: Tensor, scaled: Tensor, weights: Tensor, *, target: Tensor, part: _Part) -> Tensor:
    """Count the candidates inside the nucleus: those whose likelier ids weigh less than ``target`` in total.

    falling [b, T, K], scaled and weights [b, T, n], target [b, T, 1] -> [b, T, 1] int32
    """
    count = torch.zeros_like(target, dtype=torch.int32)
    for step in (64, 32, 16, 8, 4, 2, 1):
        if step <= falling.shape[-1]:
            trial = count + step
            likelier = torch.where(scaled > _at(falling, trial - 1), weights, 0.0).sum(-1, keepdim=True)
            holds = (part.sum(likelier) < target) & (trial <= falling.shape[-1])
            count = torch.where(holds, trial, count)
    return count


def _search(below: Tensor, numbers: Tensor, target: Tensor, *, part: _Part) -> Tensor:
    """Return the largest score above which the numbers add up to the target. [b, T, n] twice, [b, T, 1] -> [b, T, 1]"""
    low, high = torch.full_like(target, _LEAST), torch.zeros_like(target)
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        enough = part.sum(torch.where(below >= middle, numbers, 0.0).sum(-1, keepdim=True)) >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def _inside(below: Tensor, weights: Tensor, params: _Params, *, part: _Part) -> Tensor:
    """Return which ids the filters keep. ``below``: scores minus the largest. [b, T, n] -> [b, T, n] bool"""
    some = params.top_k > 0
    count = torch.where(some, params.top_k, 1.0).expand_as(below[..., :1])
    inside = (below >= _search(below, torch.ones_like(weights), count, part=part)) | ~some
    return inside & _nucleus(below, torch.where(inside, weights, 0.0), params, part=part)


def _nucleus(below: Tensor, weights: Tensor, params: _Params, *, part: _Part) -> Tensor:
    """Return which ids of whole rows top-p and min-p keep. ``weights``: 0 if top-k cuts. [b, T, n] -> [b, T, n] bool"""
    target = params.top_p * part.sum(weights.sum(-1, keepdim=True))
    inside = (below >= _search(below, weights, target, part=part)) | (params.top_p >= 1.0)
    return inside & (weights >= params.min_p)


def _log_softmax(values: Tensor, over: Tensor, *, part: _Part) -> Tensor:
    """Return some numbers of a row minus the logarithm of the whole row's sum of exponentials.

    values [b, T, k], over [b, T, n], of which every rank has some -> [b, T, k]
    """
    high = part.largest(over)
    return (values - high - torch.log(part.sum(torch.exp(over - high).sum(-1, keepdim=True)))).clamp(max=0.0)
