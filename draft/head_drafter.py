"""The base of drafters with a head (`paceline.draft.heads`), which is mathematics alone: what all of them repeat.

Not here: drafters that need only the text (`paceline.draft.base`).
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigurationError
from paceline.core.pending import PendingCommits
from paceline.core.reading import finish
from paceline.core.types import (
    PAD,
    Commit,
    DraftKey,
    DraftShape,
    Proposal,
    RoundLimits,
    SamplingKind,
    SamplingTensors,
)
from paceline.decoder.batch_buckets import first_slots, for_all_slots
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.steps import slot_numbers
from paceline.draft.heads import AutoregressiveHead, DraftHead, MoveRowsStep, ReadStep, row_shift

HeadSelf = TypeVar("HeadSelf", bound="HeadDrafter")


class HeadDrafter:
    """Drafts with a head, in a graph of its own or in the verifier's. A `paceline.core.protocols.TraceableDrafter`.

    Its graphs are compiled, kept and shipped with those of ``decoder``, the target (or the head's own decoder), whose
    slots, positions and number format it has. Trees and other steps: override `step`, `step_key` and `draft_shape`.

    Raises:
        ConfigurationError: ``k`` is negative, or more than a window of the target can verify.
    """

    def __init__(self, head: DraftHead, decoder: CompiledDecoder, k: int | DraftShape) -> None:
        self.draft_shape = k if isinstance(k, DraftShape) else DraftShape.chain(k)
        decoder.check_width(self.draft_shape.num_draft_tokens + 1)
        self.head, self.decoder = head.eval(), decoder
        self.reads = head.reads
        self._has_cache = bool(head.caches())
        self.max_positions: int | None = decoder.n_positions if self._has_cache else None
        self._pending = PendingCommits()

    @property
    def state(self) -> nn.Module:
        """See `paceline.core.protocols.TraceableDrafter`."""
        return self.head

    def shortened(self: HeadSelf, length: int) -> HeadSelf:
        """See `paceline.core.protocols.Shortens`; of chains.

        Raises:
            ConfigurationError: the drafts are trees.
        """
        if not self.draft_shape.is_chain:
            raise ConfigurationError(
                f"{type(self).__name__} drafts a {self.draft_shape} and has one depth only; give one number as k, or "
                "let it draft a chain"
            )
        shorter = copy.copy(self)
        shorter.draft_shape = DraftShape.chain(length)
        return shorter

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        """See `paceline.core.protocols.TraceableDrafter`."""
        return self.head.step(self.draft_shape.num_draft_tokens, bucket, kind)

    def step_key(self, bucket: int) -> DraftKey:
        """See `paceline.core.protocols.TraceableDrafter`."""
        return DraftKey(type(self.head).__name__, self.draft_shape, bucket if self._has_cache else None)

    def cache_key(self) -> dict[str, object]:
        """See `paceline.core.protocols.TraceableDrafter`: shapes of all tensors, and the source of the head's module,
        which may be a file of the user's own.
        """
        module = inspect.getmodule(type(self.head))
        assert module is not None, "a class has a module"
        tensors = {name: [str(x.dtype), list(x.shape)] for name, x in self.head.state_dict().items()}
        source = hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
        return {"head": type(self.head).__name__, "tensors": tensors, "source": source}

    def bucket(self, rows: int) -> int:
        """See `paceline.core.protocols.TraceableDrafter`."""
        return self.decoder.bucket_for(rows + (self.draft_shape.depth if self._has_cache else 0))

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """As `read_request`, without pauses."""
        finish(self.read_request(slot, prompt, features))

    def read_request(
        self, slot: int, prompt: Sequence[int], features: Tensor | None = None
    ) -> Generator[None, None, None]:
        """Read a prompt, unless it is longer than the head can follow: then nothing is ever asked of it.

        A head that reads features leaves the last one for the first commit, which brings the token it predicted.
        """
        if self.max_positions is not None and len(prompt) < self.max_positions:
            yield from self.read_in_chunks(slot, prompt[row_shift(self.head) :], features=features, shared=True)
        self._pending.forget(slot)  # now, for rounds that ran meanwhile had commits of this slot too

    def finish_request(self, slot: int) -> None:
        """The commits of a slot are of no interest any more; the next request overwrites the cache rows."""
        self._pending.forget(slot)

    @property
    def movable(self) -> bool:
        """See `paceline.core.protocols.MovesRequests`."""
        return True

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`. What the head has not read yet is read first."""
        self.catch_up()
        for pair in self.head.caches() if self.decoder.on_host else ():
            for cache in pair:
                cache[to, :, :rows] = cache[slot, :, :rows]
        if self._has_cache and not self.decoder.on_host:
            bucket = self.decoder.bucket_for(rows)
            key = GraphKey("move", bucket=bucket, variant=self.step_key(bucket).kind)
            self._graph(key, partial(MoveRowsStep, self.head), slot_numbers(slot, to))

    def update(self, commit: Commit) -> None:
        """Only kept: the step reads the last commit itself."""
        if self.max_positions is not None:
            self._pending.add(commit)

    def catch_up(self) -> None:
        """Read what was committed while nothing was proposed, as far as the head can follow."""
        if not self._pending.commits:
            return
        for missed in self._pending.take():
            if self.max_positions is not None and missed.first_row + len(missed.tokens) <= self.max_positions:
                start = missed.first_row - row_shift(self.head)
                self.read(missed.slot, missed.tokens, start=start, features=missed.features)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        """Draft outside of the verifier's graph; see `paceline.core.protocols.Drafter`."""
        out = self._outputs(commit, sampling, bounds)
        if self.draft_shape.dynamic:
            return Proposal(out[0], out[1])
        return Proposal(out[0], self.draft_shape.parents, out[1] if len(out) > 1 else None)

    def _outputs(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Sequence[Tensor]:
        """What the step gives for a round, in its own graph."""
        self._pending.drop_newest()  # the step reads it
        self.catch_up()
        inputs = [commit.tokens, commit.count, commit.first_row, sampling.params, sampling.seeds]
        if self.reads is not None:
            inputs.append(_features(commit.states, self))
        bucket, width = self.bucket(bounds.max_rows), commit.tokens.shape[1]
        kind, lines = self.decoder.sampling_kind(sampling.kind), self.decoder.lines_for(bounds.used_slots)
        key = GraphKey(
            "draft", width, bucket, commit_width=width, sampling=kind, draft=self.step_key(bucket), lines=lines
        )
        out = self._graph(key, lambda bucket: self.step(bucket, kind), [first_slots(x, lines) for x in inputs])
        slots = len(commit.count)
        return [for_all_slots(x, slots, 0 if x.is_floating_point() else PAD) for x in out]

    def read(self, slot: int, tokens: Sequence[int], *, start: int = 0, features: Tensor | None = None) -> None:
        """As `read_in_chunks`, without pauses."""
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
        shared   they are the prompt of a request, whose rows stay as they are until it leaves the slot: a drafter may
                 copy them from a slot, and to one, whose request has the same prompt
        """
        assert isinstance(self.head, AutoregressiveHead), "only those have caches"
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
        """Run a step of this drafter."""
        shares_state = self.state is self.decoder.body  # then nothing in it is another model's
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
            f"{type(drafter).__name__} reads the target's states, and there are none; use it in a SpeculativeGenerator "
            "with the target it was loaded for"
        )
    return features
