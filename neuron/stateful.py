"""A lowered step in the form that the SDK's tracer takes, with the SDK's own top-k and attention over prompts in it.

Not here: the tracing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.core import reduce
from paceline.decoder.parallel.collectives import Collectives
from paceline.neuron.graph_product import xla_product
from paceline.neuron.lowering import Attention, Lowered

MAX_INPUTS = 16
_TOPK_MULTIPLE = 8


class Stateful(nn.Module):
    """A lowered step as the tracer wants it: weights and states of its own, and states replaced, never written into.

    Its inputs are named and optional behind the first, the same for all graphs: one `NxDModel` holds only graphs of one
    signature. ``tensors`` are the host's, by the names that all graphs of the process share.
    """

    def __init__(
        self,
        lowered: Lowered,
        tensors: dict[str, tuple[str, Tensor]],
        ranks: Collectives | None = None,
        *,
        attention: Attention | None = None,
    ) -> None:
        super().__init__()
        self._lowered, self._ranks, self._attention = lowered, ranks, attention
        self.shared = {inner: name for inner, (name, _) in tensors.items()}
        for inner, (name, tensor) in tensors.items():
            if hasattr(self, name):
                continue
            if inner in lowered.changed or not isinstance(tensor, nn.Parameter):
                self.register_buffer(name, tensor)
            else:
                # A parameter of its own, over the same numbers: the tracer moves parameters to its device in place.
                self.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))

    def step(self, inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
        """The step on its inputs x0, x1, ...; those that a graph does not have are None."""
        present = [x for x in inputs if x is not None]
        state = {inner: getattr(self, name) for inner, name in self.shared.items()}
        changed, outputs = self._lowered.run(
            state, present, ranks=self._ranks, topk=device_topk, product=xla_product, attention=self._attention
        )
        for inner, value in changed.items():
            setattr(self, self.shared[inner], value)
        return tuple(outputs)


def input_names() -> list[str]:
    """Names of a traced graph's inputs, in order."""
    return [f"x{place}" for place in range(MAX_INPUTS)]


def _forward() -> Callable[..., tuple[Tensor, ...]]:
    """The method that the tracer reads the inputs from: one parameter each, all but the first optional.

    It is generated, so that its own signature is the one that is declared: the tracer refuses ``**inputs``.
    """
    first, *more = input_names()
    parameters = ", ".join([first, *(f"{name}=None" for name in more)])
    namespace: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
    text = f"def forward(self, {parameters}):\n    return self.step([{', '.join([first, *more])}])\n"
    exec(compile(text, "<inputs of a traced graph>", "exec"), namespace)  # names of this file alone
    return namespace["forward"]


Stateful.forward = _forward()


def device_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The SDK's top-k (custom call AwsNeuronTopK) in place of `paceline.decoder.parallel.vocab_part.topk`.

    It takes rows [n, width] whose width is a multiple of 8; its order among equals is not documented, and nothing here
    depends on it.
    """
    operators = importlib.import_module("torch_neuronx.xla_impl.ops")
    width, rows = x.shape[-1], x.reshape(-1, x.shape[-1])
    if missing := -width % _TOPK_MULTIPLE:
        rows = nn.functional.pad(rows, (0, missing), value=2 * reduce.NEGATIVE)
    values, places = operators.TopK.apply(rows, count, dim=1)
    shape = (*x.shape[:-1], count)
    return values.reshape(shape), places.to(torch.int32).clamp(max=width - 1).reshape(shape)
