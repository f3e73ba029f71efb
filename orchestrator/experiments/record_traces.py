"""The traces of an experiment: one for every target, sampling and prompt set, with all its drafters that need a model.

Each drafter is recorded as deep as the experiment asks for it. Lists are not: what-if puts them together.
Not here: how a drafter is recorded (`record.py`), and the file (`trace.py`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from paceline.core.acceptance.match import Match
from paceline.core.errors import ConfigurationError, PacelineError, TraceError
from paceline.draft_spec import parse_draft
from paceline.experiments.cells import Cell, cell_key, model_paths
from paceline.experiments.config import DrafterEntry
from paceline.experiments.measure import Bench
from paceline.experiments.provenance import provenance
from paceline.experiments.record import Recorded, joined, prompted, record_along, record_drafter, recorded_drafter
from paceline.experiments.runner import ExperimentPlan, PlannedCell, Report
from paceline.experiments.store import Store
from paceline.experiments.trace import RecordedDrafter, Trace, TraceText, load_trace, save_trace
from paceline.registry import DRAFTERS
from paceline.target.verifier import CompiledVerifier

log = logging.getLogger("paceline")


def record_traces(plan: ExperimentPlan, store: Store, report: Report, *, deadline: float = math.inf) -> list[Path]:
    """Record what is not there yet, or cannot be read any more. -> the files that are complete, new and old

    A file is written after every drafter, so that a run that is stopped loses one. Drafters whose files or options are
    others by now are recorded again, alone; texts and the other drafters stay.

    deadline  of `time.monotonic`, behind which no recording begins

    Raises:
        StorageError: one cannot be written.
    """
    groups = dict(_groups(plan))
    files = []
    with Bench(plan.config) as bench:
        for number, (name, members) in enumerate(groups.items()):
            group = _Group(members, bench, store.traces / f"{name}.trace")

            def tell(label: str, done: int = number) -> None:
                report(label, done, len(groups))

            if group.complete(tell, fingerprint=plan.fingerprints[members[0].cell.target.path], deadline=deadline):
                files.append(group.path)
    return files


def count(plan: ExperimentPlan) -> int:
    """How many traces an experiment has."""
    return len(dict(_groups(plan))) if plan.config.traces else 0


def _groups(plan: ExperimentPlan) -> Iterator[tuple[str, list[PlannedCell]]]:
    """Cells that share a text, one for every drafter that is recorded, by the name of their file.

    The name goes by what decides the texts: the target's files, the sampling, the prompts and the options. Texts are
    decoded as many at a time as the largest batch of the experiment.
    """
    size = max(plan.config.batch_sizes)
    groups: dict[str, list[PlannedCell]] = {}
    for one in plan.cells:
        cell = replace(one.cell, batch_size=size, acceptor="match")
        name = f"{cell.target.label}, {cell.sampling.label}, {cell.prompts.label}".replace("/", "-")
        group = groups.setdefault(name, [])
        if cell.k is not None and not isinstance(cell.k, int):  # a ladder: as deep as it goes
            cell = replace(cell, k=8 if cell.k == "auto" else cell.k[-1])
        same = next((i for i, other in enumerate(group) if other.cell.drafter == cell.drafter), None)
        deeper = same is not None and _depth(cell) > _depth(group[same].cell)
        if same is None:
            group.append(_keyed(one, cell, plan))
        elif deeper:
            group[same] = _keyed(one, cell, plan)
    for name, group in groups.items():
        plain = replace(group[0].cell, drafter=DrafterEntry(draft="none"), k=None)
        yield f"{name} {_keyed(group[0], plain, plan).key[:8]}", group


def _keyed(one: PlannedCell, cell: Cell, plan: ExperimentPlan) -> PlannedCell:
    """A planned cell that is another one now. What is about times alone is no part of its key."""
    config = plan.config.model_copy(update={"repeats": 1, "baseline": True})
    models = tuple(plan.fingerprints[path] for path in model_paths(cell))
    return replace(one, cell=cell, key=cell_key(cell, config, prompts=one.prompts.content, models=models))


def _depth(cell: Cell) -> int:
    return cell.k if isinstance(cell.k, int) else 0


def needs_recording(cell: Cell) -> bool:
    """Whether a drafter must be recorded: neither plain, nor a list, nor one that what-if can run again."""
    specs = parse_draft(cell.drafter.draft)
    return len(specs) == 1 and (specs[0].name is None or DRAFTERS[specs[0].name].given_as not in ("name", "list"))


class _Group:
    """One file, and the cells whose drafters belong into it."""

    def __init__(self, members: Sequence[PlannedCell], bench: Bench, path: Path) -> None:
        self._members, self._bench, self.path = members, bench, path
        self._chosen = [one for one in members if needs_recording(one.cell)]
        # where none can be recorded, the texts alone are, for drafters that what-if runs again
        self._plain = replace(members[0], cell=replace(members[0].cell, drafter=DrafterEntry(draft="none"), k=None))

    def complete(self, report: Callable[[str], None], *, fingerprint: str, deadline: float) -> bool:
        """Record what is missing. -> whether nothing is left for another time

        Raises:
            ConfigurationError: not even the target's texts could be recorded.
            StorageError: the file cannot be written.
        """
        kept = self._kept()
        known = {one.key: one for one in kept.drafters} if kept is not None else {}
        texts: Sequence[TraceText] = kept.texts if kept is not None else ()
        left = [one for one in self._chosen if one.key not in known]
        for one in (*left, self._plain):
            if texts and one.cell.drafter.plain:
                continue
            if monotonic() > deadline:
                return False
            report(f"recording {one.cell.title()}")
            try:
                rows = self._recorded(one, texts)
            except PacelineError as error:
                log.warning("%s cannot be recorded: %s", one.cell.title(), error)
                continue
            if texts and [row.text for row in rows] != list(texts):
                log.warning("%s is left out of the trace: beside it the target wrote other texts", one.cell.title())
                continue
            texts = texts or [row.text for row in rows]
            if not one.cell.drafter.plain:
                known[one.key] = self._drafter(one, rows)
            about = self._about(one, fingerprint)
            save_trace(self.path, joined(about, texts, self._wanted(known), source=provenance()))
        if not texts:
            raise ConfigurationError(f"no text of {self._members[0].cell.target.label} could be recorded")
        if kept is not None and not left and kept.drafters != tuple(wanted := self._wanted(known)):
            save_trace(self.path, replace(kept, drafters=tuple(wanted)))  # some are not in the experiment any more
        return True

    def _wanted(self, known: Mapping[str, RecordedDrafter]) -> list[RecordedDrafter]:
        """Those of the experiment alone, in its order, by the names that it has for them now."""
        members = [one for one in self._members if one.key in known]
        return [replace(known[one.key], name=one.cell.drafter.label) for one in members]

    def _kept(self) -> Trace | None:
        try:
            return load_trace(self.path)
        except TraceError:
            return None

    def _recorded(self, one: PlannedCell, texts: Sequence[TraceText]) -> list[Recorded]:
        cell, prompts = one.cell, one.prompts
        generator = self._bench.generator(cell, prompts)
        params = self._bench.params(cell, 0, len(prompts.rows))
        rows = prompted([(row.key, row.category, row.ids) for row in prompts.rows], params, generator.limits)
        drafter, target = generator.drafter, generator.target
        with target.held_by(self._bench):
            if texts and drafter.reads is None:
                return record_along(drafter, target, rows, texts=texts)
            verifier = CompiledVerifier(target, drafter.draft_shape, rule=Match(), wide=False, reads=drafter.reads)
            return record_drafter(drafter, verifier, rows)

    def _drafter(self, one: PlannedCell, rows: Sequence[Recorded]) -> RecordedDrafter:
        entry, drafter = one.cell.drafter, self._bench.generator(one.cell, one.prompts).drafter
        prefixes, draft = entry.vocabulary != "retokenize", json.dumps(entry.draft)
        return recorded_drafter(entry.label, drafter, rows, draft=draft, prefixes=prefixes, key=one.key)

    def _about(self, one: PlannedCell, fingerprint: str) -> dict[str, Any]:
        target = self._bench.target(one.cell, one.prompts)
        return {
            "target": one.cell.target.label,
            "fingerprint": fingerprint,
            "sampling": one.cell.sampling.model_dump(),
            "kv_buckets": target.kv_buckets,
            "vocab_size": target.config.vocab_size,
        }
