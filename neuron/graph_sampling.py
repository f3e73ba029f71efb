"""The choice of a token in operations that graph compilers take, at a cost that a vocabulary of 128,000 bears.

The distribution is that of `paceline.core.probs`, which says it in a few lines. Here every kind of sampling does
only what it needs, over rows of logits that may be divided over ranks:

    greedy  the largest logit
    top-k   the 256 largest logits, by the compiler's top-k; all else happens on those
    full    noise on every id; the best 127 by logit plus noise are candidates, and seven halvings find which of them
            the top-p nucleus holds. A nucleus inside of the 256 largest logits is decided on those.
    wide    as full, for top-k above 256: two searches over the row find its border and the nucleus

Equals stand or fall together at the border of top-k and of the nucleus, so that it does not matter in which order the
compiler's top-k gives them (`paceline.decoder.parallel.vocab_part.topk`). No sort, no table, no integer above 2**24,
and nothing is gathered from a row by its id.
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
"""A score below everything that is cut."""


class _Part(VocabPart):
    """With what a choice asks of a row that may be divided."""

    @classmethod
    def of(cls, part: VocabPart) -> _Part:
        return cls(part.ids, part.size, part.group, part.gaps)

    def real(self, logits: Tensor) -> Tensor:
        """Logits [b, T, n] in which the ids that fill up are never chosen."""
        filled_up = self.divided and (self.gaps or len(self.ids) * self.group.degree > self.size)
        return torch.where(self.ids < self.size, logits, _NOWHERE) if filled_up else logits

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of numbers [b, T, 1]."""
        return self.group.reduce(x) if self.divided else x

    def largest(self, x: Tensor) -> Tensor:
        """The largest number of a row [b, T, n] on any rank. -> [b, T, 1]"""
        high = x.amax(-1, keepdim=True)
        return self.group.gather(high).amax(0) if self.divided else high

    def best(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` largest numbers of this rank's part of a row [b, T, n], falling, and their ids.

        -> [b, T, count] float32 and int32, or as many as there are
        """
        values, places = topk(x, min(count, x.shape[-1]))
        if self.gaps:
            return values, self.ids.index_select(0, places.flatten()).reshape(places.shape)
        return values, places + self.ids[0] if self.divided else places

    def falling(self, values: Tensor, count: int) -> Tensor:
        """The ``count`` largest of all ranks' numbers, of which this one has [b, T, K], falling.

        -> [b, T, count], or as many as there are; of a vocabulary that is not divided, ``values`` as they are
        """
        return self.largest_of_all(values, count) if self.divided else values

    def largest_of_all(self, values: Tensor, count: int) -> Tensor:
        """As `falling`, of numbers in any order."""
        every = self._joined(values)
        return topk(every, min(count, every.shape[-1]))[0]

    def merged(self, keys: Tensor, values: Tensor, ids: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
        """The first ``count`` of all ranks' values and ids by the largest keys, where each rank has the first of its
        own. [b, T, K] each -> [b, T, count] twice
        """
        if not self.divided:
            return values, ids
        places = topk(self._joined(keys), count)[1].to(torch.int64)
        gathered = self._joined(ids.to(torch.float32)).gather(-1, places)  # float32 is exact for ids
        return self._joined(values).gather(-1, places), gathered.to(torch.int32)

    def _joined(self, x: Tensor) -> Tensor:
        """x [b, T, K] of every rank, one behind the other."""
        return self.group.gather(x).movedim(0, -2).flatten(-2) if self.divided else x


CANDIDATES = 127
"""Of the full kind; one less than a power of two, so that seven halvings tell apart how many of them the nucleus holds.

That it holds none has a probability of at most (1 - top_p)**127, and only where the 256 largest logits hold less than
top_p. Then the choice is among those 256.
"""

_LEAST = -88.0
"""Below this exp is 0 in float32."""
_HALVINGS = 30  # of the 88 between the largest score and that: to less than float32 tells apart there


@dataclass(frozen=True, slots=True)
class _Params:
    """Columns of `SamplingTensors.params`, each [b, 1, 1]; ``temperature`` is 1 where a row is greedy."""

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
    """Ids of every row that a choice is made among, on each rank some.

    ids     [b, T, K] int32
    drawn   [b, T, K] float32, logits over temperature, plus noise where a row samples
    stands  [b, T, K] bool, what the filters leave
    """

    ids: Tensor
    drawn: Tensor
    stands: Tensor
    part: _Part

    def best(self) -> Tensor:
        """The choice: the lowest id of the largest that stands. -> [b, T] int32"""
        return _largest(torch.where(self.stands, self.drawn, _NOWHERE), self.ids, self.part)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Ids and scores of the first choices, what is cut behind all that stands. -> [b, T, count] each"""
        keys = torch.where(self.stands, self.drawn, reduce.NEGATIVE)
        keys, best = topk(keys, min(count, keys.shape[-1]))
        places = best.to(torch.int64)
        drawn, ids = self.drawn.gather(-1, places), self.ids.gather(-1, places)
        drawn, ids = self.part.merged(keys, drawn, ids, count=count)
        return ids, drawn


class _Rows:
    """Rows of logits [b, T, n] of this rank's ids, how they sample, and the noise of their positions."""

    def __init__(
        self, logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, part: VocabPart, stream: int
    ) -> None:
        self.part = _Part.of(part)
        self.logits = self.part.real(logits.to(torch.float32))
        self.params = _Params.of(sampling)
        self._positions, self._seeds, self._stream = positions, sampling.seeds, stream

    def gumbel(self, ids: Tensor) -> Tensor:
        """[n] or [b, T, n] int32 -> [b, T, n]"""
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
        """With noise in every row, also where it is greedy."""
        return self.scaled + self.gumbel(self.part.ids)

    def filtered(self) -> Tensor:
        """With noise where a row samples, and far below where the filters cut. [b, T, n]"""
        drawn = torch.where(self.params.hot, self.drawn, self.scaled)
        inside = _inside(self.scaled - self.high, self.weights, self.params, part=self.part)
        return torch.where(inside, drawn, _NOWHERE)

    def of_list(self, *, limit: int = TOP_K_LIMIT, full: bool = False) -> tuple[_Choices, Tensor]:
        """Among the ``limit`` largest logits; and whether they hold all of the nucleus, [b, T, 1] bool.

        ``full``: as for `border`.
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
        """From the largest scores of every row, falling [b, T, K]: the smallest that the filters leave, [b, T, 1]; and
        whether the nucleus is inside of them, [b, T, 1] bool.

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
        """Among the best by logit plus noise, of rows without top-k; and whether any of them stands, [b, T, 1] bool."""
        params, part = self.params, self.part
        drawn, ids = part.best(self.drawn, CANDIDATES)
        best, gumbel = part.falling(drawn, CANDIDATES), self.gumbel(ids)
        # What was added to the noise, to the last bits; a score that is less than that above it counts as its equal.
        scores = drawn - gumbel
        scores = scores + (drawn.abs() + gumbel.abs()) * 2.0**-22
        scores = torch.where(drawn >= best[..., -1:], scores, _NOWHERE)
        falling = part.largest_of_all(scores, best.shape[-1])
        count = _count_inside(falling, self.scaled, self.weights, target=params.top_p * self.mass, part=part)
        border = _at(falling, count - 1)  # of the last candidate that the nucleus holds
        stands = ((scores >= border) & (count > 0)) | (params.top_p >= 1.0)
        stands = stands & (torch.exp(scores - self.high) >= params.min_p)
        return _Choices(ids, drawn, stands, part), part.largest(stands.to(torch.float32)) > 0


def sample_tokens(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, part: VocabPart, stream: int = noise.TARGET
) -> Tensor:
    """As `paceline.core.probs.sample_tokens`, from logits of this rank's ids. [b, T, n] -> [b, T] int32"""
    rows = _Rows(logits, positions, sampling, part=part, stream=stream)
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
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, count: int, part: VocabPart
) -> tuple[Tensor, Tensor]:
    """As `paceline.core.probs.rank_tokens`, from logits of this rank's ids. [b, T, n] -> [b, T, count] twice

    What a filter cuts comes behind all that stands, in an order of its own.
    """
    rows = _Rows(logits, positions, sampling, part=part, stream=noise.TARGET)
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
    """As `paceline.core.probs.probabilities`, of a vocabulary that is not divided. [b, T, V] -> [b, T, V] float32"""
    part = VocabPart.whole(logits)
    one_hot = (part.ids == reduce.argmax(logits).unsqueeze(-1)).to(torch.float32)
    if sampling.kind == "greedy":
        return one_hot
    nowhere = torch.zeros(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    rows = _Rows(logits, nowhere, sampling, part=part, stream=noise.TARGET)
    weights = torch.where(_standing(rows, sampling.kind), rows.weights, 0.0)
    return torch.where(rows.params.hot, weights / weights.sum(-1, keepdim=True), one_hot)


def _standing(rows: _Rows, kind: SamplingKind) -> Tensor:
    """What the filters leave of whole rows; where they need no more than the largest logits, by the border of those.

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
    """The id of the largest score of all ranks', the lowest of equals. Ranks send the best and its id.

    scores [b, T, K] of ids [K] or [b, T, K] int32 -> [b, T] int32
    """
    best = reduce.max_with_index(scores, ids.to(torch.float32), part.size)
    if not part.divided:
        return reduce.clamp_ids(best[1], part.size)
    pair = part.group.gather(torch.stack(best, -1))
    _, winner = reduce.max_with_index(pair[..., 0].movedim(0, -1), pair[..., 1].movedim(0, -1), part.size)
    return reduce.clamp_ids(winner, part.size)


def _at(falling: Tensor, place: Tensor) -> Tensor:
    """The number at a place of every list. [b, T, K], [b, T or 1, 1] int32 -> [b, T, 1]; 0 for a place that is none"""
    places = torch.arange(falling.shape[-1], dtype=torch.int32, device=falling.device)
    return torch.where(places == place, falling, 0.0).sum(-1, keepdim=True)


def _count_inside(falling: Tensor, scaled: Tensor, weights: Tensor, *, target: Tensor, part: _Part) -> Tensor:
    """How many of the candidates' scores are in the nucleus: those for which what is likelier weighs less than target.

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
    """The largest score from which on the numbers add up to the target. [b, T, n] twice, [b, T, 1] -> [b, T, 1]"""
    low, high = torch.full_like(target, _LEAST), torch.zeros_like(target)
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        enough = part.sum(torch.where(below >= middle, numbers, 0.0).sum(-1, keepdim=True)) >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def _inside(below: Tensor, weights: Tensor, params: _Params, *, part: _Part) -> Tensor:
    """What the filters leave of whole rows. ``below``: scores less the largest. [b, T, n] -> [b, T, n] bool"""
    some = params.top_k > 0
    count = torch.where(some, params.top_k, 1.0).expand_as(below[..., :1])
    inside = (below >= _search(below, torch.ones_like(weights), count, part=part)) | ~some
    return inside & _nucleus(below, torch.where(inside, weights, 0.0), params, part=part)


def _nucleus(below: Tensor, weights: Tensor, params: _Params, *, part: _Part) -> Tensor:
    """What top-p and min-p leave of whole rows. ``weights``: 0 where top-k cuts. [b, T, n] -> [b, T, n] bool"""
    target = params.top_p * part.sum(weights.sum(-1, keepdim=True))
    inside = (below >= _search(below, weights, target, part=part)) | (params.top_p >= 1.0)
    return inside & (weights >= params.min_p)


def _log_softmax(values: Tensor, over: Tensor, *, part: _Part) -> Tensor:
    """Some numbers of a row, less the logarithm of the sum of exponentials of all of it.

    values [b, T, k], over [b, T, n], of which every rank has some -> [b, T, k]
    """
    high = part.largest(over)
    return (values - high - torch.log(part.sum(torch.exp(over - high).sum(-1, keepdim=True)))).clamp(max=0.0)
