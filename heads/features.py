"""Hidden states of the frozen target, from which heads learn: computed once and kept on disk.

Two ways: `write_features` computes all of them before the training, in files that an interrupted run resumes from;
`FeatureCache` computes them on request, and keeps them up to a limit. Sequences are cut out of a stream of tokens
(`cut`), or written by the target (`self_generate`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import atomic_write, save_tensors
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.heads.options import TEXTS_PER_FILE, CachedTextOptions

Report = Callable[[str, int, int], None]
"""(current task, amount done, total amount)"""


def write_features(
    target: FrozenTarget, folder: Path, name: str, *, batches: Sequence[Callable[[], Tensor]], report: Report
) -> None:
    """Make batches of sequences, compute the target's hidden states, and store each batch in a file.

    Existing files are kept, so that an interrupted run resumes.
    """
    for index, batch in enumerate(batches):
        path = folder / f"{name}-{index:04d}.safetensors"
        if path.is_file():
            continue
        report(f"states of the target ({name})", index, len(batches))
        tokens = batch()
        states = torch.cat([target.states(part) for part in tokens.split(8)]).to("cpu", torch.bfloat16)
        save_tensors(path, {"tokens": tokens.to("cpu", torch.int32), "states": states})
    report(f"states of the target ({name})", len(batches), len(batches))


def read_features(folder: Path, *, prompt: int = 0) -> list[Texts]:
    """Read the sequences of `write_features`, one entry per file, in order of their names; ``prompt``: see
    `Texts.after`.
    """
    texts = []
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        one = Texts(tensors["tokens"].to(torch.int64), tensors["states"], tensors["states"])
        texts.append(one.after(prompt) if prompt else one)
    return texts


class FeatureCache:
    """Batches of sequences with the target's hidden states, by number, made on request and kept up to a limit.

    ``stream`` [n] are the token ids of the data, end to end. A batch depends only on its number, so that it is the same
    whether it comes from the disk or not.

    ``key`` identifies the target, data and options of these batches.
    """

    def __init__(self, target: FrozenTarget, stream: np.ndarray, options: CachedTextOptions, *, folder: Path) -> None:
        room = len(stream) // options.length
        needed = TEXTS_PER_FILE + options.eval_samples
        if room < needed:
            raise ConfigurationError(
                f"data: expected at least {needed * options.length} tokens ({TEXTS_PER_FILE} sequences of "
                f"{options.length} to train on and {options.eval_samples} to evaluate on), got {len(stream)}; give "
                "more"
            )
        self._target, self._stream, self._options = target, stream, options
        self._order = np.random.default_rng(options.seed).permutation(room)
        self.batches = (room - options.eval_samples) // TEXTS_PER_FILE
        facts = {
            "target": target.fingerprint(),
            "layers": target.layers,
            "options": {**asdict(options), "feature_cache_gb": None},
            "data": hashlib.sha256(np.ascontiguousarray(stream).tobytes()).hexdigest(),
        }
        self.key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self._folder = folder / self.key

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self._options.length

    def batch(self, number: int) -> Texts:
        """Return batch ``number`` (modulo the number of batches), from the disk if it is stored."""
        number %= self.batches
        path = self._folder / f"{number:06d}.safetensors"
        if path.is_file():
            tensors = load_file(path)
            texts = Texts(tensors["tokens"].to(torch.int64), tensors["last"], tensors.get("streams", tensors["last"]))
            return texts.to(self._target.device)
        texts = self._target.read(self._rows(range(number * TEXTS_PER_FILE, (number + 1) * TEXTS_PER_FILE)))
        self._keep(path, texts)
        return texts

    def eval_texts(self) -> Texts:
        """Sequences that the target continued greedily, from the end of the order: no batch contains them."""
        options = self._options
        length = options.prompt_length
        prompts = self._rows(range(len(self._order) - options.eval_samples, len(self._order)))[:, :length]
        return self._target.read(self._target.continued(prompts, options.length - length))

    def _rows(self, numbers: range) -> Tensor:
        length = self._options.length
        rows = [self._stream[at * length : (at + 1) * length] for at in self._order[numbers.start : numbers.stop]]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _keep(self, path: Path, texts: Texts) -> None:
        tensors = {"tokens": texts.tokens.to("cpu", torch.int32), "last": texts.last.cpu()}
        if texts.streams is not texts.last and self._target.layers:
            tensors["streams"] = texts.streams.cpu()
        size = sum(x.numel() * x.element_size() for x in tensors.values())
        with atomic_write(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        stored = sum(file.stat().st_size for file in path.parent.iterdir())
        if stored + size <= self._options.feature_cache_bytes:
            save_tensors(path, tensors)


def cut(stream: np.ndarray, count: int, length: int, *, seed: int) -> Tensor:
    """Cut sequences from evenly spread positions of a token stream, in random order. -> [count, length] int64

    Raises:
        ConfigurationError: the stream is too short for ``count`` sequences that do not overlap.
    """
    room = len(stream) // length
    if count > room:
        raise ConfigurationError(
            f"data: expected enough tokens for {count} sequences of {length}, got {len(stream)}, enough for {room}; "
            "give more"
        )
    places = np.random.default_rng(seed).permutation(room)[:count] * length
    return torch.from_numpy(np.stack([stream[at : at + length] for at in places]).astype(np.int64))


def self_generate(
    target: FrozenTarget, prompts: Tensor, length: int, *, temperatures: Sequence[float]
) -> list[Callable[[], Tensor]]:
    """Return makers of the target's continuations of prompts [n, S] to [<= `TEXTS_PER_FILE`, length] each, cycling
    through the temperatures.
    """

    def batch(index: int, part: Tensor) -> Tensor:
        torch.manual_seed(index)
        return target.continued(part, length - part.shape[1], temperature=temperatures[index % len(temperatures)])

    return [partial(batch, index, part) for index, part in enumerate(prompts.split(TEXTS_PER_FILE))]
