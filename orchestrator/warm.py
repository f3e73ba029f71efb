"""Makes graphs ahead of their first use, by running each once on tokens that mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from paceline.batch import Batch
from paceline.core.types import Bounds
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder
from paceline.loop import Engine
from paceline.result import Statistics


def up(engine: Engine, decoders: Sequence[CompiledDecoder]) -> None:
    """Make the prefill graphs of all decoders and the graphs of a round, with and without a proposal."""
    with ExitStack() as stack:
        for decoder in decoders:
            stack.enter_context(decoder.held_by(engine))
        for decoder in decoders:
            for chunk in decoder.options.chunks:
                steps.prefill(decoder, 0, [0] * min(chunk, decoder.n_positions - 1))
        batch = Batch(engine.slots, engine.width, Statistics())
        idle = batch.bounds(0, None, None)
        engine.round(batch.commit, batch.sampling, idle)
        if engine.depth:
            engine.round(batch.commit, batch.sampling, Bounds(idle.limit + engine.depth, 1))
