"""What Medusa heads are trained and measured on: windows of tokens and the target's states for them, kept on disk.

The target runs as a plain float32 forward over whole windows, through transformers, without gradients. Its states are
those that a decoder hands to the heads: after the final norm. Not here: reading text files, and the training itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import save_tensors
from paceline.training.frozen_model import FrozenModel

Report = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is)"""

SHARD = 64
"""Windows in one file of states."""


@dataclass(frozen=True, slots=True)
class Windows:
    """tokens [n, L] int64, states [n, L, H]; ``states[:, t]`` predicts ``tokens[:, t + 1]``.

    ``first`` is the first place that is not inside a prompt.
    """

    tokens: Tensor
    states: Tensor
    first: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


class FrozenTarget(FrozenModel):
    """The target as a plain forward, for training only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.output = torch.nn.Parameter(self._model.get_output_embeddings().weight.detach(), requires_grad=False)

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """tokens [n, L] -> [n, L, H] float32, after the final norm."""
        found: Tensor = self._model.get_decoder()(tokens, use_cache=False).last_hidden_state
        return found


def cut(stream: np.ndarray, count: int, length: int, *, seed: int) -> Tensor:
    """Windows from evenly spread places of a token stream, in random order. -> [count, length] int64

    Raises:
        ConfigurationError: the stream is too short for as many that do not overlap.
    """
    room = len(stream) // length
    if count > room:
        raise ConfigurationError(
            f"the data hold {len(stream)} tokens, enough for {room} windows of {length} and not for {count}; give more"
        )
    places = np.random.default_rng(seed).permutation(room)[:count] * length
    return torch.from_numpy(np.stack([stream[at : at + length] for at in places]).astype(np.int64))


def own_text(
    target: FrozenTarget, prompts: Tensor, length: int, *, temperatures: Sequence[float]
) -> list[Callable[[], Tensor]]:
    """The target's own continuations of prompts [n, S] to [<= `SHARD`, length] each, temperatures by turns."""

    def batch(index: int, part: Tensor) -> Tensor:
        torch.manual_seed(index)
        return target.continued(part, length - part.shape[1], temperature=temperatures[index % len(temperatures)])

    return [partial(batch, index, part) for index, part in enumerate(prompts.split(SHARD))]


def keep(
    target: FrozenTarget, folder: Path, name: str, *, batches: Sequence[Callable[[], Tensor]], report: Report
) -> None:
    """Make batches of windows, compute the target's states, and keep each batch in a file.

    Files that are there already are left alone, so that an interrupted run goes on where it was.
    """
    for index, batch in enumerate(batches):
        path = folder / f"{name}-{index:04d}.safetensors"
        if path.is_file():
            continue
        report(f"states of the target ({name})", index, len(batches))
        tokens = batch()
        states = torch.cat([target.states(part) for part in tokens.split(8)]).to(torch.bfloat16)
        save_tensors(path, {"tokens": tokens.to(torch.int32), "states": states})
    report(f"states of the target ({name})", len(batches), len(batches))


def kept(folder: Path, *, first: int = 0) -> list[Windows]:
    """All windows in a folder, one entry for each file, in order of their names; ``first`` as in `Windows`."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        found.append(Windows(tensors["tokens"].to(torch.int64), tensors["states"], first))
    return found
