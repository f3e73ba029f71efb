"""A process in which an EAGLE head keeps learning from finished texts, at idle priority (decision 0023).

It scores three heads on a share of the texts, before it learns from them: the shipped one, the live one, which drafts,
and the learner. When the learner is better than the live head, it is written and becomes the live one. Run as a module
it reads `LearningSettings` on the first line of stdin, then a finished text per line; it writes a `LearningProgress`
per line. The process that drafts is `paceline.learner`.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.eagle import checkpoint
from paceline.eagle.config import EagleTraining
from paceline.eagle.train import acceptance, continued, objective, write
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import Conversation, read_conversations
from paceline.heads.frozen_model import FrozenTarget, Texts, products
from paceline.heads.trainer import optimizers

ROWS = 8
"""Texts of a step."""

PASSES = 3
"""Times that each text is learnt from."""

SHADOW = 4
"""One text of so many is scored before it is learnt from."""

_KEPT = 512  # texts to repeat
_LONGEST = 1024  # tokens of a text that are read
_SCORED = 24  # scored texts over which the comparison is averaged, with weights that fall
_BETTER = 1.01  # the learner replaces the live head from this ratio of acceptance lengths on
_WORSE = 0.98  # below this one the shipped head comes back
_RATE = 3e-4
_WARM_UP = 10  # steps


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """Folders of the target, of the shipped head and for new heads; depth of the drafts."""

    target: str
    head: str
    folder: str
    depth: int
    threads: int = 1


@dataclass(frozen=True, slots=True)
class FinishedText:
    """Token ids of a finished text, the first ``prompt`` of which are the prompt's."""

    prompt: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class LearningProgress:
    """Counts so far.

    acceptance_length  expected tokens of a round at the positions of the last scored texts, of the shipped, live and
                       learning head; {} = none is scored yet
    head               folder of a head to draft with from now on; None: no change
    """

    texts: int
    tokens: int
    acceptance_length: dict[str, float] = field(default_factory=dict)
    head: str | None = None


def current_head(folder: Path, shipped: Path) -> Path | None:
    """Return the head that an earlier process left, if it was learnt from this shipped head."""
    try:
        found = json.loads((folder / "current.json").read_text(encoding="utf-8"))
        head = folder / str(found["head"])
        return head if found["shipped"] == fingerprint(shipped) and head.is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fingerprint(head: Path) -> list[list[object]]:
    """Return names, sizes and times of a head's files."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(head.iterdir())]


class Learning:
    """A head that learns from finished texts. ``head``: the shipped one."""

    def __init__(self, target: Path, head: Path, folder: Path, *, depth: int) -> None:
        sizes = ModelConfig.from_pretrained(target)
        found = checkpoint.load(head, sizes)
        precision = _faster_precision()
        self._target = FrozenTarget(target, found.config.layers, precision=precision)
        self._output = self._target.output.detach()
        self.vocabulary = DraftVocab(found.weights.get("ids", torch.arange(sizes.vocab_size)), sizes.vocab_size)
        self._shipped_folder, self._folder, self._depth = head, folder, depth
        began, earlier = head, found
        if (left := current_head(folder, head)) is not None:
            with suppress(CheckpointError):  # a damaged one is replaced by the next
                began, earlier = left, checkpoint.load(left, sizes)
        load = [(head, found), *[(began, earlier)] * 2]
        self._shipped, self._live, self.network = (continued(one, self._target, where=place) for place, one in load)
        self._options = EagleTraining(
            batch_size=ROWS, learning_rate=_RATE, ttt_steps=max(2, depth), tokens=1, precision=precision
        )
        self._optimizers = optimizers(self.network, _RATE)
        self._new: deque[FinishedText] = deque()
        self._kept: list[FinishedText] = []
        self._rng = random.Random(0)
        self._repeats = self._steps = self._taken = self._scored = self._since = 0
        self._lengths: dict[str, float] = {}
        self.texts = self.tokens = 0

    def add(self, text: FinishedText) -> None:
        """Add a finished text, unless its answer is too short to learn from."""
        tokens = text.tokens[:_LONGEST]
        if len(tokens) - text.prompt >= self._depth + 2:
            self._new.append(FinishedText(text.prompt, tokens))
            self.texts += 1
            self.tokens += len(tokens) - text.prompt

    @property
    def idle(self) -> bool:
        """Whether every text has been learnt from often enough."""
        return not self._new and self._repeats <= 0

    def step(self) -> Path | None:
        """Learn from one batch. Returns the folder of the head to draft with from now on; None: no change."""
        fresh = [self._new.popleft() for _ in range(min(ROWS, len(self._new)))]
        shadow = [text for index, text in enumerate(fresh, self._taken) if index % SHADOW == 0]
        self._taken += len(fresh)
        if shadow:
            self._score(shadow)
        self._repeats += len(fresh) * (PASSES - 1) - (ROWS - len(fresh))
        again = self._rng.sample(self._kept, min(ROWS - len(fresh), len(self._kept)))
        for text in fresh:  # of more than are kept, each is as likely to be among them
            if len(self._kept) < _KEPT:
                self._kept.append(text)
            else:
                self._kept[self._rng.randrange(_KEPT)] = text
        self._learn(self._read(fresh + again))
        return self._decide() if shadow else None

    def progress(self, head: Path | None = None) -> LearningProgress:
        lengths = {name: round(value, 3) for name, value in self._lengths.items()}
        return LearningProgress(self.texts, self.tokens, lengths, None if head is None else str(head))

    def _read(self, texts: Sequence[FinishedText]) -> Texts:
        """Return texts in rows of one length, with the target's states; their answers are counted."""
        rows = [Conversation(np.array(x.tokens), np.arange(len(x.tokens)) >= x.prompt) for x in texts]
        return read_conversations(self._target, rows, max(len(row.tokens) for row in rows))

    def _learn(self, texts: Texts) -> None:
        with products(self._options.precision):
            loss = objective(self.network, texts, self._options, head=self._output, vocabulary=self.vocabulary)
        loss.backward()
        if math.isfinite(float(loss.detach())):
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self._steps += 1
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = _RATE * min(1.0, self._steps / _WARM_UP)
                optimizer.step()
        self.network.zero_grad()

    def _score(self, texts: Sequence[FinishedText]) -> None:
        read = self._read(texts)
        self._scored += len(texts)
        self._since += len(texts)
        share = max(min(1.0, len(texts) / _SCORED), len(texts) / self._scored)
        heads = {"shipped": self._shipped, "live": self._live, "learner": self.network}
        for name, network in heads.items():
            chains = acceptance(network, read, depth=self._depth, head=self._output, vocabulary=self.vocabulary, skip=0)
            before = self._lengths.get(name, 0.0)
            self._lengths[name] = before + share * (1 + sum(chains) - before)

    def _decide(self) -> Path | None:
        """Compare the heads. Returns the folder of the next live head, if there is one."""
        if self._since < _SCORED:
            return None
        shipped, live, learner = (self._lengths[name] for name in ("shipped", "live", "learner"))
        if learner > _BETTER * max(live, shipped):
            return self._publish()
        if live < _WORSE * shipped:
            self._live.load_state_dict(self._shipped.state_dict())
            self._lengths["live"], self._since = shipped, 0
            with suppress(OSError):
                (self._folder / "current.json").unlink()
            return self._shipped_folder
        return None

    def _publish(self) -> Path:
        """Write the learner and make it the live head; the one before it stays for a reader that is late."""
        self._live.load_state_dict(self.network.state_dict())
        self._lengths["live"], self._since = self._lengths["learner"], 0
        numbers = [int(path.name[5:]) for path in self._folder.glob("head-*") if path.name[5:].isdecimal()]
        for number in count(max([*numbers, 0]) + 1):  # other replicas of the model may write heads, too
            folder = self._folder / f"head-{number}"
            with suppress(FileExistsError):
                folder.mkdir()
                break
        write(folder, self.network, self.vocabulary, shares=[])
        state = {"head": folder.name, "shipped": fingerprint(self._shipped_folder)}
        save_bytes(self._folder / "current.json", [json.dumps(state).encode()])
        for old in numbers:
            if old < number - 1:
                shutil.rmtree(self._folder / f"head-{old}", ignore_errors=True)
        return folder


def _faster_precision() -> str:
    """Return the precision in which this machine multiplies faster; bf16 needs instructions for it."""
    x, seconds = torch.randn(256, 512), {}
    for precision in ("f32", "bf16"):
        with products(precision), torch.no_grad():
            times = []
            for _ in range(5):
                begin = perf_counter()
                x @ x.T
                times.append(perf_counter() - begin)
            seconds[precision] = min(times)
    return min(seconds, key=lambda name: seconds[name])


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(19)


def main() -> None:
    _lower_priority()
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a line that a library prints is not a report
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    settings = LearningSettings(**json.loads(sys.stdin.buffer.readline()))
    torch.set_num_threads(settings.threads)
    texts: deque[FinishedText] = deque(maxlen=_KEPT)
    arrived = threading.Event()

    def receive() -> None:
        for line in sys.stdin.buffer:
            texts.append(FinishedText(**json.loads(line)))
            arrived.set()
        os._exit(0)  # the parent has ended; there is nothing to save

    threading.Thread(target=receive, daemon=True, name="paceline-texts").start()
    try:
        learning = Learning(Path(settings.target), Path(settings.head), Path(settings.folder), depth=settings.depth)
    except CheckpointError as error:
        sys.exit(str(error))
    while True:
        arrived.clear()
        while texts:
            learning.add(texts.popleft())
        if learning.idle:
            arrived.wait()
            continue
        head = learning.step()
        reports.write(json.dumps(asdict(learning.progress(head))) + "\n")
        reports.flush()


if __name__ == "__main__":
    main()
