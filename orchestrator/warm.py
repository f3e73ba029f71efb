"""Makes graphs ahead of their first use, by running each once on tokens that mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from paceline.batch import Batch
from paceline.core.types import Bounds, SamplingBatch
from paceline.decoder.decoder import CompiledDecoder
from paceline.loop import Engine
from paceline.result import Statistics


def up(engine: Engine, decoders: Sequence[CompiledDecoder]) -> None:
    """Make the prefill graphs of all decoders and the graphs of a round, with and without a proposal."""
    with ExitStack() as stack:
        for decoder in decoders:
            stack.enter_context(decoder.held_by(engine))
        batch = Batch(engine.slots, engine.width, Statistics())
        commit, sampling = batch.commit, batch.sampling
        longest = decoders[0].n_positions - 1
        for rows in sorted({min(chunk, longest) for decoder in decoders for chunk in decoder.options.chunks}):
            reading = engine.round.start(0, [0] * rows, SamplingBatch(sampling.knobs[:1], sampling.keys[:1]))
            if reading.features is not None:
                states = reading.features.new_zeros(*commit.tokens.shape, reading.features.shape[-1])
                commit = replace(commit, features=states)
        idle = batch.bounds(0, None, None)
        engine.round(commit, sampling, idle)
        if engine.depth:
            engine.round(commit, sampling, Bounds(idle.limit + engine.depth, 1))
