"""Makes graphs ahead of their first use, by running each once on tokens that mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from paceline.adaptive import Adaptive
from paceline.batch import Batch
from paceline.core.types import Bounds, Kept, SamplingBatch
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder
from paceline.loop import Engine
from paceline.result import Statistics


def up(engine: Engine, decoders: Sequence[CompiledDecoder]) -> None:
    """Make the prefill graphs of all decoders and the graphs of a round, with and without a proposal."""
    with ExitStack() as stack:
        for decoder in decoders:
            stack.enter_context(decoder.held_by(engine))
        for decoder in decoders[1:]:
            for chunk in decoder.options.chunks:
                steps.prefill(decoder, 0, [0] * min(chunk, decoder.n_positions - 1))
        batch = Batch(engine.slots, engine.width, Statistics())
        commit, idle = batch.commit, batch.bounds(0, None)
        sampling = SamplingBatch(batch.sampling.knobs[:1], batch.sampling.keys[:1])
        for chunk in decoders[0].options.chunks:
            # Through the round, which knows what the drafter reads of the target.
            seen = engine.round.start(0, [0] * min(chunk, decoders[0].n_positions - 1), sampling).features
            if seen is not None:
                commit = replace(commit, features=seen.new_zeros(engine.slots, engine.width, seen.shape[-1]))
            engine.round.release(0)
        rounds = engine.round.rungs.values() if isinstance(engine.round, Adaptive) else [engine.round]
        for one in rounds:
            one(commit, batch.sampling, idle)
            if engine.depth:
                full = Bounds(idle.limit + engine.depth, 1)
                made = one(commit, batch.sampling, full)
                if isinstance(made.features, Kept):  # the next round has another graph, which reads them there
                    one(replace(commit, features=made.features), batch.sampling, full)
