"""Makes graphs ahead of their first use, by running each once on tokens that mean nothing.

A backend that wants all graphs before it runs one (`paceline.decoder.backends.base.PreparesGraphs`) gets them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import torch

from paceline.core.protocols import Round, finish, movable, move_request
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
from paceline.engine.adaptive import AdaptiveRound, fitted
from paceline.engine.batch import Batch, RoundShape
from paceline.engine.engine import Engine
from paceline.engine.rounds import MixedRound, TwoGraphRound
from paceline.outputs import Statistics
from paceline.target.host_verifier import HostVerifier
from paceline.target.verifier import CompiledVerifier


def compile_graphs(
    engine: Engine,
    decoders: Sequence[CompiledDecoder],
    *,
    kinds: Sequence[SamplingKind] = COMPILED_KINDS,
) -> None:
    """Make the prefill graphs of all decoders, and those of a round with a proposal and without, in all buckets.

    decoders  the target first
    kinds     of sampling that rounds get graphs for
    """
    rounds, shape, target, holder = engine.rounds, engine.shape, decoders[0], object()
    slots, width = len(engine.slots), shape.width
    with ExitStack() as stack:
        for decoder in decoders:
            stack.enter_context(decoder.held_by(holder))
            stack.enter_context(backends.prepare(decoder.backend))
        for decoder in decoders[1:]:
            for start, size in gaps(decoder):
                steps.prefill(decoder, 0, [0] * size, start=start, chunks=decoder.options.draft_chunks)
        batch = Batch([None] * slots, replace(shape, max_accept=0), Statistics())
        commit = batch.commit
        sampling = SamplingTensors(batch.sampling.params[:1], batch.sampling.seeds[:1], batch.sampling.kind)
        for start, size in chunks(target):
            # Through the round, which knows what the drafter reads of the target.
            features = finish(rounds.start(0, [0] * (start + size), sampling)).features
            if features is not None:
                commit = replace(commit, features=features.new_zeros(slots, width, features.shape[-1]))
            rounds.finish_request(0)
        if engine.kept is not None and not target.on_host:
            for rows in target.kv_buckets:
                steps.reorder_slots(target, torch.arange(slots, dtype=torch.int32), rows=rows)
        if len(target.batch_buckets) > 1 and engine.kept is None and movable(rounds):
            for rows in target.kv_buckets:
                move_request([rounds], slots - 1, 0, rows=rows)
            rounds.finish_request(0)
        for one, own_width, limits in _rounds(rounds, shape):
            own = commit if own_width == width else fitted(commit, own_width)[1]
            for used, kind, rows in product(fills(decoders), distinct_kinds(decoders, kinds), lengths(target)):
                asked, most = replace(batch.sampling, kind=kind), RoundLimits(own.count, rows, used_slots=used)
                _run(one, own, sampling=asked, most=most, limits=limits)
        if isinstance(rounds, MixedRound) and not backends.compiles(target.backend):
            # Graphs that few requests need are made too where that takes no time: then no text waits for another's.
            for used, rows in product(fills(decoders), lengths(target)):
                full = RoundLimits(torch.full_like(commit.count, shape.max_accept), rows, used_slots=used)
                for seldom in (rounds.on_host(), rounds.predicted()):
                    if seldom is not None:
                        _run_seldom(seldom, commit, sampling=batch.sampling, full=full)
            for draft, rows in product(decoders[1:], (1, width)):  # what a draft model makes of processed logits
                for bucket in draft.kv_buckets:
                    steps.window(draft, torch.zeros(slots, rows, dtype=torch.int32), commit.count, bucket=bucket)


def distinct_kinds(
    decoders: Sequence[CompiledDecoder], kinds: Sequence[SamplingKind] = COMPILED_KINDS
) -> list[SamplingKind]:
    """Those that have graphs of their own on some of the decoders."""
    return list({tuple(one.sampling_kind(kind) for one in decoders): kind for kind in kinds}.values())


def fills(decoders: Sequence[CompiledDecoder]) -> list[int]:
    """Numbers of slots that have graphs of their own on some of the decoders, the whole batch first."""
    return sorted({lines for one in decoders for lines in one.batch_buckets}, reverse=True)


def _rounds(known: Round, shape: RoundShape) -> Iterator[tuple[Round, int, list[int]]]:
    """Every round, the width of its commits, and limits that lead to all of its graphs."""
    if isinstance(known, MixedRound):
        known = known.fast
    if not isinstance(known, AdaptiveRound):
        yield known, shape.width, [0, shape.max_accept]
        return
    lowest = min(known.stages)  # of all stages, the one that is taken where nothing can be accepted
    for depth, stage in known.stages.items():
        yield stage.round, stage.width, [depth] if depth != lowest else [0, depth] if depth else [0]
    if known.rest is not None:
        yield known.rest.round, known.rest.width, [shape.max_accept]


def _run(one: Round, commit: Commit, *, sampling: SamplingTensors, most: RoundLimits, limits: list[int]) -> None:
    """A round over texts of that length, in slots as ``most`` says."""
    for limit in limits:
        full = replace(most, max_accept=torch.full_like(commit.count, limit))
        result = one(commit, sampling, full)
        features = result.commit.features
        if isinstance(features, DeviceFeatures):  # the next round has another graph, which reads them there
            one(replace(commit, features=features), sampling, full)
        if limit and isinstance(one, TwoGraphRound):
            _lengthen(one, commit, sampling=sampling, bounds=full, drafted=max(result.reports[-1].drafted))


def _run_seldom(one: Round, commit: Commit, *, sampling: SamplingTensors, full: RoundLimits) -> None:
    """A round that few requests need: what drafts in it, and the verifier with a proposal and without."""
    one(commit, sampling, full)
    assert isinstance(one, TwoGraphRound) and isinstance(one.verifier, HostVerifier | CompiledVerifier)
    shape = one.verifier.draft_shape
    tokens = torch.zeros(len(commit.tokens), shape.num_draft_tokens, dtype=torch.int32)
    below = torch.arange(-1, shape.num_draft_tokens - 1, dtype=torch.int32).expand_as(tokens)
    for proposal in (None, Proposal(tokens, below if shape.dynamic else shape.parents)):
        one.verifier(commit, proposal, sampling, full)


def _lengthen(
    one: TwoGraphRound, commit: Commit, *, sampling: SamplingTensors, bounds: RoundLimits, drafted: int
) -> None:
    """Verify proposals as long as those that a drafter will make, and has not ``drafted`` after made-up tokens."""
    reach = one.drafter.max_positions
    if not isinstance(one.verifier, CompiledVerifier) or (reach is not None and bounds.max_rows > reach):
        return
    for draft_shape in one.verifier.draft_shapes:
        if draft_shape.is_chain and draft_shape.num_draft_tokens not in (0, drafted):
            made_up = torch.zeros(len(commit.tokens), draft_shape.num_draft_tokens, dtype=torch.int32)
            one.verifier(commit, Proposal(made_up), sampling, bounds)


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
    """Of texts in every bucket: the shortest, and one so long that a draft is already in its next bucket."""
    before = 0
    for reach in decoder.kv_buckets:
        yield before + 1
        if reach - 1 > before + 1:
            yield reach - 1
        before = reach
