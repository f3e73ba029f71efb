"""The traces of an experiment: one for every target, sampling and prompt set, with all its drafters that need a model.

The engine decodes with a drafter that asks another one at every position and proposes nothing. Once the sequences are
known, a drafter that reads only tokens proposes along them without the target. Each drafter is recorded at the largest
depth in the experiment. Cheap drafters that need only tokens (n-grams, suffixes) are not recorded, because what-if runs
them again; nor are lists, which what-if combines. The file is in `trace.py`; `replay.py` reads it.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from paceline.core.acceptance.match import Match
from paceline.core.errors import ConfigurationError, PacelineError, TraceError
from paceline.core.protocols import Drafter, Verifier
from paceline.core.types import PAD, Commit, Proposal, RoundLimits, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.model import ModelDrafter
from paceline.draft_spec import parse_draft
from paceline.engine.batch import RoundShape, Slot
from paceline.engine.engine import Engine, ListQueue
from paceline.engine.request import Request
from paceline.engine.rounds import RoundPlan, Rounds
from paceline.experiments.config import Cell, DrafterEntry, cell_key, model_paths
from paceline.experiments.measure import Bench
from paceline.experiments.prompts import Prompt
from paceline.experiments.replay import RecordedTarget
from paceline.experiments.runner import ExperimentPlan, PartProgress, PlannedCell, provenance
from paceline.experiments.store import Store
from paceline.experiments.trace import RecordedDrafter, Trace, TraceText, load_trace, save_trace
from paceline.outputs import RequestOutput, Statistics
from paceline.registry import DRAFTERS
from paceline.target.verifier import CompiledVerifier

log = logging.getLogger("paceline")


def record_traces(
    plan: ExperimentPlan, store: Store, report: PartProgress, *, deadline: float = math.inf
) -> list[Path]:
    """Record what is missing or unreadable, or raise StorageError. -> the complete files, new and old

    A file is written after every drafter, so that an interrupted run loses one. Drafters whose files or options have
    changed are recorded again; sequences and other drafters stay. After ``deadline`` no recording begins.
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
    return len(dict(_groups(plan))) if plan.config.traces else 0


def _groups(plan: ExperimentPlan) -> Iterator[tuple[str, list[PlannedCell]]]:
    """Group cells that share sequences, one for every recorded drafter, by the name of their file, which depends on the
    target's files, the sampling, the prompts and the options. The batch size is the largest of the experiment.
    """
    size = max(plan.config.batch_sizes)
    groups: dict[str, list[PlannedCell]] = {}
    for one in plan.cells:
        cell = replace(one.cell, batch_size=size, acceptor="match")
        name = f"{cell.target.label}, {cell.sampling.label}, {cell.prompts.label}".replace("/", "-")
        group = groups.setdefault(name, [])
        if cell.k is not None and not isinstance(cell.k, int):  # several lengths: the largest
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
    """Return the planned cell with another key, from which settings that concern only times are removed."""
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
        # if none can be recorded, only the sequences are, for drafters that what-if runs again
        self._plain = replace(members[0], cell=replace(members[0].cell, drafter=DrafterEntry(draft="none"), k=None))

    def complete(self, report: Callable[[str], None], *, fingerprint: str, deadline: float) -> bool:
        """Record what is missing. -> whether everything is recorded; ConfigurationError: no sequence could be,
        StorageError
        """
        kept = self._kept()
        known = {one.key: one for one in kept.drafters} if kept is not None else {}
        texts: tuple[TraceText, ...] = kept.texts if kept is not None else ()
        left = [one for one in self._chosen if one.key not in known]
        for one in (*left, self._plain):
            if texts and one.cell.drafter.plain:
                continue
            if monotonic() > deadline:
                return False
            report(f"recording {one.cell.title()}")
            try:
                own, drafter = self._recorded(one, texts)
            except PacelineError as error:
                log.warning("%s cannot be recorded: %s", one.cell.title(), error)
                continue
            if texts and own != texts:
                log.warning("%s is not in the trace: its output differs from the first drafter's", one.cell.title())
                continue
            texts = texts or own
            if not one.cell.drafter.plain:
                known[one.key] = drafter
            target = self._bench.target(one.cell, one.prompts)
            trace = Trace(
                one.cell.target.label,
                fingerprint,
                one.cell.sampling.model_dump(),
                tuple(target.kv_buckets),
                target.config.vocab_size,
                texts,
                tuple(self._wanted(known)),
                provenance(),
            )
            save_trace(self.path, trace)
        if not texts:
            raise ConfigurationError(
                f"no sequence of {self._members[0].cell.target.label} could be recorded; see the errors of its cells"
            )
        if kept is not None and not left and kept.drafters != tuple(wanted := self._wanted(known)):
            save_trace(self.path, replace(kept, drafters=tuple(wanted)))  # some are no longer in the experiment
        return True

    def _wanted(self, known: Mapping[str, RecordedDrafter]) -> list[RecordedDrafter]:
        """Recorded drafters of this experiment, in its order, by their current names."""
        members = [one for one in self._members if one.key in known]
        return [replace(known[one.key], name=one.cell.drafter.label) for one in members]

    def _kept(self) -> Trace | None:
        try:
            return load_trace(self.path)
        except TraceError:
            return None

    def _recorded(self, one: PlannedCell, texts: Sequence[TraceText]) -> tuple[tuple[TraceText, ...], RecordedDrafter]:
        cell, prompts = one.cell, one.prompts.rows
        generator, params = self._bench.generator(cell, one.prompts), self._bench.params(cell, 0, len(prompts))
        requests = Request.batch([list(row.ids) for row in prompts], params, generator.limits)
        with generator.target.held_by(self._bench):
            found, drafter = record(generator.drafter, generator.target, prompts, requests=requests, texts=texts)
        entry = cell.drafter
        prefixes, draft = drafter.prefixes and entry.vocabulary != "retokenize", json.dumps(entry.draft)
        return found, replace(drafter, name=entry.label, draft=draft, prefixes=prefixes, key=one.key)


def record(
    drafter: Drafter,
    target: CompiledDecoder,
    prompts: Sequence[Prompt],
    *,
    requests: Sequence[Request],
    texts: Sequence[TraceText] = (),
) -> tuple[tuple[TraceText, ...], RecordedDrafter]:
    """Decode prompts without speculation and record what a drafter proposes at every position. If their ``texts`` are
    known, the target runs only if the drafter reads its hidden states. -> the texts, and the drafter without a name

    Raises:
        ConfigurationError: its proposals were sampled from probabilities, so the texts depend on them.
    """
    shape, seats = drafter.draft_shape, list[Slot | None]([None] * target.batch_size)
    width, last = shape.depth + 1, target.kv_buckets[-1:]
    verifier: Verifier
    if texts and drafter.reads is None:
        verifier = RecordedTarget(texts)
    else:
        verifier = CompiledVerifier(target, shape, rule=Match(), wide=False, reads=drafter.reads)
    recorder = _Recorder(drafter, seats, rows=last[0])
    rounds = Rounds(recorder, {shape.depth: RoundPlan(recorder, verifier, width)}, seats)
    # Without the ends of smaller buckets: with a longer text in the batch they do not apply either.
    engine = Engine(seats, rounds, RoundShape(shape.depth, width, None, last))
    outputs: list[list[RequestOutput]] = [[] for _ in requests]
    for output in chain.from_iterable(engine.run(ListQueue(requests), Statistics())):
        outputs[output.index].append(output)
    found = tuple(map(_text, prompts, requests, outputs))
    asked = [recorder.proposals[index] for index in range(len(found))]
    for text, row in zip(found, asked, strict=True):  # no drafter is asked where no token of it could be accepted
        row += [((), ())] * (len(text.tokens) - 1 - len(row))
    model = drafter if isinstance(drafter, ModelDrafter) and shape.is_chain else None
    return found, RecordedDrafter(
        name="",
        draft="",
        k=shape.depth,
        parents=shape.parents,
        dynamic=shape.dynamic,
        max_positions=drafter.max_positions,
        prefixes=not shape.dynamic,
        proposals=tuple(tuple(nodes for nodes, _ in row) for row in asked),
        confidence_threshold=0.0 if model is None else model.confidence_threshold,
        confidences=None if model is None else tuple(tuple(sure for _, sure in row) for row in asked),
    )


def _text(prompt: Prompt, request: Request, outputs: Sequence[RequestOutput]) -> TraceText:
    reason = outputs[-1].finish_reason
    assert reason is not None, "it has ended"
    return TraceText(
        prompt.key,
        prompt.category,
        request.prompt,
        tuple(token for output in outputs for token in output.tokens),
        request.sampling.seed,
        request.max_length,
        reason,
    )


class _Recorder(Drafter):
    """Asks a drafter at every position up to its maximum and proposes nothing, so that every commit is one token. Of
    each request by its index, ``proposals`` has the nodes, and the confidences of a draft model.
    """

    def __init__(self, drafter: Drafter, seats: Sequence[Slot | None], *, rows: int) -> None:
        self.draft_shape, self.reads = drafter.draft_shape, drafter.reads
        self._drafter, self._seats, self._rows = drafter, seats, rows
        self.proposals: dict[int, list[tuple[tuple[int, ...], tuple[float, ...]]]] = defaultdict(list)

    def read_request(
        self, slot: int, prompt: Sequence[int], features: Tensor | None = None
    ) -> Generator[None, None, None]:
        return self._drafter.read_request(slot, prompt, features)

    def finish_request(self, slot: int) -> None:
        self._drafter.finish_request(slot)

    def update(self, commit: Commit) -> None:
        self._drafter.update(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        asked = [None if not most else seat for seat, most in zip(self._seats, limits.max_accept, strict=True)]
        room = [0 if seat is None else self._room(len(seat.text)) for seat in asked]
        proposal, confidence, own = None, None, RoundLimits(room, limits.max_rows)
        if any(room) and isinstance(self._drafter, ModelDrafter) and self.draft_shape.is_chain:
            proposal, confidence = self._drafter.propose_with_confidence(commit, sampling, own)
        elif any(room):
            proposal = self._drafter.propose(commit, sampling, own)
        for slot, seat in enumerate(asked):
            if seat is not None:
                nodes = () if proposal is None or not room[slot] else _nodes(proposal, slot)
                sure = () if confidence is None or not nodes else tuple(confidence[slot].tolist())
                self.proposals[seat.request.index].append((nodes, sure))
        return Proposal(torch.full((len(room), 1), PAD, dtype=torch.int32))

    def _room(self, length: int) -> int:
        """Return the largest depth that can be proposed after a text of this length, whatever its limit."""
        positions = self._drafter.max_positions
        deep = min(self.draft_shape.depth, self._rows - length)
        return max(0, deep if positions is None else min(deep, positions - length + 1))


def _nodes(proposal: Proposal, slot: int) -> tuple[int, ...]:
    """One slot of a proposal: tokens of the nodes, and parents where they are its own."""
    if proposal.draft_probs is not None:
        raise ConfigurationError(
            "acceptor: expected 'match' for a drafter whose trace is recorded, got one that samples from "
            "probabilities; use acceptor: match"
        )
    tokens = tuple(proposal.tokens[slot].tolist())
    own = proposal.parents
    return tokens if not isinstance(own, torch.Tensor) else (*tokens, *own[slot].tolist())
