"""Traces: the sequences of a target, and the proposals of drafters at every position of them.

With the rule ``match`` the sequence does not depend on drafter or draft length, so the proposals along one sequence
answer every query about depths, trees, lists and choices of drafters (`paceline.experiments.questions`).
`record_traces.py` records them.

A trace is one file: JSON, gzip-compressed, with gzip's checksum. It holds no code, and reading it executes nothing.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paceline.core.errors import ConfigurationError, TraceError
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.outputs import FinishReason

VERSION = 4
"""Version of the file."""

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TraceText:
    """One prompt and its output, ids whose last may stop it. ``max_length``: limit of the whole sequence."""

    key: str
    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seed: int
    max_length: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RecordedDrafter:
    """The proposals of one drafter along every sequence of a trace.

    draft          its name in the experiment
    k              depth of the proposals
    parents        of a static tree; None = chains, or separate trees if ``dynamic``
    max_positions  number of positions it can follow; None = all
    prefixes       whether a shorter draft is a prefix of a longer one, so that smaller depths are known too
    proposals      for every sequence, for every position of the output except the last: token of every node, -1 = none.
                   For a dynamic tree the parents follow the tokens
    confidence_threshold  the drafter's own, which a replay applies; proposals are recorded without it
    confidences    for every proposal the largest probability at each of its positions, float32, for comparison with a
                   threshold; None = another kind of drafter
    key            key of the cell that needs it (`paceline.experiments.config.cell_key`), which changes with the
                   drafter's files and options
    """

    name: str
    draft: str
    k: int
    parents: tuple[int, ...] | None
    dynamic: bool
    max_positions: int | None
    prefixes: bool
    proposals: tuple[tuple[tuple[int, ...], ...], ...]
    confidence_threshold: float = 0.0
    confidences: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A target's sequences and the drafters recorded along them.

    target       the model's label; ``fingerprint`` of its files
    kv_buckets   buckets of the target's cache, whose ends no draft crosses
    sampling, provenance   options of the sampling; of the recording
    """

    target: str
    fingerprint: str
    sampling: Mapping[str, Any]
    kv_buckets: tuple[int, ...]
    vocab_size: int
    texts: tuple[TraceText, ...]
    drafters: tuple[RecordedDrafter, ...]
    provenance: Mapping[str, object]

    def drafter(self, name: str) -> RecordedDrafter:
        """A recorded drafter by its name, or ConfigurationError."""
        for one in self.drafters:
            if one.name == name:
                return one
        names = ", ".join(one.name for one in self.drafters) or "none"
        raise ConfigurationError(
            f"drafter: expected a recorded one ({names}) or a text drafter, got {name!r}; correct the name"
        )


def save_trace(path: Path, trace: Trace) -> None:
    """Write a trace atomically, or raise StorageError."""
    body = b'{"version": %d, "trace": %s}' % (VERSION, TypeAdapter(Trace).dump_json(trace))
    save_bytes(path, [gzip.compress(body, mtime=0)])


def load_trace(path: Path) -> Trace:
    """Read a trace, or raise TraceError: it is none, of another version, or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: the file cannot be read ({error}); check the path and its permissions") from error
    if not data.startswith(_GZIP):
        raise TraceError(
            f"{path}: expected a trace; run `paceline experiment run` with traces: true, which writes them below "
            "traces/"
        )
    try:
        body = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: the checksum differs ({error}); copy the trace again, or record it again") from error
    try:
        found = json.loads(body)
        if found["version"] != VERSION:
            raise TraceError(f"{path}: expected a trace of version {VERSION}, got {found['version']}; record it again")
        return TypeAdapter(Trace).validate_python(found["trace"])
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: expected a trace, got another file ({error!r}); record it again") from error


def check_target(trace: Trace, fingerprint: str, path: str) -> None:
    """Raise TraceError unless the target's files are those of the recording."""
    if trace.fingerprint != fingerprint:
        raise TraceError(
            f"trace: expected one of {path} ({fingerprint}), got one of {trace.target} ({trace.fingerprint}); "
            "record one with this model"
        )
