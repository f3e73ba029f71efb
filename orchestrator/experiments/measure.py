"""One cell of an experiment: its generator, over decoders that cells share, and the measurement of every prompt.

Prompts run in groups of the batch size. Every group also runs without speculation, alternating with the cell, so that a
noisy machine slows both, and the tokens are compared. Making graphs and a first group are not measured. A drafter that
learns from sequences is made again for every pass over the prompts; otherwise it would know the outputs. The order of
cells is in `runner.py`, their files in `store.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from paceline.auto import SamplingDecoder, load
from paceline.auto_drafter import load_draft_models
from paceline.config import SpeculativeConfig
from paceline.core.sampling import kind_of, row_seed
from paceline.decoder.options import LoadOptions
from paceline.draft_checks import prepared
from paceline.engine.request import SamplingParams
from paceline.experiments.config import Cell, ExperimentConfig, learns_from_texts, load_options, speculative_options
from paceline.experiments.definitions import FIGURES, Acceptance
from paceline.experiments.prompts import Prompt, Prompts
from paceline.experiments.store import Row
from paceline.generator import SpeculativeGenerator
from paceline.loadable import Loadable, loadable
from paceline.outputs import RequestOutput, Statistics

_BUCKET = 64  # positions are rounded up to a multiple of it, so that prompt sets of similar lengths share graphs


@dataclass(slots=True)
class Timed:
    """One run of one group: seconds until the last token, and until all first tokens."""

    outputs: list[list[RequestOutput]]
    seconds: float
    first_seconds: float
    statistics: Statistics

    def tokens(self, row: int) -> list[int]:
        return [token for output in self.outputs[row] for token in output.tokens]


class Bench(AbstractContextManager["Bench"]):
    """Decoders and generators of an experiment. Those of the last target stay loaded, with their draft models."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config
        self._target: tuple[Loadable, SamplingDecoder] | None = None
        self._generators: dict[str, SpeculativeGenerator] = {}
        self._drafts: dict[Loadable, SamplingDecoder] = {}

    def __exit__(self, *_: object) -> None:
        self._release()

    def measure(self, cell: Cell, prompts: Prompts) -> tuple[list[Row], dict[str, Any]]:
        """Run a cell, or raise PacelineError. -> a row for every prompt, and figures of the whole"""
        config, begin = self._config, perf_counter()
        generator = self.generator(cell, prompts)
        plain = self._plain(cell, prompts) if config.baseline and not cell.drafter.plain else None
        groups = [prompts.rows[i : i + cell.batch_size] for i in range(0, len(prompts.rows), cell.batch_size)]
        run_group(generator, groups[0], self.params(cell, 0, len(groups[0])))
        if plain is not None:
            run_group(plain, groups[0], self.params(cell, 0, len(groups[0])))
        ours: list[list[Timed]] = [[] for _ in groups]
        theirs: list[list[Timed]] = [[] for _ in groups]
        for _ in range(config.repeats):
            if learns_from_texts(cell.drafter):
                generator = self._anew(cell, prompts)
            for number, group in enumerate(groups):
                params = self.params(cell, number * cell.batch_size, len(group))
                ours[number].append(run_group(generator, group, params))
                if plain is not None:
                    theirs[number].append(run_group(plain, group, params))
        rows: list[Row] = []
        for number, group in enumerate(groups):
            rows += _rows(group, ours[number], theirs[number], number=number)
        times = [(_median(o), _median(t) if t else 0.0) for o, t in zip(ours, theirs, strict=True)]
        counted = [runs[0].statistics for runs in ours]
        return rows, _totals(rows, times, counted, wall=perf_counter() - begin)

    def params(self, cell: Cell, first: int, count: int) -> SamplingParams:
        """How the prompts from ``first`` on are sampled: a prompt's seed does not depend on the batch size."""
        config = self._config
        return SamplingParams.asked(
            {
                **cell.sampling.keys,
                "max_new_tokens": config.max_new_tokens,
                "seed": [row_seed(config.seed, first + row) for row in range(count)],
                "eos_token_id": [] if config.ignore_eos else None,
            }
        )

    def generator(self, cell: Cell, prompts: Prompts) -> SpeculativeGenerator:
        config = SpeculativeConfig(**speculative_options(self._config, cell))
        prepared(config, self._found(cell, prompts))  # errors are raised before the target is loaded
        target, which = self.target(cell, prompts), self._name(cell)
        if which not in self._generators:
            config = load_draft_models(config, target, self._draft)
            generator = SpeculativeGenerator(target=target, **dict(config))
            sampling = SamplingParams.asked(cell.sampling.keys).sampling_of(0)
            generator.compile(kinds=(kind_of(sampling.temperature, sampling.top_k),))
            self._generators[which] = generator
        return self._generators[which]

    def _anew(self, cell: Cell, prompts: Prompts) -> SpeculativeGenerator:
        """The same, whose drafter has not seen a text yet."""
        self._generators.pop(self._name(cell), None)
        return self.generator(cell, prompts)

    def _name(self, cell: Cell) -> str:
        options = speculative_options(self._config, cell)
        return repr((sorted(options.items(), key=lambda item: item[0]), cell.sampling.temperature > 0))

    def target(self, cell: Cell, prompts: Prompts) -> SamplingDecoder:
        """The cell's target, loaded for its batch size and for texts as long as its prompts need."""
        found = self._found(cell, prompts)
        if self._target is None or self._target[0] != found:
            self._release()
            self._target = (found, load(found))
        return self._target[1]

    def _found(self, cell: Cell, prompts: Prompts) -> Loadable:
        """The cell's target. Cells that agree in its options share a decoder."""
        config, longest = self._config, max(len(row.ids) for row in prompts.rows)
        given = load_options(config, cell.target)
        room = LoadOptions(**given).longest(-(-(longest + config.max_new_tokens) // _BUCKET) * _BUCKET)
        usual = {"n_positions": room, "context_length_estimate": min(room, -(-longest // _BUCKET) * _BUCKET)}
        return loadable(cell.target.path, LoadOptions(**{**usual, **given, "batch_size": cell.batch_size}))

    def _plain(self, cell: Cell, prompts: Prompts) -> SpeculativeGenerator:
        none = cell.drafter.model_copy(update={"draft": "none"})
        alone = Cell(cell.target, none, None, cell.sampling, "match", cell.batch_size, cell.prompts)
        return self.generator(alone, prompts)

    def _draft(self, found: Loadable) -> SamplingDecoder:
        if found not in self._drafts:
            self._drafts[found] = load(found)
        return self._drafts[found]

    def _release(self) -> None:
        self._generators.clear()
        for decoder in (*self._drafts.values(), *([self._target[1]] if self._target else [])):
            decoder.close()
        self._drafts.clear()
        self._target = None


def run_group(generator: SpeculativeGenerator, group: Sequence[Prompt], params: SamplingParams) -> Timed:
    """Generate for some prompts at the same time, and time it."""
    outputs: list[list[RequestOutput]] = [[] for _ in group]
    begin = first = perf_counter()
    for output in generator.stream([list(prompt.ids) for prompt in group], params=params):
        if not outputs[output.index]:
            first = perf_counter()
        outputs[output.index].append(output)
    return Timed(outputs, perf_counter() - begin, first - begin, generator.statistics)


def _median(runs: Sequence[Timed]) -> float:
    return statistics.median(run.seconds for run in runs)


def _rows(group: Sequence[Prompt], ours: list[Timed], theirs: list[Timed], *, number: int) -> list[Row]:
    """A row for every prompt of a group. Times are those of the group."""
    rows = []
    for index, prompt in enumerate(group):
        run = ours[0]
        figures = Acceptance.of(run.outputs[index])
        tokens = run.tokens(index)
        rows.append(
            {
                "prompt": prompt.key,
                "category": prompt.category,
                "group": number,
                "prompt_tokens": len(prompt.ids),
                "finish_reason": run.outputs[index][-1].finish_reason,
                **{name: getattr(figures, name) for name in (*FIGURES, "num_draft_tokens", "num_accepted_tokens")},
                "per_step_drafted": [draft.drafted for draft in figures.drafts],
                "per_step_accepted": [draft.accepted for draft in figures.drafts],
                "tokens": tokens,
                "seconds": _median(ours),
                "first_token_seconds": statistics.median(one.first_seconds for one in ours),
                "prefill_seconds": statistics.median(one.statistics.prefill_seconds for one in ours),
                "round_seconds": statistics.median(
                    one.statistics.draft_seconds + one.statistics.verify_seconds for one in ours
                ),
                "group_rounds": run.statistics.num_rounds,
                "plain_seconds": _median(theirs) if theirs else None,
                "plain_prefill_seconds": statistics.median(one.statistics.prefill_seconds for one in theirs)
                if theirs
                else None,
                "same_tokens_as_plain": theirs[0].tokens(index) == tokens if theirs else None,
                "repeatable": all(one.tokens(index) == tokens for one in ours[1:]),
            }
        )
    return rows


def _totals(
    rows: Sequence[Row], times: Sequence[tuple[float, float]], counted: Sequence[Statistics], *, wall: float
) -> dict[str, Any]:
    """Seconds of a round are means over the rounds of the batch."""
    tokens, seconds = sum(row["new_tokens"] for row in rows), sum(ours for ours, _ in times)
    plain = sum(theirs for _, theirs in times)
    totals: dict[str, Any] = {
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "plain_tokens_per_second": tokens / plain if plain else None,
        "speedup": plain / seconds if plain else None,
        "wall_seconds": wall,
        "lossless": all(one.lossless for one in counted),
        "acceptor": counted[0].acceptor,
        "draft_lengths": [length for one in counted for length in one.draft_lengths],
    }
    for name in ("prefill_seconds", "draft_seconds", "verify_seconds", "host_seconds"):
        totals[name] = sum(getattr(one, name) for one in counted)
    return totals
