"""A step as a pure graph: state and inputs in, new state and outputs out, in operations that compilers take.

This is what stands between a step (a module that writes into its caches) and a compiler of whole graphs. PyTorch's
exporter makes it functional; `paceline.decoder.compile.rewrites` replaces what would lower to 64-bit indices,
quadratic scans or worse. Not here: any compiler, and any device: a lowered step runs on whatever device its tensors
are on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from paceline.core.errors import BackendError
from paceline.decoder.compile import rewrites
from paceline.decoder.kernels import graph_product, graph_topk, prompt_attention
from paceline.decoder.parallel.collectives import Collectives

Product = Callable[[Tensor, Tensor], Tensor]
"""As `paceline.decoder.kernels.graph_product.operator`."""
TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""As `paceline.decoder.kernels.graph_topk.topk`."""
Attention = Callable[..., Tensor]
"""As `paceline.decoder.kernels.prompt_attention.operator`."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A functional graph and what its inputs and outputs are.

    program   the exported graph; takes ``state`` then the inputs, gives ``changed`` then the outputs
    state     names of weights, caches and constants, in the graph's order
    changed   names of those that the step changes, in the order of the graph's first outputs
    """

    program: ExportedProgram
    state: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def graph(self) -> fx.GraphModule:
        module: fx.GraphModule = self.program.graph_module
        return module

    def run(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        *,
        ranks: Collectives | None = None,
        topk: TopK | None = None,
        product: Product | None = None,
        attention: Attention | None = None,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Execute on the device of the inputs. -> new values of what changed, outputs.

        ``ranks`` are what the step's collectives become there, and ``topk``, ``product`` and ``attention`` what
        `paceline.decoder.kernels.graph_topk`, `graph_product` and `prompt_attention` become; without them PyTorch's
        own are called.
        """
        tensors = [state[name] for name in self.state]
        given = {graph_topk.operator: topk, graph_product.operator: product, prompt_attention.operator: attention}
        own: dict[Any, Callable[..., Any]] = {one(): call for one, call in given.items() if call is not None}
        flat = _Anywhere(self.graph, inputs[0].device, ranks=ranks, own=own).run(*tensors, *inputs)
        changed = dict(zip(self.changed, flat, strict=False))
        return changed, list(flat[len(self.changed) :])

    def blank(self) -> list[Tensor]:
        """Zeros in the place of every output, on the CPU."""
        nodes = list(self.graph.graph.nodes)[-1].args[0][len(self.changed) :]
        return [torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in nodes]


def lower(name: str, module: nn.Module, example: tuple[Tensor, ...]) -> Lowered:
    """Trace a step.

    Raises:
        BackendError: it cannot be traced with fixed shapes.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about its own trees
            program = torch.export.export(module, example, strict=False).run_decompositions(rewrites.table())
    except Exception as error:
        hint = "; one decoder cannot be both sides of a fused round here: load it twice, or pass fused=False"
        reason = f"{type(error).__name__}: {error}{hint if _shares_buffers(module) else ''}"
        raise BackendError(f"tracing {name} failed: {reason}") from error
    kinds = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}
    signature = program.graph_signature
    state = tuple(str(spec.target) for spec in signature.input_specs if spec.kind in kinds)
    order = [spec.kind in kinds for spec in signature.input_specs]
    assert order == sorted(order, reverse=True), f"{name}: the exporter put an input before the state"
    changed = tuple(str(s.target) for s in signature.output_specs if s.kind == OutputKind.BUFFER_MUTATION)
    results = [spec.kind for spec in signature.output_specs][len(changed) :]
    assert all(kind == OutputKind.USER_OUTPUT for kind in results), f"{name}: an output is neither state nor a result"
    return Lowered(program, state, changed)


def state_of(module: nn.Module, lowered: Lowered) -> dict[str, Tensor]:
    """The tensors that ``lowered.state`` names: the module's own, and constants that tracing made."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= dict(module.named_buffers(remove_duplicate=False))
    constants = constants_of(lowered)
    return {name: named[name] if name in named else constants[name] for name in lowered.state}


def constants_of(lowered: Lowered) -> dict[str, Tensor]:
    """Tensors that tracing made, by their names in ``lowered.state``."""
    specs = lowered.program.graph_signature.input_specs
    names = [str(spec.target) for spec in specs if spec.kind == InputKind.CONSTANT_TENSOR]
    return {name: torch.as_tensor(lowered.program.constants[name]) for name in names}


def _shares_buffers(module: nn.Module) -> bool:
    """Whether one buffer is reached by two paths. Changed through both, it is more than the exporter can follow."""
    return len(list(module.named_buffers(remove_duplicate=False))) > len(list(module.named_buffers()))


def operator(target: object) -> str:
    """The bare name of what a node calls."""
    return getattr(target, "__name__", str(target)).split(".")[0]


class _Anywhere(fx.Interpreter):
    """Runs a graph on another device than the one it was traced on."""

    def __init__(
        self,
        module: fx.GraphModule,
        device: torch.device,
        *,
        ranks: Collectives | None,
        own: Mapping[Any, Callable[..., Any]],
    ) -> None:
        super().__init__(module)
        self._device, self._ranks, self._own = device, ranks, own

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._ranks is not None and target.__module__ == "torch._ops._c10d_functional":
            name = operator(target)
            if name == "wait_tensor":
                return args[0]
            return self._ranks.reduce(args[0]) if name == "all_reduce" else self._ranks.gather(args[0][0])
        if target in self._own:
            return self._own[target](*args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._device}
        return super().call_function(target, args, kwargs)
