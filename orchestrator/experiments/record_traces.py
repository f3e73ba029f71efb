"""The traces of an experiment: one for every target, sampling and prompt set, with all its drafters that need a model.

Each drafter is recorded as deep as the experiment asks for it. Lists are not: what-if puts them together.
Not here: how a drafter is recorded (`record.py`), and the file (`trace.py`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from paceline.core.acceptance.match import Match
from paceline.core.errors import ConfigurationError, PacelineError, TraceError
from paceline.draft_spec import parse_draft
from paceline.experiments.cells import Cell
from paceline.experiments.config import DrafterEntry, digest
from paceline.experiments.measure import Bench
from paceline.experiments.provenance import provenance
from paceline.experiments.record import Recorded, joined, prompted, record_drafter, recorded_drafter
from paceline.experiments.runner import ExperimentPlan, PlannedCell, Report
from paceline.experiments.store import CellResult, Store
from paceline.experiments.trace import RecordedDrafter, load_trace, save_trace
from paceline.experiments.whatif import RoundTimes
from paceline.registry import DRAFTERS
from paceline.target.verifier import CompiledVerifier

log = logging.getLogger("paceline")


def record_traces(plan: ExperimentPlan, store: Store, report: Report, *, deadline: float = math.inf) -> list[Path]:
    """Record what is not there yet, or cannot be read any more. -> the files, new and old

    deadline  of `time.monotonic`, behind which no recording begins

    Raises:
        StorageError: one cannot be written.
    """
    groups = dict(_groups(plan))
    files = []
    with Bench(plan.config) as bench:
        for number, (name, members) in enumerate(groups.items()):
            path = store.traces / f"{name}.trace"
            if not _readable(path):
                if monotonic() > deadline:
                    break
                report(f"recording {members[0].cell.title()}", number, len(groups))
                _record(path, members, bench, fingerprint=plan.fingerprints[members[0].cell.target.path])
            files.append(path)
    return files


def count(plan: ExperimentPlan) -> int:
    """How many traces an experiment has."""
    return len(dict(_groups(plan))) if plan.config.traces else 0


def _readable(path: Path) -> bool:
    try:
        load_trace(path)
    except TraceError:
        return False
    return True


def _groups(plan: ExperimentPlan) -> Iterator[tuple[str, list[PlannedCell]]]:
    """Cells that share a text, one for every drafter that is recorded, by the name of their file."""
    groups: dict[str, list[PlannedCell]] = {}
    for one in plan.cells:
        cell = replace(one.cell, batch_size=1, acceptor="match")
        name = f"{cell.target.label}, {cell.sampling.label}, {cell.prompts.label}".replace("/", "-")
        group = groups.setdefault(name, [])
        if cell.k is not None and not isinstance(cell.k, int):  # a ladder: as deep as it goes
            cell = replace(cell, k=8 if cell.k == "auto" else cell.k[-1])
        same = next((i for i, other in enumerate(group) if other.cell.drafter == cell.drafter), None)
        deeper = same is not None and _depth(cell) > _depth(group[same].cell)
        if same is None:
            group.append(replace(one, cell=cell))
        elif deeper:
            group[same] = replace(one, cell=cell)
    for name, group in groups.items():
        names = digest(json.dumps([one.cell.names() for one in group], default=str) + group[0].prompts.content)
        yield f"{name} {names[:8]}", group


def _depth(cell: Cell) -> int:
    return cell.k if isinstance(cell.k, int) else 0


def needs_recording(cell: Cell) -> bool:
    """Whether a drafter must be recorded: neither plain, nor a list, nor one that what-if can run again."""
    specs = parse_draft(cell.drafter.draft)
    return len(specs) == 1 and (specs[0].name is None or DRAFTERS[specs[0].name].given_as not in ("name", "list"))


def _record(path: Path, members: Sequence[PlannedCell], bench: Bench, *, fingerprint: str) -> None:
    drafters: list[RecordedDrafter] = []
    texts: list[Recorded] = []
    chosen = [one for one in members if needs_recording(one.cell)]
    if not chosen:  # the texts alone, for drafters that what-if runs again
        none = DrafterEntry(draft="none")
        chosen = [replace(members[0], cell=replace(members[0].cell, drafter=none, k=0))]
    for one in chosen:
        cell = one.cell
        try:
            rows = _recorded(one, bench)
        except PacelineError as error:
            log.warning("%s cannot be recorded: %s", cell.title(), error)
            continue
        if texts and [row.text for row in rows] != [row.text for row in texts]:
            log.warning("%s is left out of the trace: beside it the target wrote other texts", cell.title())
            continue
        texts = texts or rows
        generator = bench.generator(cell, one.prompts)
        if not cell.drafter.plain:
            prefixes = cell.drafter.vocabulary != "retokenize"
            draft = json.dumps(cell.drafter.draft)
            drafters.append(
                recorded_drafter(cell.drafter.label, generator.drafter, rows, draft=draft, prefixes=prefixes)
            )
    if not texts:
        raise ConfigurationError(f"no drafter of {members[0].cell.title()} could be recorded")
    target = bench.target(chosen[0].cell, chosen[0].prompts)
    about = {
        "target": members[0].cell.target.label,
        "fingerprint": fingerprint,
        "sampling": members[0].cell.sampling.model_dump(),
        "kv_buckets": target.kv_buckets,
        "vocab_size": target.config.vocab_size,
    }
    save_trace(path, joined(about, texts, drafters, source=provenance()))


def _recorded(one: PlannedCell, bench: Bench) -> list[Recorded]:
    cell, prompts = one.cell, one.prompts
    generator = bench.generator(cell, prompts)
    params = bench.params(cell, 0, len(prompts.rows))
    rows = prompted([(row.key, row.category, row.ids) for row in prompts.rows], params, generator.limits)
    drafter, target = generator.drafter, generator.target
    verifier = CompiledVerifier(target, drafter.draft_shape, rule=Match(), wide=False, reads=drafter.reads)
    with target.held_by(bench):
        return record_drafter(drafter, verifier, rows)


def round_times(results: Sequence[CellResult]) -> RoundTimes:
    """Seconds of a round of the batch, from finished cells with the rule ``match``."""
    rounds: dict[tuple[str, int, int], float] = {}
    prefill: list[float] = []
    for result in results:
        if result.error is not None or result.names["acceptor"] != "match" or result.totals["draft_lengths"]:
            continue
        groups: dict[int, int] = {}
        for row in result.rows:  # a group's rounds are those of its longest text
            groups[row["group"]] = max(groups.get(row["group"], 0), row["num_rounds"])
        depth = max((max(row["per_step_drafted"], default=0) for row in result.rows), default=0)
        k = result.names["k"] if isinstance(result.names["k"], int) else depth
        seconds = sum(float(result.totals[name]) for name in ("draft_seconds", "verify_seconds", "host_seconds"))
        if sum(groups.values()):
            key = (str(result.names["drafter"]), int(k), int(str(result.names["batch_size"])))
            rounds.setdefault(key, seconds / sum(groups.values()))
        prefill.append(float(result.totals["prefill_seconds"]) / max(1, len(result.rows)))
    return RoundTimes(rounds, sum(prefill) / len(prefill) if prefill else 0.0)
