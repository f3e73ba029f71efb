"""What a drafter with weights computes: heads, and the steps that make graphs of them.

A head is mathematics alone. `AutoregressiveHead` drafts one token after the other and may have a cache; `ParallelHead`
drafts all tokens at once from one state of the target. Which commits it has read, which graph runs and what a round
gets is `paceline.draft.head_drafter.HeadDrafter`.

Letters: B slots, b lines of a call, W tokens of a commit, n tokens of a call, k drafted tokens, H width of the head,
F of a feature, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from paceline.core import noise, probs
from paceline.core.types import PAD, FeatureSpec, SamplingKind, SamplingTensors
from paceline.decoder.batch_buckets import first_slots
from paceline.decoder.kernels.protocol import CachePosition, Kernels, Tree
from paceline.decoder.options import DecoderOptions
from paceline.decoder.steps import move_rows


class DraftHead(nn.Module, ABC):
    """Weights and caches of a head. ``options`` are those of the target: slots, positions, number format.

    reads  what it reads of the target besides tokens; None = nothing
    """

    reads: FeatureSpec | None = None
    slots: Tensor

    def __init__(self, kernels: Kernels, options: DecoderOptions) -> None:
        super().__init__()
        self.kernels, self.options = kernels, options
        self.register_buffer("slots", torch.arange(options.batch_size, dtype=torch.int32))

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, each [slots, groups, rows, width]; [] = nothing is kept between rounds."""
        return []

    def real_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        """How many rows of a window somebody waits for in every slot, [B] int32; None: they are all computed anyway."""
        return None

    def seated_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        """What `real_rows` is for a head that passes it to its products: nothing in slots without a request."""
        skips = self.kernels.skips_padding and self.options.batch_size > 1
        return sampling.seated * window if skips else None

    @abstractmethod
    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        """The step that drafts chains of ``k``; see `paceline.core.protocols.TraceableDrafter.step`."""


class AutoregressiveHead(DraftHead):
    """A head that drafts one token after the other.

    Row p of its caches belongs to the token at position p; if it reads features, to the pair of the feature at p and
    the token at p + 1, since ``features[:, i]`` are the state that predicted ``tokens[:, i]``.
    """

    @abstractmethod
    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        """Read committed tokens into the caches, at the rows of ``place``.

        tokens [b, n] int32, any id where there is none; features [b, n, F] or None; last [b] int32, the last real token
        of each line -> hidden [b, 1, H] of that token, which predicts the first drafted one.
        """

    @abstractmethod
    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        """Read a token that was just drafted: token [B, 1] int32, hidden [B, 1, H] that predicted it -> [B, 1, H]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, n, H] -> logits [B, n, V] float32 over the target's ids."""

    def sample_tokens(self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        """hidden [B, n, H], positions [B, n] int32 -> tokens [B, n] int32, chosen as the target chooses."""
        return self.kernels.sample_tokens(self.logits(hidden).contiguous(), positions, sampling)

    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        return ChainStep(self, k, bucket, kind=kind)

    def place(
        self, row: Tensor, count: int, bucket: int, *, tree: Tree | None = None, sampling: SamplingTensors | None = None
    ) -> CachePosition:
        """``count`` rows from row [B] on in every slot, or in the first ones.

        Rows outside of the cache are pulled back into it: slots without a request have such rows, and what they compute
        is not used by anyone. ``sampling`` says which slots those are, for a head that can leave them out.
        """
        row = row.clamp(min=0, max=self.options.n_positions - 1)
        real = None if sampling is None else self.real_rows(sampling, count)
        padded = real is not None
        real = torch.full_like(row, count) if real is None else real
        slots = first_slots(self.slots, len(row))
        return CachePosition(row, real, slots, bucket, padded=padded, tree=tree, in_order=True)

    def allocate_cache(self, groups: int, width: int) -> tuple[Tensor, Tensor]:
        """Empty keys and values of a layer, to be registered as buffers."""
        shape = (self.options.batch_size, groups, self.options.rows, width)
        return torch.zeros(shape, dtype=self.options.dtype), torch.zeros(shape, dtype=self.options.dtype)


class ParallelHead(DraftHead):
    """A head that drafts all tokens at once, from the target's state behind the last committed token."""

    reads: FeatureSpec | None = FeatureSpec()

    @abstractmethod
    def parallel(self, state: Tensor, k: int) -> Tensor:
        """state [B, F] float32 -> logits [B, k, V] float32 of the tokens at the next k positions."""

    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        return ParallelStep(self, k, kind=kind)


class ChainStep(nn.Module):
    """Read a commit, then draft ``k`` tokens one by one.

    drawn       draw from the head's probabilities and report them; otherwise choose with the target's noise
    confidence  from the first place on where the largest probability (no temperature, no filter) is below it, drafts
                are PAD
    reports     also give these probabilities, [B, k] float32, of all places
    kind        of sampling, of the rounds it is for
    """

    def __init__(
        self,
        head: AutoregressiveHead,
        k: int,
        bucket: int,
        *,
        drawn: bool = False,
        confidence: float = 0.0,
        reports: bool = False,
        kind: SamplingKind = "full",
    ) -> None:
        super().__init__()
        self.head, self._k, self._bucket, self._kind = head, k, bucket, kind
        self._drawn, self._confidence, self._reports = drawn, confidence, reports

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor, *features: Tensor
    ) -> tuple[Tensor, ...]:
        """The fields of a Commit [B, W], params [B, 4], seeds [B, 4], features [B, W, F] if the head reads them
        -> drafts [B, k] int32, and their probabilities [B, k, V] if they are drawn, and what ``reports`` asks for.
        """
        head, sampling = self.head, SamplingTensors(params, seeds, self._kind)
        shift = row_shift(head)
        place = head.place(first_row - shift, tokens.shape[1], self._bucket, sampling=sampling)
        hidden = head.read(tokens.clamp(min=0), features[0] if features else None, place, last=count - 1)
        drafts: list[Tensor] = []
        distributions: list[Tensor] = []
        largest: list[Tensor] = []
        for index in range(self._k):
            position = first_row + count + index  # of the token that is chosen now
            if index:
                place = head.place(position - 1 - shift, 1, self._bucket, sampling=sampling)
                hidden = head.next(drafts[-1], hidden, place)
            if not (self._drawn or self._confidence or self._reports):
                drafts.append(head.sample_tokens(hidden, position.unsqueeze(1), sampling))
                continue
            logits = head.logits(hidden).contiguous()
            if self._confidence > 0 or self._reports:
                largest.append(probs.softmax(logits).amax(-1))
            stream = noise.DRAFT if self._drawn else noise.TARGET
            drafts.append(head.kernels.sample_tokens(logits, position.unsqueeze(1), sampling, stream=stream))
            if self._drawn:
                distributions.append(head.kernels.probabilities(logits, sampling))
        chain = torch.cat(drafts, 1)
        if self._confidence > 0:
            doubts = (~(torch.cat(largest, 1) >= self._confidence)).to(torch.float32).cumsum(-1)
            chain = torch.where(doubts == 0, chain, PAD)
        out = (chain, torch.cat(distributions, 1)) if self._drawn else (chain,)
        return (*out, torch.cat(largest, 1)) if self._reports else out


class ParallelStep(nn.Module):
    """Draft ``k`` tokens at once. ``kind``: of sampling, of the rounds it is for."""

    def __init__(self, head: ParallelHead, k: int, *, kind: SamplingKind = "full") -> None:
        super().__init__()
        self.head, self._k, self._kind = head, k, kind

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor, features: Tensor
    ) -> tuple[Tensor]:
        """The fields of a Commit [B, W], params [B, 4], seeds [B, 4], features [B, W, F] -> drafts [B, N] int32."""
        sampling = SamplingTensors(params, seeds, self._kind)
        logits = self.scores(at_index(features, count - 1).squeeze(1), sampling)
        ahead = torch.arange(self._k, dtype=torch.int32, device=tokens.device)
        positions = (first_row + count).unsqueeze(1) + ahead
        return (self.choose(logits, positions, sampling),)

    def scores(self, state: Tensor, sampling: SamplingTensors) -> Tensor:
        """state [B, F] -> logits [B, k, V]; anything finite in slots without a request."""
        return self.head.parallel(state, self._k)

    def choose(self, logits: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        """logits [B, k, V], positions [B, k] int32 -> tokens [B, N] int32; N = k, the head's first choices."""
        return self.head.kernels.sample_tokens(logits.contiguous(), positions, sampling)


class ReadStep(nn.Module):
    """Read tokens of a text into one slot."""

    def __init__(self, head: AutoregressiveHead, bucket: int) -> None:
        super().__init__()
        self.head, self._bucket = head, bucket

    def forward(self, tokens: Tensor, row: Tensor, count: Tensor, slot: Tensor, *features: Tensor) -> tuple[Tensor]:
        """tokens [1, chunk] int32; row, count, slot [1] int32; features [1, chunk, F] if the head reads them
        -> the row after the last real token.
        """
        place = CachePosition(row, count, slot, self._bucket, padded=True)
        self.head.read(tokens, features[0] if features else None, place, last=count - 1)
        return (row + count,)


class MoveRowsStep(nn.Module):
    """Give a slot what another one holds in the caches of a head, in the first rows of the bucket."""

    def __init__(self, head: DraftHead, bucket: int) -> None:
        super().__init__()
        self.head, self._bucket = head, bucket

    def forward(self, slot: Tensor, to: Tensor) -> tuple[Tensor]:
        """slot, to [1] int32 -> to"""
        move_rows(self.head.caches(), slot, to, count=self._bucket)
        return (to + 0,)


def row_shift(head: DraftHead) -> int:
    """How far a token's row is before its position: 1 where a row belongs to a pair of a feature and a token."""
    return 0 if head.reads is None else 1


def at_index(x: Tensor, index: Tensor) -> Tensor:
    """Row ``index`` [B] of x [B, n, ...] -> [B, 1, ...]."""
    index = index.to(torch.int64).view(-1, *[1] * (x.dim() - 1)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, index)
