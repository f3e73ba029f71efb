"""How good heads are: at which rank each head has the token that the target goes on to choose.

Measured on kept windows, place by place, for all heads at once; trees are built from these ranks
(`paceline.medusa.search`). Teacher-forced: the text is given, and the target's choice is its greedy one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.medusa.network import Heads
from paceline.training.features import Windows

TOP = 10
"""Ranks that are looked at, as Medusa's trees do."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """ranks [n, heads] int64: of the target's token in each head at n places; `TOP` where it is none of the best."""

    ranks: Tensor

    @property
    def places(self) -> int:
        """How many places were looked at."""
        return len(self.ranks)

    def top(self) -> list[list[float]]:
        """For every head the share of places where the token is among the best 1, 2, ... `TOP`."""
        return [
            [float((self.ranks[:, head] <= rank).double().mean()) for rank in range(TOP)]
            for head in range(self.ranks.shape[1])
        ]

    def write(self, path: Path) -> None:
        """Write the table as JSON."""
        table = [[round(share, 4) for share in row] for row in self.top()]
        with atomic_write(path):
            path.write_text(json.dumps({"places": self.places, "top": table}) + "\n", encoding="utf-8")


@torch.no_grad()
def measure(heads: Heads, windows: Sequence[Windows], output: Tensor) -> Accuracy:
    """Ranks at every place of the windows behind their prompts.

    ``output`` [V, H] is the target's output layer. A place counts where the text itself is the target's greedy choice
    up to the last head's token: elsewhere a greedy decoder would not come by.

    Raises:
        ConfigurationError: there is no such place.
    """
    ranks = []
    count = heads.config.heads
    for part in windows:
        skip = part.first
        for at in range(0, len(part), 8):
            rows, device = slice(at, at + 8), output.device
            tokens, states = part.tokens[rows].to(device), part.states[rows].to(device).float()
            counted = None if part.counted is None else part.counted[rows].to(device)
            choices = (states @ output.T).argmax(-1)  # [n, L]; of the token behind each place
            last = tokens.shape[1] - count - 1
            logits = heads(states[:, skip:last].flatten(0, 1), torch.nn.functional.linear)
            targets = torch.stack([choices[:, skip + i + 1 : last + i + 1].flatten() for i in range(count)], 1)
            target_logits = logits.gather(-1, targets.unsqueeze(-1))
            rank = (~(logits <= target_logits)).sum(-1).clamp(max=TOP)  # what is NaN is right nowhere
            agreed = choices[:, :-1] == tokens[:, 1:]
            if counted is not None:  # of every head, the token must be one that is drafted at all
                agreed &= counted[:, 1:]
            all_agreed = torch.stack([agreed[:, skip + i : last + i].flatten() for i in range(count)], 1).all(1)
            ranks.append(rank[all_agreed].cpu())
    if not sum(map(len, ranks)):
        raise ConfigurationError("no text was long enough to measure the heads on; give more or longer ones")
    return Accuracy(torch.cat(ranks))
