"""Make graphs before their first use, by running each once on arbitrary tokens.

A backend that needs all graphs before it runs one (`Backend.prepare`) gets them from this
module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import torch

from paceline.core.protocols import Verifier, finish
from paceline.core.sampling import COMPILED_KINDS
from paceline.core.types import (
    Commit,
    DeviceFeatures,
    Proposal,
    RoundLimits,
    SamplingKind,
    SamplingTensors,
)
from paceline.decoder import steps
from paceline.decoder.backends import base as backends
from paceline.decoder.decoder import CompiledDecoder
from paceline.engine.batch import Batch, RoundShape
from paceline.engine.engine import Engine
from paceline.engine.rounds import RoundPlan, Rounds, fitted
from paceline.outputs import Statistics
from paceline.target.host_verifier import HostVerifier
from paceline.target.verifier import CompiledVerifier


def compile_graphs(
    engine: Engine,
    decoders: Sequence[CompiledDecoder],
    *,
    kinds: Sequence[SamplingKind] = COMPILED_KINDS,
) -> None:
    """Make the prefill graphs of all decoders, and those of rounds with and without a proposal, in all buckets.

    decoders  the target first
    kinds     sampling modes that rounds get graphs for
    """
    rounds, shape, target, holder = engine.rounds, engine.shape, decoders[0], object()
    slots, width = len(engine.slots), shape.width
    with ExitStack() as stack:
        for decoder in decoders:
            stack.enter_context(decoder.held_by(holder))
            stack.enter_context(decoder.backend.prepare())
        for decoder in decoders[1:]:
            for start, size in gaps(decoder):
                steps.prefill(decoder, 0, [0] * size, start=start, chunks=decoder.options.draft_chunks)
        batch = Batch([None] * slots, replace(shape, max_accept=0), Statistics())
        commit = batch.commit
        sampling = SamplingTensors(batch.sampling.params[:1], batch.sampling.seeds[:1], batch.sampling.kind)
        for start, size in chunks(target):
            # Called on the round, which knows the hidden states that the drafter reads.
            features = finish(rounds.start(0, [0] * (start + size), sampling)).features
            if features is not None:
                commit = replace(commit, features=features.new_zeros(slots, width, features.shape[-1]))
            rounds.finish_request(0)
        if engine.kept is not None and not target.on_host:
            for rows in target.kv_buckets:
                steps.reorder_slots(target, torch.arange(slots, dtype=torch.int32), rows=rows)
        if len(target.batch_buckets) > 1 and engine.kept is None and rounds.movable:
            for rows in target.kv_buckets:
                rounds.move_request(slots - 1, 0, rows)
            rounds.finish_request(0)
        for plan, lengths_of in _plans(rounds, shape):
            own = fitted(commit, plan.width)[1]
            for used, kind, rows in product(fills(decoders), distinct_kinds(decoders, kinds), lengths(target)):
                for length in lengths_of:
                    most = RoundLimits([length] * slots, rows, used_slots=used)
                    _run(rounds, plan, own, sampling=replace(batch.sampling, kind=kind), limits=most)
        if not backends.compiles(target.backend):
            # Graphs that few requests need are made too if that takes no time: then no request waits for another's.
            reads = rounds.drafter.reads
            for start, size in chunks(target):
                finish(steps.prefill_in_chunks(target, 0, [0] * size, start=start, reads=reads, each=_unread))
            for used, rows in product(fills(decoders), lengths(target)):
                most = RoundLimits([shape.max_accept] * slots, rows, used_slots=used)
                for seldom in (rounds.on_host, rounds.predicted):
                    if seldom is not None:
                        rounds(commit, batch.sampling, most, plan=seldom())
                        _verify_both(seldom().verifier, commit, sampling=batch.sampling, limits=most)
            for draft, rows in product(decoders[1:], (1, width)):  # a draft model's choice from processed logits
                for bucket in draft.kv_buckets:
                    steps.window(draft, torch.zeros(slots, rows, dtype=torch.int32), commit.count, bucket=bucket)


def _unread(_logits: torch.Tensor) -> None:
    """Drop logits."""


def distinct_kinds(
    decoders: Sequence[CompiledDecoder], kinds: Sequence[SamplingKind] = COMPILED_KINDS
) -> list[SamplingKind]:
    """Return the sampling modes for which some decoder compiles a separate graph."""
    return list({tuple(one.sampling_kind(kind) for one in decoders): kind for kind in kinds}.values())


def fills(decoders: Sequence[CompiledDecoder]) -> list[int]:
    """Return the numbers of slots for which some decoder compiles a separate graph, the whole batch first."""
    return sorted({lines for one in decoders for lines in one.batch_buckets}, reverse=True)


def _plans(rounds: Rounds, shape: RoundShape) -> Iterator[tuple[RoundPlan, list[int]]]:
    """Yield every plan, and limits that lead to all of its graphs."""
    lowest = min(rounds.plans)  # the length that is chosen when nothing can be accepted
    for length, plan in rounds.plans.items():
        yield plan, [length] if length != lowest else [0, length] if length else [0]
    if rounds.rest is not None:
        yield rounds.rest, [shape.max_accept]


def _run(rounds: Rounds, plan: RoundPlan, commit: Commit, *, sampling: SamplingTensors, limits: RoundLimits) -> None:
    """Run a round over sequences of that length, in the slots of the limits."""
    result = rounds(commit, sampling, limits, plan=plan)
    features = result.commit.features
    if isinstance(features, DeviceFeatures):  # the next round has another graph, which reads them on the device
        rounds(replace(commit, features=features), sampling, limits, plan=plan)
    if any(limits.max_accept) and plan.drafts and not plan.fused:
        _lengthen(plan, commit, sampling=sampling, limits=limits, drafted=max(result.reports[-1].drafted))


def _verify_both(verifier: Verifier, commit: Commit, *, sampling: SamplingTensors, limits: RoundLimits) -> None:
    assert isinstance(verifier, HostVerifier | CompiledVerifier)
    shape = verifier.draft_shape
    tokens = torch.zeros(len(commit.tokens), shape.num_draft_tokens, dtype=torch.int32)
    below = torch.arange(-1, shape.num_draft_tokens - 1, dtype=torch.int32).expand_as(tokens)
    for proposal in (None, Proposal(tokens, below if shape.dynamic else shape.parents)):
        verifier(commit, proposal, sampling, limits)


def _lengthen(plan: RoundPlan, commit: Commit, *, sampling: SamplingTensors, limits: RoundLimits, drafted: int) -> None:
    """Verify proposals of the lengths that a drafter will make, and has not ``drafted`` after made-up tokens."""
    reach = plan.drafter.max_positions
    if not isinstance(plan.verifier, CompiledVerifier) or (reach is not None and limits.max_rows > reach):
        return
    for draft_shape in plan.verifier.draft_shapes:
        if draft_shape.is_chain and draft_shape.num_draft_tokens not in (0, drafted):
            made_up = torch.zeros(len(commit.tokens), draft_shape.num_draft_tokens, dtype=torch.int32)
            plan.verifier(commit, Proposal(made_up), sampling, limits)


def chunks(decoder: CompiledDecoder) -> Iterator[tuple[int, int]]:
    """First row and size of a chunk of a prompt, for every chunk size and every bucket it can end in."""
    sizes, seen = decoder.options.chunks, set()
    for start in range(0, decoder.n_positions - 1, sizes[-1]):
        for chunk in sizes:
            graph = (chunk, decoder.bucket_for(start + chunk))
            if graph not in seen:
                seen.add(graph)
                yield start, min(chunk, decoder.n_positions - 1 - start)


def gaps(draft: CompiledDecoder) -> Iterator[tuple[int, int]]:
    """The same of a draft, which reads what it missed from any row on."""
    for reach in draft.kv_buckets:
        for chunk in draft.options.draft_chunks:
            if chunk <= reach:
                yield reach - chunk, chunk


def lengths(decoder: CompiledDecoder) -> Iterator[int]:
    """Yield sequence lengths for every bucket: the shortest, and one whose draft is already in its next bucket."""
    before = 0
    for reach in decoder.kv_buckets:
        yield before + 1
        if reach - 1 > before + 1:
            yield reach - 1
        before = reach
