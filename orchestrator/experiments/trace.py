"""Traces: the sequences of a target, and the proposals of drafters at every position of them.

With the rule ``match`` the sequence does not depend on drafter or draft length, so the proposals along one sequence
answer every query about depths, trees, lists and choices of drafters (`paceline.experiments.questions`).
`record_traces.py` records them.

A trace is one file: a header (JSON) and arrays (int32), gzip-compressed, with a checksum over all of it. It holds no
code, and reading it executes nothing.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigurationError, TraceError
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.outputs import FinishReason

MAGIC = b"paceline-trace\n"
VERSION = 3


@dataclass(frozen=True, slots=True)
class TraceText:
    """One prompt and its output.

    prompt      ids
    tokens      the output's ids, the last of which may stop it
    seed        seed of its sampling
    max_length  limit of the whole sequence
    """

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
    sampling     options of the sampling
    kv_buckets   buckets of the target's cache, whose ends no draft crosses
    texts, drafters
    provenance   of the recording
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
        """Return a recorded drafter by its name.

        Raises:
            ConfigurationError: it was not recorded.
        """
        for one in self.drafters:
            if one.name == name:
                return one
        names = ", ".join(one.name for one in self.drafters) or "none"
        raise ConfigurationError(
            f"drafter: expected a recorded one ({names}) or a text drafter, got {name!r}; correct the name"
        )


def save_trace(path: Path, trace: Trace) -> None:
    """Write a trace atomically.

    Raises:
        StorageError: it cannot be written.
    """
    numbers = array("i")
    header = {
        "target": trace.target,
        "fingerprint": trace.fingerprint,
        "sampling": dict(trace.sampling),
        "kv_buckets": list(trace.kv_buckets),
        "vocab_size": trace.vocab_size,
        "provenance": dict(trace.provenance),
        "texts": [_text_header(text, numbers) for text in trace.texts],
        "drafters": [_drafter_header(drafter, numbers) for drafter in trace.drafters],
    }
    text = json.dumps(header, default=str).encode()
    body = len(text).to_bytes(8, "little") + text + _little_endian(numbers).tobytes()
    packed = gzip.compress(body, mtime=0)
    checksum = hashlib.sha256(packed).digest()
    save_bytes(path, [MAGIC, VERSION.to_bytes(4, "little"), checksum, packed])


def load_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: it is not a trace, has another version, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: the file cannot be read ({error}); check the path and its permissions") from error
    start = len(MAGIC)
    if not data.startswith(MAGIC):
        raise TraceError(
            f"{path}: expected a trace; run `paceline experiment run` with traces: true, which writes them below "
            "traces/"
        )
    version = int.from_bytes(data[start : start + 4], "little")
    if version != VERSION:
        raise TraceError(f"{path}: expected a trace of version {VERSION}, got {version}; record it again")
    checksum, packed = data[start + 4 : start + 36], data[start + 36 :]
    if hashlib.sha256(packed).digest() != checksum:
        raise TraceError(f"{path}: the checksum differs; copy the trace again, or record it again")
    try:
        body = gzip.decompress(packed)
        length = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + length])
        numbers = array("i")
        numbers.frombytes(body[8 + length :])
        return _trace(header, iter(_little_endian(numbers)))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise TraceError(f"{path}: expected a trace, got another file ({error!r}); record it again") from error


def check_target(trace: Trace, fingerprint: str, path: str) -> None:
    """Reject a trace of another model.

    Raises:
        TraceError: the target's files differ from those of the recording.
    """
    if trace.fingerprint != fingerprint:
        raise TraceError(
            f"trace: expected one of {path} ({fingerprint}), got one of {trace.target} ({trace.fingerprint}); "
            "record one with this model"
        )


def _text_header(text: TraceText, numbers: array[int]) -> dict[str, object]:
    numbers.extend(text.prompt)
    numbers.extend(text.tokens)
    return {
        "key": text.key,
        "category": text.category,
        "prompt": len(text.prompt),
        "tokens": len(text.tokens),
        "seed": text.seed,
        "max_length": text.max_length,
        "finish_reason": text.finish_reason,
    }


def _drafter_header(drafter: RecordedDrafter, numbers: array[int]) -> dict[str, object]:
    for proposals in drafter.proposals:
        for nodes in proposals:
            numbers.append(len(nodes))
            numbers.extend(nodes)
    for confidences in drafter.confidences or ():
        for values in confidences:
            numbers.frombytes(array("f", values).tobytes())
    return {
        "name": drafter.name,
        "draft": drafter.draft,
        "k": drafter.k,
        "parents": drafter.parents,
        "dynamic": drafter.dynamic,
        "max_positions": drafter.max_positions,
        "prefixes": drafter.prefixes,
        "counts": [len(proposals) for proposals in drafter.proposals],
        "confidence_threshold": drafter.confidence_threshold,
        "key": drafter.key,
        "has_confidences": drafter.confidences is not None,
    }


def _trace(header: dict[str, Any], numbers: Iterator[int]) -> Trace:
    texts = []
    for row in header["texts"]:
        sizes = row.pop("prompt"), row.pop("tokens")
        prompt, tokens = (_take(numbers, size) for size in sizes)
        texts.append(TraceText(prompt=prompt, tokens=tokens, **row))
    drafters = []
    for row in header["drafters"]:
        counts: Sequence[int] = row.pop("counts")
        proposals = tuple(tuple(_take(numbers, next(numbers)) for _ in range(count)) for count in counts)
        parents, confidences = row.pop("parents"), None
        if row.pop("has_confidences"):
            confidences = tuple(tuple(_floats(numbers, len(nodes)) for nodes in one) for one in proposals)
        own = None if parents is None else tuple(parents)
        drafters.append(RecordedDrafter(parents=own, proposals=proposals, confidences=confidences, **row))
    return Trace(
        header["target"],
        header["fingerprint"],
        header["sampling"],
        tuple(header["kv_buckets"]),
        header["vocab_size"],
        tuple(texts),
        tuple(drafters),
        header["provenance"],
    )


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(count))


def _floats(numbers: Iterator[int], count: int) -> tuple[float, ...]:
    """Float32 values, whose bits are the numbers."""
    return tuple(array("f", array("i", _take(numbers, count)).tobytes()))


def _little_endian(numbers: array[int]) -> array[int]:
    import sys

    if sys.byteorder == "big":
        numbers = array("i", numbers)
        numbers.byteswap()
    return numbers
