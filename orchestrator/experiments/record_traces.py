"""The traces of an experiment: one for every target, sampling and prompt set, with all its drafters that need a model.

The target decodes without speculation, one token per round, and every drafter proposes at every position. Each gets the
limits of a separate round, so that it proposes up to its maximum, and none of its tokens is accepted. Once the
sequences are known, a drafter that reads only tokens proposes along them without the target. Each drafter is recorded
at the largest depth in the experiment. Cheap drafters that need only tokens (n-grams, suffixes) are not recorded,
because what-if runs them again; nor are lists, which what-if combines. The file is in `trace.py`; `replay.py` reads it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from paceline.core.acceptance.match import Match
from paceline.core.errors import ConfigurationError, PacelineError, TraceError
from paceline.core.protocols import Drafter, Reading, Verifier, finish
from paceline.core.sampling import sampling_tensors
from paceline.core.types import PAD, Commit, PrefillResult, Proposal, RoundLimits, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.model import ModelDrafter
from paceline.draft_spec import parse_draft
from paceline.engine.request import Request, SamplingParams, TargetLimits
from paceline.engine.stopping import StopChecker
from paceline.experiments.config import Cell, DrafterEntry, cell_key, model_paths
from paceline.experiments.measure import Bench
from paceline.experiments.runner import ExperimentPlan, PlannedCell, Report, provenance
from paceline.experiments.store import Store
from paceline.experiments.trace import RecordedDrafter, Trace, TraceText, load_trace, save_trace
from paceline.outputs import FinishReason
from paceline.registry import DRAFTERS
from paceline.target.verifier import CompiledVerifier

log = logging.getLogger("paceline")


def record_traces(plan: ExperimentPlan, store: Store, report: Report, *, deadline: float = math.inf) -> list[Path]:
    """Record what is missing or unreadable. -> the complete files, new and old

    A file is written after every drafter, so that an interrupted run loses one. Drafters whose files or options have
    changed are recorded again; sequences and other drafters stay.

    deadline  of `time.monotonic`, after which no recording begins

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
    """Group cells that share sequences, one for every recorded drafter, by the name of their file.

    The name depends on what determines the sequences: the target's files, the sampling, the prompts and the options.
    The batch size is the largest of the experiment.
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
        """Record what is missing. -> whether everything is recorded

        Raises:
            ConfigurationError: the target's sequences could not be recorded.
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
                log.warning("%s is not in the trace: its output differs from the first drafter's", one.cell.title())
                continue
            texts = texts or [row.text for row in rows]
            if not one.cell.drafter.plain:
                known[one.key] = self._drafter(one, rows)
            about = self._about(one, fingerprint)
            save_trace(self.path, joined(about, texts, self._wanted(known), source=provenance()))
        if not texts:
            raise ConfigurationError(
                f"no sequence of {self._members[0].cell.target.label} could be recorded; see the errors of its cells"
            )
        if kept is not None and not left and kept.drafters != tuple(wanted := self._wanted(known)):
            save_trace(self.path, replace(kept, drafters=tuple(wanted)))  # some are no longer in the experiment
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

    def _recorded(self, one: PlannedCell, texts: Sequence[TraceText]) -> list[_Recorded]:
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

    def _drafter(self, one: PlannedCell, rows: Sequence[_Recorded]) -> RecordedDrafter:
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


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Recorded data of a sequence: its tokens and the proposals of its drafter at every position.

    confidences  as in `RecordedDrafter`, empty for drafters without any
    """

    text: TraceText
    proposals: tuple[tuple[int, ...], ...]
    confidences: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt to record: its name, and its request, which has its own seed and limits."""

    key: str
    category: str
    request: Request


def prompted(
    rows: Sequence[tuple[str, str, Sequence[int]]], params: SamplingParams, limits: TargetLimits
) -> list[Prompted]:
    """Check prompts, as (key, category, ids).

    Raises:
        PromptError, SamplingError: one is invalid.
    """
    requests = Request.batch([list(ids) for _, _, ids in rows], params, limits)
    return [Prompted(key, category, one) for (key, category, _), one in zip(rows, requests, strict=True)]


def record_drafter(drafter: Drafter, verifier: CompiledVerifier, prompts: Sequence[Prompted]) -> list[_Recorded]:
    """Record the sequences of some prompts, and a drafter's proposals along them, in batches of the target's slots.

    verifier  for the drafter's shape, with the rule ``match``

    Raises:
        ConfigurationError: its proposals were sampled from probabilities, so the sequences depend on them.
    """
    slots = verifier.decoder.batch_size
    groups = [prompts[first : first + slots] for first in range(0, len(prompts), slots)]
    return [one for group in groups for one in _Recording(drafter, verifier, group, decoder=verifier.decoder).run()]


def record_along(
    drafter: Drafter, decoder: CompiledDecoder, prompts: Sequence[Prompted], *, texts: Sequence[TraceText]
) -> list[_Recorded]:
    """Record the proposals of a drafter that reads only tokens along known sequences: the target does not run.

    decoder  the target, for its number of slots and its cache lengths
    texts    of the prompts

    Raises:
        ConfigurationError: it reads the target's features; or as in `record_drafter`.
    """
    if drafter.reads is not None:
        raise ConfigurationError(
            "drafters: expected none that reads the target's hidden states in this pass, got one; record it "
            "together with the target"
        )
    found: list[_Recorded] = []
    for first in range(0, len(prompts), decoder.batch_size):
        some = slice(first, first + decoder.batch_size)
        found += _Recording(drafter, _KnownTexts(texts[some]), prompts[some], decoder=decoder).run()
    return found


@dataclass(frozen=True, slots=True)
class _KnownTexts(Verifier):
    """Commits the texts that are known, each in the slot of its place."""

    texts: Sequence[TraceText]

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        yield from ()  # no prefill
        return PrefillResult(self.texts[slot].tokens[0])

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        first_row = commit.first_row + commit.count
        tokens = torch.full_like(commit.tokens, PAD)
        tokens[:, 0] = 0
        for slot, text in enumerate(self.texts):
            place = int(first_row[slot]) - len(text.prompt)
            if 0 <= place < len(text.tokens):  # finished sequences are still computed, like idle slots
                tokens[slot, 0] = text.tokens[place]
        return Commit(tokens, torch.ones_like(commit.count), first_row)


@dataclass(slots=True)
class _Text:
    """One text while it is recorded. ``reason``: why it ended; None: it goes on."""

    prompted: Prompted
    checker: StopChecker
    reason: FinishReason | None = None
    proposals: list[tuple[int, ...]] = field(default_factory=list)
    confidences: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.checker.text)

    def recorded(self) -> _Recorded:
        request, reason = self.prompted.request, self.reason
        assert reason is not None, "it has ended"
        text = TraceText(
            self.prompted.key,
            self.prompted.category,
            request.prompt,
            tuple(self.checker.text[len(request.prompt) :]),
            request.sampling.seed,
            request.max_length,
            reason,
        )
        return _Recorded(text, tuple(self.proposals), tuple(self.confidences))


class _Recording:
    """Record a batch, one sequence per slot, until the last one has ended; nothing is accepted."""

    def __init__(
        self, drafter: Drafter, verifier: Verifier, prompts: Sequence[Prompted], *, decoder: CompiledDecoder
    ) -> None:
        self._drafter, self._verifier, self._kv_buckets = drafter, verifier, decoder.kv_buckets
        self._texts = [_Text(one, StopChecker(one.request)) for one in prompts]
        self._slots, self._width = decoder.batch_size, drafter.draft_shape.depth + 1
        last = [prompts[-1].request.sampling] * (self._slots - len(prompts))
        self._sampling = sampling_tensors([*(one.request.sampling for one in prompts), *last])

    def run(self) -> list[_Recorded]:
        """Decode, and ask at every position."""
        try:
            commit = self._begin()
            while any(one.reason is None for one in self._texts):
                self._drafter.update(commit)
                self._ask(commit)
                limits = RoundLimits([0] * self._slots, max(text.length for _, text in self._open()))
                commit = self._verifier(commit, None, self._sampling, limits)
                for slot, text in self._open():
                    self._extend(slot, text, int(commit.tokens[slot, 0]))
                self._idle(commit)
        finally:
            for slot, _ in self._open():
                self._finish(slot)
        return [one.recorded() for one in self._texts]

    def _open(self) -> list[tuple[int, _Text]]:
        return [(slot, text) for slot, text in enumerate(self._texts) if text.reason is None]

    def _begin(self) -> Commit:
        """Read the prompts. -> the first token of every text, and what predicted it"""
        tokens = torch.full((self._slots, self._width), PAD, dtype=torch.int32)
        tokens[:, 0] = 0
        rows = torch.zeros(self._slots, dtype=torch.int32)
        features: torch.Tensor | None = None
        for slot, text in enumerate(self._texts):
            request = text.prompted.request
            first = finish(self._verifier.prefill(slot, request.prompt, sampling_tensors([request.sampling])))
            self._drafter.add_request(slot, request.prompt, first.features)
            tokens[slot, 0], rows[slot] = first.token, len(request.prompt)
            if first.features is not None:
                if features is None:
                    features = first.features.new_zeros(self._slots, self._width, first.features.shape[-1])
                features[slot, 0] = first.features[-1]
            self._extend(slot, text, first.token)
        commit = Commit(tokens, torch.ones(self._slots, dtype=torch.int32), rows, features)
        self._idle(commit)
        return commit

    def _extend(self, slot: int, text: _Text, token: int) -> None:
        _, text.reason = text.checker.extend([token])
        if text.reason is not None:
            self._finish(slot)

    def _finish(self, slot: int) -> None:
        self._drafter.finish_request(slot)
        self._verifier.finish_request(slot)

    def _idle(self, commit: Commit) -> None:
        """Slots without a text, and those whose text has ended, stay at row 0."""
        idle = [slot for slot in range(self._slots) if slot >= len(self._texts) or self._texts[slot].reason is not None]
        commit.first_row[idle] = 0

    def _ask(self, commit: Commit) -> None:
        """Record the proposals after every sequence."""
        limits = [0] * self._slots
        for slot, text in self._open():
            limits[slot] = _room(self._drafter, text.length, self._kv_buckets)
        longest = max(text.length for _, text in self._open())
        asked = None
        if any(limits):
            asked = _proposed(self._drafter, commit, self._sampling, limits=RoundLimits(limits, longest))
        for slot, text in self._open():
            nodes, sure = asked(slot) if asked is not None and limits[slot] else ((), ())
            text.proposals.append(nodes)
            text.confidences.append(sure)


def _proposed(
    drafter: Drafter, commit: Commit, sampling: SamplingTensors, *, limits: RoundLimits
) -> Callable[[int], tuple[tuple[int, ...], tuple[float, ...]]]:
    """-> from a slot to its nodes, and how sure the drafter is of each, if it says so"""
    if not isinstance(drafter, ModelDrafter):
        proposal = drafter.propose(commit, sampling, limits)
        return lambda slot: (_nodes(proposal, slot), ())
    proposal, confidence = drafter.propose_with_confidence(commit, sampling, limits)
    return lambda slot: (_nodes(proposal, slot), tuple(confidence[slot].tolist()))


def _room(drafter: Drafter, length: int, kv_buckets: Sequence[int]) -> int:
    """Return the largest depth that can be proposed after a sequence of this length, regardless of its limit of new
    tokens.

    Ends of smaller cache buckets are ignored: with a longer sequence in the batch they do not apply either.
    """
    deep = min(drafter.draft_shape.depth, kv_buckets[-1] - length)
    if drafter.max_positions is not None:
        deep = min(deep, drafter.max_positions - length + 1)
    return max(0, deep)


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


def recorded_drafter(
    name: str, drafter: Drafter, rows: Sequence[_Recorded], *, draft: str, prefixes: bool, key: str = ""
) -> RecordedDrafter:
    """Return the part of a drafter that a trace stores. ``key``: as in `RecordedDrafter`."""
    shape = drafter.draft_shape
    reports = isinstance(drafter, ModelDrafter)
    return RecordedDrafter(
        name,
        draft,
        shape.depth,
        shape.parents,
        shape.dynamic,
        drafter.max_positions,
        prefixes and not shape.dynamic,
        tuple(row.proposals for row in rows),
        drafter.confidence_threshold if isinstance(drafter, ModelDrafter) else 0.0,
        tuple(row.confidences for row in rows) if reports else None,
        key,
    )


def joined(
    target: Mapping[str, Any],
    texts: Sequence[TraceText],
    drafters: Sequence[RecordedDrafter],
    *,
    source: Mapping[str, object],
) -> Trace:
    """A trace of texts and drafters. ``target``: the fields of `Trace` before its texts."""
    return Trace(**target, texts=tuple(texts), drafters=tuple(drafters), provenance=source)
