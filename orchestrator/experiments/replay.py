"""Replay of the engine over recorded sequences, without a model: rounds, limits, batches and stops are the engine's.

So a replay has exactly the counts of a run, at any batch size: the engine, the rounds, text drafters and lists are the
real ones, a recorded drafter repeats its proposals, and the target's tokens are the recorded ones. `questions.py` uses
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

import numpy as np
import torch

from paceline.core import tree
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, Reading, Verifier
from paceline.core.sampling import Sampling, seed_row
from paceline.core.types import (
    PAD,
    Commit,
    DraftShape,
    PrefillResult,
    Proposal,
    RoundLimits,
    RoundResult,
    SamplingTensors,
)
from paceline.draft.choice import shortened_of
from paceline.engine.adaptive import DraftLengthController, DraftLengthPolicy
from paceline.engine.batch import RoundShape
from paceline.engine.engine import Engine, ListQueue
from paceline.engine.request import Request
from paceline.engine.rounds import RoundPlan, Rounds
from paceline.experiments.definitions import Acceptance
from paceline.experiments.trace import RecordedDrafter, Trace, TraceText
from paceline.outputs import RequestOutput, Statistics

_Key = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Simulated outcome of a policy: statistics of a call without times, and the acceptance of every sequence.

    rounds   for every round of the batch, the number of slots that took part and the deepest proposal
    seconds  assumed time of all rounds; 0 without draft lengths
    """

    statistics: Statistics
    requests: tuple[Acceptance, ...]
    rounds: tuple[tuple[int, int], ...]
    seconds: float = 0.0

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.pooled(self.requests)


def replay(
    trace: Trace,
    drafter: Drafter,
    *,
    batch_size: int = 1,
    draft_lengths: Mapping[int, float] | None = None,
    rows: Callable[[int], float] | None = None,
    grouped: bool = False,
) -> Replayed:
    """Decode the sequences of a trace with a drafter that needs no model.

    draft_lengths  depths with the seconds of a round, to choose from in every round as with ``k="auto"``; but while
                   drafting pauses, each plain step is a round
    grouped        start a group of ``batch_size`` sequences only when the one before it has ended, as ``experiment
                   run`` does; else a sequence starts as soon as a slot is free, as in one call and in ``serve``

    Raises:
        ConfigurationError: the drafter does not support one of the depths.
    """
    texts = trace.texts
    end = trace.vocab_size  # an id that no model has: marks the end of a sequence, for any reason
    target = RecordedTarget(texts, end)
    seen: list[tuple[int, int]] = []
    width = drafter.draft_shape.depth + 1
    policy = None if draft_lengths is None else _AssumedPolicy(draft_lengths, rows, batch_size)
    if draft_lengths is None:
        rounds = _CountedRounds(drafter, {width - 1: RoundPlan(drafter, target, width)}, seen)
    else:
        plans = {
            depth: RoundPlan(shortened_of(drafter, depth) if depth else drafter, target, width, drafts=depth > 0)
            for depth in sorted(draft_lengths)
        }
        rounds = _CountedRounds(drafter, plans, seen, policy=policy)
    shape = RoundShape(width - 1, width, drafter.max_positions, trace.kv_buckets)
    engine = Engine([None] * batch_size, rounds, shape)
    requests = [
        Request(index, text.prompt, Sampling(seed=text.seed), text.max_length, frozenset({end}))
        for index, text in enumerate(texts)
    ]
    statistics = Statistics()
    outputs: list[list[RequestOutput]] = [[] for _ in texts]
    together = batch_size if grouped else max(1, len(requests))
    for begin in range(0, len(requests), together):
        for output in chain.from_iterable(engine.run(ListQueue(requests[begin : begin + together]), statistics)):
            outputs[output.index].append(output)
    lengths = [sum(len(output.tokens) for output in row) for row in outputs]
    assert lengths == [len(text.tokens) for text in texts], "a replay has the recorded texts"
    total = 0.0 if policy is None else policy.total
    return Replayed(statistics, tuple(map(Acceptance.of, outputs)), tuple(seen), total)


class _CountedRounds(Rounds):
    """Records the number of slots in every round, and the depth of its proposals."""

    def __init__(
        self,
        drafter: Drafter,
        plans: Mapping[int, RoundPlan],
        seen: list[tuple[int, int]],
        *,
        policy: DraftLengthPolicy | None = None,
    ) -> None:
        super().__init__(drafter, plans, policy=policy)
        self._seen = seen

    def __call__(
        self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits, plan: RoundPlan | None = None
    ) -> RoundResult:
        result = super().__call__(commit, sampling, limits, plan)
        self._seen.append((len(self._seated), max(result.reports[0].drafted)))
        return result


class _AssumedPolicy(DraftLengthPolicy):
    """Learns from assumed times of rounds of each length and number of rows; ``total``: seconds of all so far."""

    def __init__(
        self, seconds: Mapping[int, float], rows: Callable[[int], float] | None = None, batch_size: int = 1
    ) -> None:
        super().__init__(DraftLengthController(tuple(sorted(seconds))), competes=rows is not None)
        self._seconds, self._rows, self._batch_size, self.total = seconds, rows, batch_size, 0.0

    def learn(self, length: int, result: RoundResult, limits: RoundLimits, *, early: bool) -> None:
        reports = [replace(report, seconds=self._time(length, sum(report.drafted))) for report in result.reports]
        self.total += sum(report.seconds for report in reports)
        super().learn(length, replace(result, reports=reports), limits, early=early)

    def _time(self, length: int, drafted: int) -> float:
        full = self._seconds[length]
        if self._rows is None:
            return full
        needed = self._rows(len(self._seated) + drafted)
        return max(needed, full - self._rows(self._batch_size * (length + 1)) + needed)


@dataclass(slots=True)
class RecordedTarget(Verifier):
    """The target's side of rounds, from its texts. ``end``: id that replaces the token that stops a text, if any."""

    texts: Sequence[TraceText]
    end: int | None = None
    slots: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    _waiting: dict[_Key, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, text in enumerate(self.texts):
            self._waiting.setdefault((text.prompt, tuple(seed_row(text.seed))), []).append(index)

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        yield from ()  # a recorded sequence needs no prefill
        index = self._waiting[tuple(prompt), tuple(sampling.seeds[0].tolist())].pop(0)
        text = self.texts[index]
        whole = [*text.prompt, *text.tokens]
        if self.end is not None and text.finish_reason != "length":
            whole[-1] = self.end
        self.slots[slot] = (whole, text.tokens[-1])
        return PrefillResult(whole[len(prompt)])

    def finish_request(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        size, width = commit.tokens.shape
        tokens = torch.full((size, width), PAD, dtype=torch.int32)
        tokens[:, 0] = 0
        count = torch.ones(size, dtype=torch.int32)
        for slot, (whole, last) in self.slots.items():
            length = int(commit.first_row[slot] + commit.count[slot])
            most = limits.max_accept[slot]
            accepted = (
                0
                if proposal is None
                else self._accepted(proposal, slot, following=whole[length:], last=last, most=most)
            )
            row = [*whole[length : length + accepted + 1], 0][: accepted + 1]  # 0: after the end of the sequence
            tokens[slot, : accepted + 1] = torch.tensor(row, dtype=torch.int32)
            count[slot] = accepted + 1
        return Commit(tokens, count, commit.first_row + commit.count)

    def _accepted(self, proposal: Proposal, slot: int, *, following: Sequence[int], last: int, most: int) -> int:
        """Depth to which a proposal agrees with the following tokens; ``last`` is the id that ``end`` replaces."""
        nodes = proposal.tokens[slot].tolist()
        parents = parents_of(proposal, slot)
        place, depth = tree.ROOT, 0
        while depth < min(most, len(following)):
            wanted = following[depth]
            if wanted == self.end:
                wanted = last
            step = next((i for i, n in enumerate(nodes) if parents[i] == place and n == wanted), None)
            if step is None:
                break
            place, depth = step, depth + 1
        return depth


def parents_of(proposal: Proposal, slot: int) -> Sequence[int]:
    parents = proposal.parents
    if parents is None:
        return tree.chain(proposal.tokens.shape[1])
    return parents if isinstance(parents, tuple) else [int(parent) for parent in parents[slot]]


class ReplayDrafter(Drafter):
    """Repeats the proposals of a recorded drafter; ``depth`` shortens them, ``nodes`` keeps only those of its static
    tree, ``confidence`` cuts at that threshold in place of the recorded one.

    Raises:
        ConfigurationError: this was not recorded: a smaller depth of a drafter whose drafts change with it, a larger
            one, or nodes without their parents.
    """

    def __init__(
        self,
        trace: Trace,
        recorded: RecordedDrafter,
        *,
        depth: int | None = None,
        nodes: Sequence[int] | None = None,
        confidence: float | None = None,
    ) -> None:
        threshold = recorded.confidence_threshold if confidence is None else confidence
        self._threshold = float(np.float32(threshold))  # compared as in a graph
        self._recorded = recorded
        self.max_positions = recorded.max_positions
        self._keep: tuple[int, ...] | None = None
        size = len(recorded.parents) if recorded.parents is not None else recorded.k
        if nodes is not None:
            self.draft_shape = self._subtree(tuple(sorted(set(nodes))))
        elif depth is None or depth == recorded.k:
            dynamic = recorded.dynamic
            size = max((len(p) // 2 for row in recorded.proposals for p in row), default=1) if dynamic else size
            self.draft_shape = DraftShape(size, recorded.k, recorded.parents, dynamic)
        elif recorded.parents is None and recorded.prefixes and 0 <= depth < recorded.k:
            self.draft_shape = DraftShape.chain(depth)
        else:
            most = "at most " if recorded.parents is None and recorded.prefixes else ""
            what = f"k: expected {most}{recorded.k}, the recorded depth of {recorded.name}"
            why = "" if recorded.prefixes else " (its shorter drafts are not prefixes of longer ones)"
            raise ConfigurationError(f"{what}{why}, got {depth}; record it with k={depth}")
        self._trace = trace
        self._slots: dict[int, int] = {}
        self._begun: dict[tuple[int, ...], int] = {}

    def shortened(self, length: int) -> ReplayDrafter:
        """The same with shorter drafts and shared sequences, or ConfigurationError: they are not known."""
        known = self._recorded.confidences is not None
        shorter = ReplayDrafter(
            self._trace, self._recorded, depth=length, confidence=self._threshold if known else None
        )
        shorter._slots, shorter._begun = self._slots, self._begun
        return shorter

    def _subtree(self, nodes: tuple[int, ...]) -> DraftShape:
        parents = self._recorded.parents
        known = parents is not None and nodes and nodes[-1] < len(parents)
        if parents is None or not known or any(parents[n] not in (tree.ROOT, *nodes) for n in nodes):
            raise ConfigurationError(
                f"nodes: expected a subtree of {parents}, the tree of {self._recorded.name}, got {nodes}; correct them"
            )
        self._keep = nodes
        new = {node: place for place, node in enumerate(nodes)}
        return tree.draft_shape(tuple(new.get(parents[node], tree.ROOT) for node in nodes))

    def add_request(self, slot: int, prompt: Sequence[int], features: torch.Tensor | None = None) -> None:
        """Texts of equal prompts come in their order."""
        same = [i for i, text in enumerate(self._trace.texts) if text.prompt == tuple(prompt)]
        seen = self._begun.get(tuple(prompt), 0)
        self._begun[tuple(prompt)] = seen + 1
        self._slots[slot] = same[seen % len(same)]

    def finish_request(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def update(self, commit: Commit) -> None:
        """Nothing: the text is known."""

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        shape = self.draft_shape
        tokens = torch.full((len(commit.count), shape.num_draft_tokens), PAD, dtype=torch.int32)
        parents = torch.full_like(tokens, tree.ROOT)
        for slot, index in self._slots.items():
            length = int(commit.first_row[slot] + commit.count[slot])
            place = length - len(self._trace.texts[index].prompt) - 1
            nodes = self._recorded.proposals[index][place]
            if self._recorded.confidences is not None:
                sure = takewhile(lambda value: value >= self._threshold, self._recorded.confidences[index][place])
                nodes = nodes[: len(list(sure))]
            if shape.dynamic and nodes:
                half = len(nodes) // 2
                nodes, above = nodes[:half], nodes[half:]
                parents[slot, :half] = torch.tensor(above, dtype=torch.int32)
            if self._keep is not None and nodes:
                nodes = tuple(nodes[node] for node in self._keep)
            nodes = nodes[: shape.num_draft_tokens]
            if nodes:
                tokens[slot, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
        return Proposal(tokens, parents if shape.dynamic else shape.parents)
