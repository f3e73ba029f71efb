"""`paceline selftest --batch-invariance`: check whether a row's bits depend on the number of rows computed with it.

A row is decoded alone, and again as one of M: in a window of M tokens of its sequence (as in verification), and in a
batch of M sequences. Logits are compared bit by bit. If they differ, a near-tie of two tokens may be decided
differently, so that the output of a speculative round may differ from plain decoding.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.checks import selftest
from paceline.core.errors import ConfigurationError, PacelineError
from paceline.decoder import steps
from paceline.decoder.backends.base import make
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.models.config import ModelConfig

MOST = 17
"""Default maximum of M: one more than the sixteen rows of many tiles."""

FORMATS = ("f32", "bf16")
PROMPT, TEXTS = 8, 4
"""Number of tokens decoded before the compared rows; number of sequences whose windows are compared."""

_POSITIONS = 128
_LIMIT = 64

Shape = Literal["window", "batch"]


@dataclass(frozen=True, slots=True)
class RowCount:
    """Comparison of M rows computed together, in a "window" of a sequence or a "batch", with separate ones.

    outputs, differing  logits compared; of them in any bit
    tokens, other       rows compared; of them with another most likely token
    largest             difference of two logits
    """

    shape: Shape
    rows: int
    outputs: int
    differing: int
    tokens: int
    other: int
    largest: float


@dataclass(frozen=True, slots=True)
class Series:
    """Counts of one backend and number format. ``promised``: its kernels declare that bits do not depend on M;
    ``error``: why some or all are missing.
    """

    backend: str
    amp: str
    promised: bool
    counts: tuple[RowCount, ...]
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether it was measured, and what is promised holds."""
        return not self.error and not (self.promised and any(count.differing for count in self.counts))


def check(target: Path | None, most: int) -> None:
    """Check the settings before anything is loaded. Raises ConfigurationError for ``most``, CheckpointError for
    ``target``.
    """
    if not 1 <= most <= _LIMIT:
        raise ConfigurationError(f"rows: expected 1 to {_LIMIT}, got {most}; correct it")
    if target is not None:
        ModelConfig.from_pretrained(target)


def available(backend: str | None) -> tuple[list[str], dict[str, str]]:
    """The backends to measure, and why others cannot run on this machine. ``backend``: one to measure;
    ConfigurationError: unknown, BackendError: cannot run.
    """
    if backend is not None:
        make(backend)
        return [backend], {}
    able, missing = [], {}
    for name in BACKENDS:
        try:
            make(name)
        except (PacelineError, ImportError) as error:
            missing[name] = str(error)
        else:
            able.append(name)
    return able, missing


def run(
    backends: Sequence[str],
    target: Path | None = None,
    *,
    most: int = MOST,
    say: Callable[[str], None] = lambda _line: None,
) -> Iterator[Series]:
    """Measure each backend in each number format, M from 1 to ``most``. A series that raises counts as failed. Without
    a ``target`` it is a random model of two layers; ``say`` receives messages about compilation.
    """
    with _folder(target) as folder:
        for backend in backends:
            for amp in FORMATS:
                counts: list[RowCount] = []
                promised, error = False, ""
                try:
                    promised = make(backend).kernels.batch_invariant
                    counts.extend(_measure(backend, amp, folder, most=most, say=say))
                except Exception as problem:  # on untested hardware anything may fail, and the report must contain it
                    error = f"{type(problem).__name__}: {problem}"
                yield Series(backend, amp, promised, tuple(counts), error)


def report(series: Sequence[Series], missing: dict[str, str]) -> str:
    """Return the table: logits that differ from those of a row computed separately, and their share, by M; then sums,
    and missing backends.
    """
    columns = [(one, shape) for one in series for shape in ("window", "batch")]
    heads = [f"{one.backend} {one.amp} {shape}" for one, shape in columns]
    by_rows = [{count.rows: count for count in one.counts if count.shape == shape} for one, shape in columns]
    every = sorted({rows for counts in by_rows for rows in counts})
    lines = ["| M | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for rows in every:
        cells = [_share(counts[rows]) if rows in counts else "" for counts in by_rows]
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
    head = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.platform()}"
    return "\n".join([head, *lines, *map(_summary, series), *(f"- {name}: {why}" for name, why in missing.items())])


def _share(count: RowCount) -> str:
    return "0" if not count.differing else f"{count.differing} ({100 * count.differing / count.outputs:.1f} %)"


def _summary(one: Series) -> str:
    differing, outputs = (sum(getattr(count, name) for count in one.counts) for name in ("differing", "outputs"))
    other, tokens = (sum(getattr(count, name) for count in one.counts) for name in ("other", "tokens"))
    largest = max((count.largest for count in one.counts), default=0.0)
    seen = f"{differing} of {outputs} logits differ, by {largest:.2g} at most; {other} of {tokens} likeliest tokens"
    verdict = f"; {one.error}" if one.error else "; PROMISED TO BE 0" if not one.passed else ""
    return f"- {one.backend}, {one.amp}: {seen}{verdict}"


@contextmanager
def _folder(target: Path | None) -> Iterator[Path]:
    with ExitStack() as stack:
        if target is None:
            target = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-selftest-"))) / "target"
            selftest.save_models(target, target.parent / "draft")
        yield target


def _measure(backend: str, amp: str, folder: Path, *, most: int, say: Callable[[str], None]) -> Iterator[RowCount]:
    """Windows on one decoder, which also computes the separate rows; then a decoder for each batch size."""
    decoder = _load(backend, amp, folder, slots=1, say=say)
    texts = torch.randint(
        decoder.config.vocab_size,
        (max(TEXTS, most), PROMPT + most),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.int32,
    )
    alone, windows = [], []  # [most, V] of the first texts, [1, V] of the others; the first texts' in every window
    for index, text in enumerate(texts):
        _read(decoder, text[None, :PROMPT])
        tail = text[None, PROMPT:]
        alone.append(torch.cat([_window(decoder, tail[:, i : i + 1], i) for i in range(most if index < TEXTS else 1)]))
        if index < TEXTS:  # a window rewrites its own rows of the cache, and none before them
            windows.append([_window(decoder, tail[:, :rows], 0) for rows in range(1, most + 1)])
    for rows, together in enumerate(zip(*windows, strict=True), 1):
        yield _compared("window", rows, torch.cat(together), alone=torch.cat([x[:rows] for x in alone[:TEXTS]]))
    for rows in range(1, most + 1):
        decoder.close()
        del decoder  # a large model must not be in memory twice
        decoder = _load(backend, amp, folder, slots=rows, say=say)
        _read(decoder, texts[:rows, :PROMPT])
        beside = _window(decoder, texts[:rows, PROMPT : PROMPT + 1], 0)
        yield _compared("batch", rows, beside, alone=torch.cat([x[:1] for x in alone[:rows]]))
    decoder.close()


def _load(backend: str, amp: str, folder: Path, *, slots: int, say: Callable[[str], None]) -> SamplingDecoder:
    decoder = AutoDecoder.from_pretrained(
        folder,
        batch_size=slots,
        n_positions=[_POSITIONS],
        context_length_estimate=[32],
        amp=amp,
        backend=backend,
    )
    decoder.on_graph = lambda event: say(f"{backend}, {amp}: {event.message}") if event.message else None
    return decoder


def _read(decoder: SamplingDecoder, tokens: Tensor) -> None:
    """Read the first tokens of sequences, [B, PROMPT], token by token; later rows of the cache do not count."""
    for place in range(PROMPT):
        _window(decoder, tokens[:, place : place + 1], place - PROMPT)


def _window(decoder: SamplingDecoder, tokens: Tensor, ahead: int) -> Tensor:
    """Return the logits of tokens [B, T], ``ahead`` rows after the prompt. -> [B * T, V] float32, in new memory"""
    row = torch.full((len(tokens),), PROMPT + ahead, dtype=torch.int32)
    logits, _ = steps.window(decoder, tokens.contiguous(), row, bucket=decoder.kv_buckets[-1])
    return logits.flatten(0, 1).clone()


def _compared(shape: Shape, rows: int, together: Tensor, *, alone: Tensor) -> RowCount:
    differing = together.view(torch.int32) != alone.view(torch.int32)
    return RowCount(
        shape,
        rows,
        outputs=differing.numel(),
        differing=int(differing.sum()),
        tokens=len(alone),
        other=int((together.argmax(-1) != alone.argmax(-1)).sum()),
        largest=float((together - alone).abs().max()),
    )
