"""Drafters with weights: heads, the steps that compile them into graphs, and the base of the drafters.

A head is computation only. `AutoregressiveHead` drafts one token after the other and may have a cache; `ParallelHead`
drafts all tokens at once from one state of the target. `HeadDrafter` tracks the commits it has read, selects the graph
and makes the proposals.

Letters: B slots, b batch of a call, W tokens of a commit, n tokens of a call, k drafted tokens, H width of the head, F
of a feature, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from paceline.core import tree
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import TraceableDrafter, finish
from paceline.core.sampling import IDLE_ROW
from paceline.core.types import (
    PAD,
    Commit,
    DraftKey,
    DraftShape,
    FeatureSpec,
    Proposal,
    RoundLimits,
    SamplingKind,
    SamplingTensors,
)
from paceline.decoder.decoder import CompiledDecoder, first_rows, for_all_slots
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.protocol import CachePosition, Kernels, Tree
from paceline.decoder.options import DecoderOptions, check_width
from paceline.decoder.steps import move_rows, slot_numbers
from paceline.draft.drafted_tokens import DraftedTokens, Kept


class DraftHead(nn.Module, ABC):
    """Weights and caches of a head. ``options`` are those of the target: slots, positions, number format.

    reads  hidden states that it reads of the target; None = nothing
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
        """Return how many rows of a window are used in every slot, [B] int32; None: all are computed."""
        return None

    def seated_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        """Return `real_rows` for a head that passes it to its matmuls: nothing in slots without a request."""
        skips = self.kernels.skips_padding and self.options.batch_size > 1
        return sampling.seated * window if skips else None

    @abstractmethod
    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        """The step that drafts chains of ``k``; see `paceline.core.protocols.TraceableDrafter.step`."""


class CachedHead(DraftHead):
    """A head that reads the committed tokens into a cache.

    Row p of its caches belongs to the token at position p; if it reads features, to the feature at p, since
    ``features[:, i]`` are the state that predicted ``tokens[:, i]``.
    """

    @abstractmethod
    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        """Read committed tokens into the caches, at the rows of ``place``.

        tokens [b, n] int32, any id where there is none; features [b, n, F] or None; last [b] int32, the last real token
        of each line -> hidden [b, 1, H] of that token, or anything finite.
        """

    def place(
        self, row: Tensor, count: int, bucket: int, *, tree: Tree | None = None, sampling: SamplingTensors | None = None
    ) -> CachePosition:
        """``count`` rows from row [B] on in every slot, or in the first ones. ``sampling`` marks slots without a
        request, for a head that can skip them; their rows are clamped into the cache, and their results are not used.
        """
        row = row.clamp(min=0, max=self.options.n_positions - 1)
        real = None if sampling is None else self.real_rows(sampling, count)
        padded = real is not None
        real = torch.full_like(row, count) if real is None else real
        slots = first_rows(self.slots, len(row))
        return CachePosition(row, real, slots, bucket, padded=padded, tree=tree, in_order=True)

    def place_real(self, row: Tensor, count: Tensor, bucket: int, *, sampling: SamplingTensors) -> CachePosition:
        """``count`` [B] int32 rows of a window from row [B] on, as `place`; the rest of the window is padding."""
        row = row.clamp(min=0, max=self.options.n_positions - 1)
        slots = first_rows(self.slots, len(row))
        padded = self.kernels.skips_padding
        return CachePosition(row, count * sampling.seated, slots, bucket, padded=padded, in_order=True)

    def allocate_cache(self, groups: int, width: int) -> tuple[Tensor, Tensor]:
        """Empty keys and values of a layer, to be registered as buffers."""
        shape = (self.options.batch_size, groups, self.options.rows, width)
        return torch.zeros(shape, dtype=self.options.dtype), torch.zeros(shape, dtype=self.options.dtype)


class AutoregressiveHead(CachedHead):
    """A head that drafts one token after the other. What it has read and what it drafted are in its cache.

    If it reads features, a row belongs to a pair: the feature at p and the token at p + 1. `read` returns the hidden
    state that predicts the first drafted token.

    sees_drafts  a draft reads those before it; otherwise every node of a tree is read alone, at the last committed row
    """

    sees_drafts = True

    @abstractmethod
    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        """Read a token that was just drafted: token [B, 1] int32, hidden [B, 1, H] that predicted it -> [B, 1, H]; for
        trees, n nodes of a window at once.
        """

    def next_place(self, row: Tensor, ahead: int, bucket: int, *, sampling: SamplingTensors) -> CachePosition:
        """Return the place of a drafted token, ``ahead`` rows after the last committed one's ``row`` [B]."""
        return self.place(row + ahead, 1, bucket, sampling=sampling)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, n, H] -> logits [B, n, V] float32 over the target's ids."""

    def sample_tokens(self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        """hidden [B, n, H], positions [B, n] int32 -> tokens [B, n] int32, chosen as the target chooses."""
        return self.kernels.sample_tokens(self.logits(hidden).contiguous(), positions, sampling)

    def rank_tokens(
        self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors, *, count: int
    ) -> tuple[Tensor, Tensor]:
        """Rank tokens as `Kernels.rank_tokens`: hidden [B, n, H] -> [B, n, count] twice."""
        return self.kernels.rank_tokens(self.logits(hidden).contiguous(), positions, sampling, count=count)

    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        return ChainStep(self, k, bucket, kind=kind)


class ParallelHead(DraftHead):
    """A head that drafts all tokens at once, from the target's hidden state at the last committed token."""

    reads: FeatureSpec | None = FeatureSpec()

    @abstractmethod
    def parallel(self, state: Tensor, k: int) -> Tensor:
        """state [B, F] float32 -> logits [B, k, V] float32 of the tokens at the next k positions."""

    def step(self, k: int, bucket: int, kind: SamplingKind) -> nn.Module:
        return ParallelStep(self, k, kind=kind)


class ChainStep(nn.Module):
    """Read a commit, then draft ``k`` tokens one by one. ``kind``: sampling mode of its rounds."""

    takes_limit = True

    def __init__(
        self,
        head: AutoregressiveHead,
        k: int,
        bucket: int,
        *,
        drawn: bool = False,
        kept: Kept | None = None,
        kind: SamplingKind = "full",
    ) -> None:
        super().__init__()
        self.head, self._k, self._bucket, self._kind = head, k, bucket, kind
        self._kept = kept or Kept(drawn)

    def forward(
        self,
        tokens: Tensor,
        count: Tensor,
        first_row: Tensor,
        params: Tensor,
        seeds: Tensor,
        *features: Tensor,
        limit: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The fields of a Commit [B, W], params [B, 4], seeds [B, 4], features [B, W, F] if the head reads them ->
        outputs of `DraftedTokens`; any after the ``limit`` of a slot.
        """
        head, sampling = self.head, SamplingTensors(params, seeds, self._kind)
        shift = row_shift(head)
        place = head.place(first_row - shift, tokens.shape[1], self._bucket, sampling=sampling)
        if place.padded:
            place = replace(place, count=count * sampling.seated)
        hidden = head.read(tokens.clamp(min=0), features[0] if features else None, place, last=count - 1)
        drafts = DraftedTokens(head.kernels, sampling, self._kept)
        for index in range(self._k):
            if limit is not None:  # a slot that drafts no further is as one without a request
                drafts.sampling = sampling = replace(
                    sampling, params=torch.where((limit > index).unsqueeze(1), params, IDLE_ROW[0])
                )
            position = first_row + count + index  # of the token being sampled
            if index:
                place = head.next_place(first_row + count - 1 - shift, index, self._bucket, sampling=sampling)
                hidden = head.next(drafts.last, hidden, place)
            if self._kept.tokens_only:
                drafts.add(head.sample_tokens(hidden, position.unsqueeze(1), sampling))
            else:
                drafts.choose(head.logits(hidden).contiguous(), position.unsqueeze(1))
        return drafts.outputs()


class ParallelStep(nn.Module):
    """Draft ``k`` tokens at once. ``kind``: of sampling, of the rounds it is for."""

    def __init__(self, head: ParallelHead, k: int, *, kind: SamplingKind = "full") -> None:
        super().__init__()
        self.head, self._k, self._kind = head, k, kind

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor, features: Tensor
    ) -> tuple[Tensor]:
        """The inputs of a `ChainStep` -> drafts [B, N] int32."""
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


Rank = Callable[..., tuple[Tensor, Tensor]]
Extend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens [B, n] of inner nodes, states [B, n, H] of their parents, whose rows are [B, n] -> their states [B, n, H]."""


class LevelTree(nn.Module):
    """A tree of fixed shape that is drafted level by level: child r of a node is its token of rank r."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        super().__init__()
        self.draft_shape, self.parents = tree.draft_shape(parents), parents
        depths, inner = (0, *tree.depths(parents)), set(parents)
        self.rows = len(inner)  # the root counts as one
        rank = [parents[:node].count(parent) for node, parent in enumerate(parents)]
        self._choices: list[int] = []
        rows = {tree.ROOT: 0}  # rows of a window of the inner nodes
        above, order = [tree.ROOT], []
        for level in range(1, self.draft_shape.depth + 1):
            nodes = [n for n in range(len(parents)) if depths[n + 1] == level]
            most = 1 + max(rank[n] for n in nodes)
            self._choices.append(most)
            self._fix(f"pick_{level}", [above.index(parents[n]) * most + rank[n] for n in nodes])
            order += nodes
            deeper = [n for n in nodes if n in inner]
            self._fix(f"kept_{level}", [nodes.index(n) for n in deeper])
            self._fix(f"owner_{level}", [above.index(parents[n]) for n in deeper])
            self._fix(f"row_{level}", [rows[parents[n]] for n in deeper])
            rows |= {n: len(rows) + i for i, n in enumerate(deeper)}
            above = deeper
        self._fix("order", [order.index(n) for n in range(len(parents))])

    def _fix(self, name: str, values: list[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int32))

    def grown(
        self, rank: Rank, hidden: Tensor, extend: Extend, *, position: Tensor, sampling: SamplingTensors
    ) -> Tensor:
        """Draft from the root's state ``hidden`` [B, 1, H]; position [B, 1] int32 of the first drafts -> [B, N]."""
        levels: list[Tensor] = []
        for level, most in enumerate(self._choices, 1):
            at = (position + (level - 1)).expand(-1, hidden.shape[1]).contiguous()
            picks, _ = rank(hidden, at, sampling, count=most)
            tokens = picks.flatten(1).index_select(1, self.get_buffer(f"pick_{level}"))
            levels.append(tokens)
            if level < len(self._choices):
                kept, owner = (self.get_buffer(f"{name}_{level}") for name in ("kept", "owner"))
                parents = self.get_buffer(f"row_{level}").expand(len(tokens), -1)
                hidden = extend(tokens.index_select(1, kept), hidden.index_select(1, owner), parents)
        return torch.cat(levels, 1).index_select(1, self.get_buffer("order"))


class NextTreeStep(nn.Module):
    """Read a commit, then grow a tree by `AutoregressiveHead.next`, which reads the inner nodes so far again with each
    level.
    """

    def __init__(self, head: AutoregressiveHead, parents: tuple[int, ...], bucket: int, *, kind: SamplingKind) -> None:
        super().__init__()
        self.head, self.levels, self._bucket, self._kind = head, LevelTree(parents), bucket, kind

    def forward(
        self, tokens: Tensor, count: Tensor, first_row: Tensor, params: Tensor, seeds: Tensor, *features: Tensor
    ) -> tuple[Tensor]:
        """The inputs of a `ChainStep` -> drafts [B, N] int32."""
        head, sampling, last = self.head, SamplingTensors(params, seeds, self._kind), count - 1
        row = first_row - row_shift(head)
        place = head.place(row, tokens.shape[1], self._bucket, sampling=sampling)
        if place.padded:
            place = replace(place, count=count * sampling.seated)
        tokens = tokens.clamp(min=0)
        root = head.read(tokens, features[0] if features else None, place, last=last)
        read = [at_index(tokens, last)]
        states = [at_index(features[0], last) if features else root]
        rows = [torch.full_like(last, tree.ROOT).unsqueeze(1)]

        def extend(nodes: Tensor, hidden: Tensor, parents: Tensor) -> Tensor:
            if not head.sees_drafts:
                alone = head.next_place(row + last, 1, self._bucket, sampling=sampling)
                pairs = zip(nodes.split(1, 1), hidden.split(1, 1), strict=True)
                return torch.cat([head.next(node.contiguous(), state, alone) for node, state in pairs], 1)
            for every, new in ((read, nodes), (states, hidden), (rows, parents)):
                every.append(new)
            window, ancestry = torch.cat(read, 1), Tree.of(torch.cat(rows, 1))
            at = head.place(row + last, window.shape[1], self._bucket, tree=ancestry, sampling=sampling)
            return head.next(window, torch.cat(states, 1), at)[:, -nodes.shape[1] :].contiguous()

        position = (first_row + count).unsqueeze(1)
        return (self.levels.grown(head.rank_tokens, root, extend, position=position, sampling=sampling),)


class ReadStep(nn.Module):
    """Read tokens of a text into one slot."""

    def __init__(self, head: CachedHead, bucket: int) -> None:
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
        move_rows(self.head.caches(), slot, to, count=self._bucket)
        return (to + 0,)


def row_shift(head: DraftHead) -> int:
    """Return a token's position minus its row: 1 where a row belongs to a pair of a feature and a token."""
    return 0 if head.reads is None else 1


def at_index(x: Tensor, index: Tensor) -> Tensor:
    """Row ``index`` [B] of x [B, n, ...] -> [B, 1, ...]."""
    index = index.to(torch.int64).view(-1, *[1] * (x.dim() - 1)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, index)


class HeadDrafter(TraceableDrafter):
    """Drafts with a head, in a separate graph or in the verifier's. A `paceline.core.protocols.TraceableDrafter`.

    Its graphs are compiled, cached and saved with those of ``decoder``, the target (or the head's own decoder), and it
    has the same slots, positions and number format. Trees and other steps: override `step`, `step_key` and
    `draft_shape`. ConfigurationError: ``k`` is negative, or more than the target can verify in a round.
    """

    misfit_causes = (
        "another base model, or one trained further; prompts without the chat template of the training; norms or layer "
        "ids that the config.json does not tell"
    )

    def __init__(self, head: DraftHead, decoder: CompiledDecoder, k: int | DraftShape) -> None:
        self.draft_shape = k if isinstance(k, DraftShape) else DraftShape.chain(k)
        check_width(self.draft_shape.num_draft_tokens + 1)
        room = decoder.options.rows - decoder.n_positions
        if not self.draft_shape.is_chain and self.draft_shape.num_draft_tokens > room:
            raise ConfigurationError(
                f"draft_tree: expected at most {room} nodes, the cache rows after the last position, got "
                f"{self.draft_shape.num_draft_tokens}; use a smaller tree"
            )
        self.head, self.decoder = head.eval(), decoder
        self.reads = head.reads
        self._has_cache = bool(head.caches())
        self.max_positions: int | None = decoder.n_positions if self._has_cache else None
        # Commits that no proposal followed, in order, each with the slots whose requests have finished since. A drafter
        # with a cache reads the last commit when it proposes; before that it reads these, so that its cache has no gap.
        self._pending: list[tuple[Commit, set[int]]] = []
        # By slot, what is to be read before them: a row, the tokens from there on, and their features.
        self._deferred: dict[int, tuple[int, list[int], list[Tensor]]] = {}

    @property
    def state(self) -> nn.Module:
        return self.head

    def shortened(self, length: int) -> Self:
        if not self.draft_shape.is_chain:
            raise ConfigurationError(
                f"k: expected one number, since {type(self).__name__} drafts a {self.draft_shape}, got several; "
                "give one number, or let it draft a chain"
            )
        shorter = copy.copy(self)
        shorter.draft_shape = DraftShape.chain(length)
        return shorter

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        shape = self.draft_shape
        if isinstance(self.head, AutoregressiveHead) and shape.parents and not shape.is_chain:
            return NextTreeStep(self.head, shape.parents, bucket, kind=kind)
        return self.head.step(shape.num_draft_tokens, bucket, kind)

    def step_key(self, bucket: int) -> DraftKey:
        return DraftKey(type(self.head).__name__, self.draft_shape, bucket if self._has_cache else None)

    def cache_key(self) -> dict[str, object]:
        """Return the shapes of all tensors, and the source of the head's module, which may be a user's file."""
        module = inspect.getmodule(type(self.head))
        assert module is not None
        tensors = {name: [str(x.dtype), list(x.shape)] for name, x in self.head.state_dict().items()}
        source = hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
        return {"head": type(self.head).__name__, "tensors": tensors, "source": source}

    def bucket(self, rows: int) -> int:
        return self.decoder.bucket_for(rows + (self.draft_shape.depth if self._has_cache else 0))

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        finish(self.read_request(slot, prompt, features))

    def read_request(
        self, slot: int, prompt: Sequence[int], features: Tensor | None = None
    ) -> Generator[None, None, None]:
        """Prefill a prompt, unless it is longer than the head can follow: then the head never drafts for it.

        A head that reads features keeps the last one for the first commit, which has the token that it predicted.
        """
        if self.max_positions is not None and len(prompt) < self.max_positions:
            yield from self.read_in_chunks(slot, prompt[row_shift(self.head) :], features=features, shared=True)
        self._forget(slot)  # now, because rounds until now included commits of this slot

    def finish_request(self, slot: int) -> None:
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._deferred.pop(slot, None)
        for commit, finished in self._pending:
            if not finished:  # slots without a request: only their commits start at row 0
                finished.update(other for other, row in enumerate(commit.first_row.tolist()) if row == 0)
            finished.add(slot)
        self._pending[:] = [(commit, slots) for commit, slots in self._pending if len(slots) < len(commit.count)]

    @property
    def movable(self) -> bool:
        return True

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Move a request, after reading the commits that the head has not read yet."""
        self.catch_up()
        for pair in self.head.caches() if self.decoder.on_host else ():
            for cache in pair:
                cache[to, :, :rows] = cache[slot, :, :rows]
        if self._has_cache and not self.decoder.on_host:
            bucket = self.decoder.bucket_for(rows)
            key = GraphKey("move", bucket=bucket, variant=self.step_key(bucket).kind)
            self._graph(key, partial(MoveRowsStep, self.head), slot_numbers(slot, to))

    def update(self, commit: Commit) -> None:
        if self.max_positions is not None:
            self._pending.append((commit, set()))

    def defer_request(self, slot: int, prompt: Sequence[int]) -> bool:
        """Keep a prompt of at most one chunk, to be read without a pause."""
        if self.reads is not None or not self._has_cache or len(prompt) > self.decoder.options.chunks[-1]:
            return False
        self._forget(slot)
        self._deferred[slot] = (0, list(prompt), [])
        return True

    def catch_up(self) -> None:
        """Read what was committed while nothing was proposed, as far as the head can follow."""
        missed = self._deferred
        for commit, finished in self._pending:
            rows, counts, states = commit.tokens.tolist(), commit.count.tolist(), commit.states
            for slot, row in enumerate(commit.first_row.tolist()):
                if row and slot not in finished:
                    _, tokens, features = missed.setdefault(slot, (row, [], []))
                    tokens += rows[slot][: counts[slot]]
                    features += [] if states is None else [states[slot, : counts[slot]]]
        self._pending.clear()
        for slot, (row, tokens, features) in missed.items():
            if self.max_positions is not None and row + len(tokens) <= self.max_positions:
                read = torch.cat(features) if features else None
                self.read(slot, tokens, start=row - row_shift(self.head), features=read)
        missed.clear()

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        out = self._outputs(commit, sampling, limits)
        if self.draft_shape.dynamic:
            return Proposal(out[0], out[1])
        return Proposal(out[0], self.draft_shape.parents, out[1] if len(out) > 1 else None)

    def _outputs(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Sequence[Tensor]:
        del self._pending[-1:]  # the step reads it
        self.catch_up()
        inputs = [commit.tokens, commit.count, commit.first_row, sampling.params, sampling.seeds]
        if self.reads is not None:
            inputs.append(_features(commit.states, self))
        bucket, width = self.bucket(limits.max_rows), commit.tokens.shape[1]
        kind, batch = self.decoder.sampling_kind(sampling.kind), self.decoder.batch_for(limits.used_slots)
        key = GraphKey(
            "draft", width, bucket, commit_width=width, sampling=kind, draft=self.step_key(bucket), batch=batch
        )
        out = self._graph(key, lambda bucket: self.step(bucket, kind), [first_rows(x, batch) for x in inputs])
        return [for_all_slots(x, len(commit.count), 0 if x.is_floating_point() else PAD) for x in out]

    def read(self, slot: int, tokens: Sequence[int], *, start: int = 0, features: Tensor | None = None) -> None:
        finish(self.read_in_chunks(slot, tokens, start=start, features=features))

    def read_in_chunks(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        start: int = 0,
        features: Tensor | None = None,
        shared: bool = False,
    ) -> Generator[None, None, None]:
        """Read tokens of a text into the caches of a slot from row ``start`` on, with a pause after each chunk but the
        last.

        features [>= n, F], the states that predicted the tokens, for a head that reads them
        shared   they are the prompt of a request, whose rows do not change until it leaves the slot: a drafter may copy
                   them between slots whose requests have the same prompt
        """
        assert isinstance(self.head, CachedHead), "only those have caches"
        offset, chunks = 0, self.decoder.options.chunks
        while offset < len(tokens):
            remaining = len(tokens) - offset
            chunk = next((c for c in chunks if c >= remaining), chunks[-1])
            count = min(chunk, remaining)
            ids = [*tokens[offset : offset + count], *[0] * (chunk - count)]
            numbers = [torch.tensor([n], dtype=torch.int32) for n in (start + offset, count, slot)]
            inputs = [torch.tensor([ids], dtype=torch.int32), *numbers]
            if self.reads is not None:
                part = _features(features, self)[offset : offset + count]
                inputs.append(nn.functional.pad(part, (0, 0, 0, chunk - count)).unsqueeze(0))
            bucket = self.decoder.bucket_for(start + offset + chunk)
            key = GraphKey("read", chunk, bucket, variant=self.step_key(bucket).kind)
            self._graph(key, partial(ReadStep, self.head), inputs)
            offset += count
            if offset < len(tokens):
                yield

    def _graph(self, key: GraphKey, make: Callable[[int], nn.Module], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        shares_state = self.state is self.decoder.body  # then nothing in it belongs to another model
        step = self.decoder.graph(
            key,
            lambda _body, bucket: make(bucket),
            inputs,
            guest=None if shares_state else self.cache_key,
            owner=None if shares_state else self.state,
        )
        return step(*inputs)


def _features(features: Tensor | None, drafter: HeadDrafter) -> Tensor:
    if features is None:
        raise ConfigurationError(
            f"draft: expected a generator that passes the target's hidden states to {type(drafter).__name__}, got "
            "none; use it in a SpeculativeGenerator with the target it was loaded for"
        )
    return features
