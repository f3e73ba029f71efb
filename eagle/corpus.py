"""What heads learn from: texts and the frozen target's states for them, computed as they are wanted or kept on disk.

A batch is made from its number alone, so that it is the same whether it comes from the disk or not. The target runs as
a plain float32 forward through transformers. Not here: reading text files, and the training itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import atomic_write, save_tensors
from paceline.training.frozen_model import FrozenModel

ROWS = 64
"""Texts in a batch of the corpus, and in a file."""
_FORWARD = 8  # texts in one forward of the target


@dataclass(frozen=True, slots=True)
class Texts:
    """tokens [n, S] int64; last [n, S, H] after the final norm; streams [n, S, F] as the head reads them (bfloat16)."""

    tokens: Tensor
    last: Tensor
    streams: Tensor


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """How texts are made.

    length      tokens of a text, S; texts begin at its multiples in the data
    measured    texts that are not trained on: acceptance is measured where the target goes on with them greedily
    prompt      tokens of the data that it goes on from there
    keep_bytes  how much may be kept on disk; what goes beyond is computed anew whenever it is wanted
    seed        of the order of the data

    Raises:
        ConfigurationError: a number is out of range.
    """

    length: int = 256
    measured: int = 32
    prompt: int = 64
    keep_bytes: int = 2 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.prompt < self.length or self.measured < 1 or self.keep_bytes < 0:
            raise ConfigurationError(
                "prompt must be shorter than length, measured positive, and keep_bytes not negative"
            )


class FrozenTarget(FrozenModel):
    """The target as a plain forward. ``layers`` are the residual streams to keep; empty = the last hidden state."""

    def __init__(self, folder: Path, layers: tuple[int, ...]) -> None:
        super().__init__(folder)
        self.layers = layers
        self.head: Tensor = self._model.get_output_embeddings().weight.detach()
        self.embedding: Tensor = self._model.get_input_embeddings().weight.detach()
        self.norm: Tensor = self._model.get_decoder().norm.weight.detach()

    def block(self, index: int) -> dict[str, Tensor]:
        """Weights of one of the target's layers, by their short names."""
        found: dict[str, Tensor] = self._model.get_decoder().layers[index].state_dict()
        return found

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Texts:
        """States of texts [n, S]."""
        depth = len(self._model.get_decoder().layers)
        behind: list[Tensor] = []
        # transformers hands out the last stream only behind the norm; a hook sees it before.
        hook = self._model.get_decoder().norm.register_forward_pre_hook(lambda _, inputs: behind.append(inputs[0]))
        try:
            parts = [
                self._model.get_decoder()(p, output_hidden_states=True, use_cache=False).hidden_states
                for p in tokens.split(_FORWARD)
            ]
        finally:
            hook.remove()
        last = torch.cat([part[-1] for part in parts])
        if not self.layers:
            return Texts(tokens, last.bfloat16(), last.bfloat16())
        streams = [torch.cat([part[i] for part in parts]) if i < depth else torch.cat(behind) for i in self.layers]
        return Texts(tokens, last.bfloat16(), torch.cat(streams, -1).bfloat16())


class Corpus:
    """Batches of texts with the target's states, by number. ``stream`` [n] are the data's token ids, end to end.

    ``key`` tells it from a corpus of another target, of other data or with other options.
    """

    def __init__(self, target: FrozenTarget, stream: np.ndarray, options: CorpusOptions, *, folder: Path) -> None:
        room = len(stream) // options.length
        needed = ROWS + options.measured
        if room < needed:
            raise ConfigurationError(
                f"the data hold {len(stream)} tokens, and training needs at least {needed * options.length} ({ROWS} "
                f"texts of {options.length} to learn from and {options.measured} to measure on); give more"
            )
        self._target, self._stream, self._options = target, stream, options
        self._order = np.random.default_rng(options.seed).permutation(room)
        self.batches = (room - options.measured) // ROWS
        facts = {
            "target": target.fingerprint(),
            "layers": target.layers,
            "options": {**asdict(options), "keep_bytes": None},
            "data": hashlib.sha256(np.ascontiguousarray(stream).tobytes()).hexdigest(),
        }
        self.key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self._folder = folder / self.key

    @property
    def length(self) -> int:
        """Tokens of a text."""
        return self._options.length

    def batch(self, number: int) -> Texts:
        """Batch ``number`` (modulo how many there are), from the disk if it is kept there."""
        number %= self.batches
        path = self._folder / f"{number:06d}.safetensors"
        if path.is_file():
            found = load_file(path)
            return Texts(found["tokens"].to(torch.int64), found["last"], found.get("streams", found["last"]))
        texts = self._target.read(self._rows(range(number * ROWS, (number + 1) * ROWS)))
        self._keep(path, texts)
        return texts

    def measured(self) -> Texts:
        """Texts that the target went on with greedily, from the end of the order: no batch reaches there."""
        options = self._options
        prompts = self._rows(range(len(self._order) - options.measured, len(self._order)))[:, : options.prompt]
        return self._target.read(self._target.continued(prompts, options.length - options.prompt))

    def _rows(self, which: range) -> Tensor:
        length = self._options.length
        rows = [self._stream[at * length : (at + 1) * length] for at in self._order[which.start : which.stop]]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _keep(self, path: Path, texts: Texts) -> None:
        tensors = {"tokens": texts.tokens.to(torch.int32), "last": texts.last}
        if texts.streams is not texts.last and self._target.layers:
            tensors["streams"] = texts.streams
        size = sum(x.numel() * x.element_size() for x in tensors.values())
        with atomic_write(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        if size + sum(file.stat().st_size for file in path.parent.iterdir()) > self._options.keep_bytes:
            return
        save_tensors(path, tensors)
