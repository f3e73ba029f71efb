"""Names for the weights and states that the graphs of a process share, whichever module a graph reaches them through.

The SDK shares by name, and two steps may reach one tensor by two paths, or two tensors by the same one. A tensor gets
one name for as long as the process lives. Not here: copies on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.decoder.compile.lowering import Lowered, constants_of, state_of
from paceline.decoder.parallel.parts import parts_of

TILE = 128


def tiled(tensor: Tensor) -> Tensor:
    """A cache [slots, G, R, D] as [slots, G, 128, R / 128, D], over the same numbers in the same order; anything else,
    and a cache whose rows are no multiple of 128, as it is.

    A hint for the compiler, which NxD Inference gives it where writes into a cache follow each other in one graph
    (`kv_cache_tiling`, release 2.29). Whether it helps here, only a chip can tell.
    """
    if tensor.dim() != 4 or tensor.shape[2] % TILE or tensor.shape[2] == TILE:
        return tensor
    return tensor.view(*tensor.shape[:2], TILE, -1, tensor.shape[3])


class Names:
    """From tensors of the host to the names they have on the device. ``tiles``: whether states are `tiled` there."""

    def __init__(self, *, tiles: bool = False) -> None:
        self._tiles = tiles
        self._names = WeakTensorKeyDictionary()
        self._changed: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}
        self._bodies: list[str] = []  # what each model that was registered is called
        self._parts = WeakTensorKeyDictionary()  # from rank 0's tensors to those of the other ranks, in order

    def register(self, body: nn.Module, called: str) -> None:
        """Name a model's tensors by where they are in it, whichever graph is traced first, in whichever process.

        A second model of that ``called`` has its number in the names.
        """
        number = self._bodies.count(called)
        self._bodies.append(called)
        for path, tensor in (*body.named_parameters(), *body.named_buffers()):
            if tensor not in self._names:
                self._names[tensor] = f"m{called}_{number}_{path.replace('.', '_')}"

    def of(self, module: nn.Module, lowered: Lowered) -> dict[str, tuple[str, Tensor]]:
        """For every state of a lowered step: its name on the device, and the tensor."""
        constants = constants_of(lowered)
        named: dict[str, tuple[str, Tensor]] = {}
        for inner, tensor in state_of(module, lowered).items():
            if inner in constants:
                tensor = self._same(tensor)
            if tensor not in self._names:
                self._names[tensor] = f"t{len(self._names)}"
            name: str = self._names[tensor]
            named[inner] = (name, tensor)
            here, elsewhere = self._changed, self._fixed
            if inner not in lowered.changed:
                here, elsewhere = elsewhere, here
            # To the SDK a tensor that a graph only reads is a weight, and a weight is no state of another graph.
            assert name not in elsewhere, f"{inner} is changed by one graph and only read by another"
            here[name] = tensor
        return named

    def find(self, tensor: Tensor) -> str:
        """The name of a tensor that some graph has; nothing if none has it."""
        name: str = self._names.get(tensor, "")
        return name

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """Know what the other ranks have in the place of rank 0's weights and states: modules of the same names."""
        for tensor, parts in parts_of(first, others):
            self._parts[tensor] = parts

    def states(self, ranks: int = 1) -> list[dict[str, Tensor]]:
        """Tensors that some graph changes, by name, for every rank. What is not divided, each rank has a copy of."""
        for tensor in self._changed.values():
            if tensor not in self._parts:
                self._parts[tensor] = [tensor.clone() for _ in range(1, ranks)]
        return [
            {name: self.laid(self._of(tensor, rank)) for name, tensor in self._changed.items()} for rank in range(ranks)
        ]

    def weights(self, ranks: int = 1) -> list[dict[str, Tensor]]:
        """Tensors that no graph changes, by name, for every rank. What is not divided, all ranks share."""
        return [{name: self._of(x, rank).detach() for name, x in self._fixed.items()} for rank in range(ranks)]

    def laid(self, state: Tensor) -> Tensor:
        """A state of the host in its shape on the device, over the same numbers."""
        return tiled(state) if self._tiles else state

    def _of(self, tensor: Tensor, rank: int) -> Tensor:
        if not rank or tensor not in self._parts:
            return tensor
        part: Tensor = self._parts[tensor][rank - 1]
        return part

    def _same(self, constant: Tensor) -> Tensor:
        """A constant of tracing that is already known, if there is one: each trace makes its own copy."""
        for known in self._fixed.values():
            if known in self._parts:
                continue  # the other ranks have something else in its place
            if known.shape == constant.shape and known.dtype == constant.dtype and bool((known == constant).all()):
                return known
        return constant
