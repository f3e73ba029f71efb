"""States as they are made on the device: zeros, for every local rank."""

from __future__ import annotations

import torch
import torch_neuronx


class StateInitializer(torch.nn.Module):
    def __init__(self, shapes, dtypes, local_ranks_size) -> None:
        super().__init__()
        self.shapes, self.dtypes, self.local_ranks_size = shapes, dtypes, local_ranks_size

    def forward(self):
        ranks = range(self.local_ranks_size)
        made = [{key: torch.zeros(shape, dtype=self.dtypes[key]) for key, shape in self.shapes.items()} for _ in ranks]
        torch_neuronx.RUNTIME.hold("states", made)
        return made
