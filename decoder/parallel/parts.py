"""The tensors that ranks have in each other's place, in modules that are alike on all of them.

Not here: which part of a tensor a rank has (`paceline.decoder.parallel.sharding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn


def parts_of(first: nn.Module, others: Sequence[nn.Module]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Every parameter and buffer of rank 0's module, and what the modules of ranks 1 and up have under its name.

    What is one and the same tensor in all of them is another module's, and left out.
    """
    named = [_tensors(module) for module in others]
    for name, tensor in _tensors(first).items():
        parts = [tensors[name] for tensors in named]
        if any(part is not tensor for part in parts):
            yield tensor, parts


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    return tensors
