"""Texts to learn from: cut out of a stream of tokens, or written by the target itself. Not here: reading text files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.training.frozen_model import FrozenTarget
from paceline.training.options import TEXTS_PER_FILE


def cut(stream: np.ndarray, count: int, length: int, *, seed: int) -> Tensor:
    """Texts from evenly spread places of a token stream, in random order. -> [count, length] int64

    Raises:
        ConfigurationError: the stream is too short for as many that do not overlap.
    """
    room = len(stream) // length
    if count > room:
        raise ConfigurationError(
            f"the data hold {len(stream)} tokens, enough for {room} texts of {length} and not for {count}; give more"
        )
    places = np.random.default_rng(seed).permutation(room)[:count] * length
    return torch.from_numpy(np.stack([stream[at : at + length] for at in places]).astype(np.int64))


def self_generate(
    target: FrozenTarget, prompts: Tensor, length: int, *, temperatures: Sequence[float]
) -> list[Callable[[], Tensor]]:
    """The target's own continuations of prompts [n, S] to [<= `TEXTS_PER_FILE`, length] each, temperatures by turns."""

    def batch(index: int, part: Tensor) -> Tensor:
        torch.manual_seed(index)
        return target.continued(part, length - part.shape[1], temperature=temperatures[index % len(temperatures)])

    return [partial(batch, index, part) for index, part in enumerate(prompts.split(TEXTS_PER_FILE))]
