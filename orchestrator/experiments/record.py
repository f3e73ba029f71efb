"""Records a trace: the target decodes alone, one token a round, and every drafter says what it would propose.

Every drafter gets the limits of a round of its own, so that it proposes as far as it can, and none of its tokens is
accepted; so it is asked at every position. Drafters that look at the text alone and are cheap (n-grams, suffixes) are
not recorded: what-if runs them again. Not here: files (`trace.py`), and what is made of them (`replay.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, ReportsConfidence
from paceline.core.reading import finish
from paceline.core.sampling import sampling_tensors
from paceline.core.types import Commit, Proposal, RoundLimits, SamplingTensors
from paceline.engine.request import Request, SamplingParams, TargetLimits
from paceline.engine.stopping import StopChecker
from paceline.experiments.trace import RecordedDrafter, Trace, TraceText
from paceline.target.verifier import CompiledVerifier


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is recorded of a text, beside the text: the proposals of its drafter at every position.

    confidences  as in `RecordedDrafter`, empty for drafters that have none
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
    """Prompts as (key, category, ids), checked.

    Raises:
        PromptError, SamplingError: one cannot be served.
    """
    requests = Request.batch([list(ids) for _, _, ids in rows], params, limits)
    return [Prompted(key, category, one) for (key, category, _), one in zip(rows, requests, strict=True)]


def record_drafter(drafter: Drafter, verifier: CompiledVerifier, prompts: Sequence[Prompted]) -> list[Recorded]:
    """The texts of some prompts, and what a drafter proposes along them. All slots but the first stay idle.

    verifier  for the drafter's own shape, of the rule ``match``

    Raises:
        ConfigurationError: its proposals were drawn from probabilities, so that texts depend on them.
    """
    return [_record(drafter, verifier, one) for one in prompts]


def _record(drafter: Drafter, verifier: CompiledVerifier, prompt: Prompted) -> Recorded:
    request, slots, kv_buckets = prompt.request, verifier.decoder.batch_size, verifier.decoder.kv_buckets
    checker = StopChecker(request.stopping, request.prompt)
    row = sampling_tensors([request.sampling])
    first = finish(verifier.prefill(0, request.prompt, row))
    drafter.add_request(0, request.prompt, first.features)
    width = drafter.draft_shape.depth + 1
    sampling = sampling_tensors([request.sampling] * slots)
    commit = _first_commit(first.token, len(request.prompt), slots=slots, width=width)
    if first.features is not None:
        features = first.features.new_zeros(slots, width, first.features.shape[-1])
        features[0, 0] = first.features[-1]
        commit = replace(commit, features=features)
    nothing = torch.zeros(slots, dtype=torch.int32)
    proposals: list[tuple[int, ...]] = []
    confidences: list[tuple[float, ...]] = []
    _, reason = checker.extend([first.token])
    try:
        while reason is None:
            length = len(checker.text)
            drafter.update(commit)
            deep = _room(drafter, length, kv_buckets)
            limits = torch.zeros(slots, dtype=torch.int32)
            limits[0] = deep
            nodes, sure = _proposed(drafter, commit, sampling, limits=RoundLimits(limits, length)) if deep else ((), ())
            proposals.append(nodes)
            confidences.append(sure)
            commit = verifier(commit, None, sampling, RoundLimits(nothing, length))
            _, reason = checker.extend([int(commit.tokens[0, 0])])
            commit = _idle_others(commit)
    finally:
        drafter.finish_request(0)
        verifier.finish_request(0)
    answer = tuple(checker.text[len(request.prompt) :])
    text = TraceText(
        prompt.key,
        prompt.category,
        request.prompt,
        answer,
        request.sampling.seed,
        request.stopping.max_length,
        reason,
    )
    return Recorded(text, tuple(proposals), tuple(confidences))


def _proposed(
    drafter: Drafter, commit: Commit, sampling: SamplingTensors, *, limits: RoundLimits
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Nodes in slot 0, and how sure the drafter is of each, if it says so."""
    if not isinstance(drafter, ReportsConfidence):
        return _nodes(drafter.propose(commit, sampling, limits)), ()
    proposal, confidence = drafter.propose_with_confidence(commit, sampling, limits)
    return _nodes(proposal), tuple(confidence[0].tolist())


def _first_commit(token: int, first_row: int, *, slots: int, width: int) -> Commit:
    tokens = torch.full((slots, width), -1, dtype=torch.int32)
    tokens[:, 0] = 0
    tokens[0, 0] = token
    rows = torch.zeros(slots, dtype=torch.int32)
    rows[0] = first_row
    return Commit(tokens, torch.ones(slots, dtype=torch.int32), rows)


def _idle_others(commit: Commit) -> Commit:
    """Slots without a request stay at row 0."""
    if len(commit.count) > 1:
        commit.first_row[1:] = 0
    return commit


def _room(drafter: Drafter, length: int, kv_buckets: Sequence[int]) -> int:
    """How deep it may propose behind a text of this length, whatever its limit of new tokens.

    The borders of smaller caches do not count: beside a longer text in the batch they do not hold either.
    """
    deep = min(drafter.draft_shape.depth, kv_buckets[-1] - length)
    if drafter.max_positions is not None:
        deep = min(deep, drafter.max_positions - length + 1)
    return max(0, deep)


def _nodes(proposal: Proposal) -> tuple[int, ...]:
    """Slot 0 of a proposal: tokens of the nodes, and parents where they are its own."""
    if proposal.draft_probs is not None:
        raise ConfigurationError("a drafter that draws from probabilities cannot be recorded; use acceptor: match")
    tokens = tuple(proposal.tokens[0].tolist())
    own = proposal.parents
    return tokens if not isinstance(own, torch.Tensor) else (*tokens, *own[0].tolist())


def recorded_drafter(
    name: str, drafter: Drafter, rows: Sequence[Recorded], *, draft: str, prefixes: bool
) -> RecordedDrafter:
    """What a trace keeps of a drafter."""
    shape = drafter.draft_shape
    reports = isinstance(drafter, ReportsConfidence)
    return RecordedDrafter(
        name,
        draft,
        shape.depth,
        shape.parents,
        shape.dynamic,
        drafter.max_positions,
        prefixes and not shape.dynamic,
        tuple(row.proposals for row in rows),
        drafter.confidence_threshold if isinstance(drafter, ReportsConfidence) else 0.0,
        tuple(row.confidences for row in rows) if reports else None,
    )


def joined(
    target: Mapping[str, Any],
    rows: Sequence[Recorded],
    drafters: Sequence[RecordedDrafter],
    *,
    source: Mapping[str, object],
) -> Trace:
    """A trace of texts and drafters. ``target``: the fields of `Trace` before its texts."""
    return Trace(**target, texts=tuple(row.text for row in rows), drafters=tuple(drafters), provenance=source)
