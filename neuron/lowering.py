"""Lowering of a step to a pure graph: state and inputs in, new state and outputs out, in operations that compilers
support.

It converts a step (a module that writes into its caches) for compilers of whole graphs. PyTorch's exporter makes it
functional; `rewrites` replaces operations that would lower to 64-bit indices, quadratic scans or worse. A lowered step
runs on the device of its tensors, with any compiler.

Each entry of `rewrites` replaces one operation while a step is lowered. The results are the same bits wherever this
package uses them, but for the functions in the last row but one: selections move values without computing, running sums
are of zeros and ones, and shifts and bit patterns are what they were. What torch_xla 2.9 does with the originals is the
reason for each:

    gather, index  ask for 64-bit indices; an index is compared with a row of small integers, or selects whole rows
    cumsum         a window over the whole row, quadratic in its length; here products with a triangle
    >>             a division, which rounds negative words towards zero; here an arithmetic shift
    view(int32)    no lowering at all: the graph would be cut in two; here the pattern is computed
    mean           holds NaN, for rows of no numbers; here the sum divided by the row's length
    comparisons    with a Python number go through 64 bits; here the number has the tensor's type
    & | ^          with a Python number have no lowering in torch-mlir 20261001; here the number is a tensor
    copy, slice_scatter
                   of a write into the first rows of a cache, unlisted; here the rows joined with the others
    gelu, softmax, relu
                   lowered as the compiler chooses, gelu with an erf, which Neuron refuses (EHCA005); here sums,
                   products, exp and tanh, and numbers within 2e-7 of the originals
    int64, asserts made 32-bit, and dropped: no device of ours has the first, no graph the second
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from paceline.core.errors import BackendError
from paceline.decoder.parallel import vocab_part
from paceline.decoder.parallel.collectives import Collectives
from paceline.neuron import graph_product, prompt_attention

_BLOCK = 128  # side of the triangle; also the width of a matrix engine
_POWERS = (64, 32, 16, 8, 4, 2, 1)
_MANTISSA = 23  # bits of a float32 after the binary point
_BIAS = 127
_SIGN = -(1 << 31)


def rewrites() -> dict[Any, Callable[..., Any]]:
    """Return the replacements, for `torch.export.ExportedProgram.run_decompositions`."""
    aten = torch.ops.aten
    replacements: dict[Any, Callable[..., Any]] = {
        aten.gather.default: gather,
        aten.cumsum.default: cumsum,
        aten.mean.dim: mean,
        aten.index.Tensor: index,
        aten.__rshift__.Scalar: shift_right,
        aten.view.dtype: view_as,
        aten._to_copy.default: to_copy,
        aten.copy.default: copy,
        aten.slice_scatter.default: slice_scatter,
        aten.gelu.default: gelu,
        aten.relu.default: relu,
        aten.softmax.int: softmax,
        aten._assert_tensor_metadata.default: lambda *_args, **_kwargs: None,
    }
    for overload in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        replacements[overload] = _narrow_arange(overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        compare = getattr(aten, name)
        replacements[compare.Scalar] = _typed(compare.Tensor)
    for name in ("and", "or", "xor"):
        combine = getattr(aten, f"bitwise_{name}")
        for scalar in (combine.Scalar, getattr(aten, f"__{name}__").Scalar):
            replacements[scalar] = _typed(combine.Tensor)
    return replacements


def gather(x: Tensor, dim: int, index: Tensor, **_options: object) -> Tensor:
    """Replace `torch.gather` by comparison, for short dimensions: exact, since all but one term are zero."""
    dim = dim % x.dim()
    moved = x.movedim(dim, -1).unsqueeze(-2)  # [..., 1, size]
    at = index.movedim(dim, -1).unsqueeze(-1).to(torch.int32)  # [..., n, 1]
    for axis in range(moved.dim() - 2):  # an index shorter than x means the leading part of x
        moved = moved.narrow(axis, 0, at.shape[axis])
    places = torch.arange(x.shape[dim], dtype=torch.int32, device=x.device)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(places == at, moved, zero).sum(-1, dtype=x.dtype).movedim(-1, dim)


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Select rows of the first dimension. Indices are never negative in this package."""
    (rows,) = indices
    if rows is None or rows.dtype == torch.bool:
        raise BackendError("a graph can be indexed by only one tensor of row numbers; rewrite the step with one index")
    return x.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *x.shape[1:])


def copy(x: Tensor, new: Tensor, *_unused: object) -> Tensor:
    """Give new values the shape and dtype of x. If they have both, they stay: the lint sees what did not change."""
    return new.to(x.dtype) if new.shape == x.shape else new.to(x.dtype).expand_as(x)


def slice_scatter(x: Tensor, new: Tensor, dim: int = 0, *within: int | None) -> Tensor:
    """Join new rows with those of x before and after them. ``within``: start, end and step of 1, if given."""
    first, last, _ = slice(*within, *[None] * (3 - len(within))).indices(x.shape[dim])
    return torch.cat((x.narrow(dim, 0, first), new, x.narrow(dim, last, x.shape[dim] - last)), dim)


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute a running sum in float32, block by block: exact for counts below 2**24."""
    return _running(x.to(torch.float32).movedim(dim, -1)).movedim(-1, dim).to(dtype or x.dtype)


def _running(x: Tensor) -> Tensor:
    size = x.shape[-1]
    width = min(_BLOCK, size)
    blocks = -(-size // width)
    padded = torch.nn.functional.pad(x, (0, blocks * width - size)).reshape(*x.shape[:-1], blocks, width)
    places = torch.arange(width, dtype=torch.int32, device=x.device)
    triangle = (places.unsqueeze(-1) <= places).to(torch.float32)
    inside = torch.matmul(padded, triangle)
    if blocks > 1:
        ends = inside[..., -1]
        inside = inside + (_running(ends) - ends).unsqueeze(-1)
    return inside.reshape(*x.shape[:-1], blocks * width)[..., :size]


def mean(x: Tensor, dim: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the mean over dimensions that are not empty."""
    size = math.prod(x.shape[axis] for axis in dim)
    return x.sum(list(dim), keepdim, dtype=dtype) / torch.full((), float(size), dtype=dtype or x.dtype, device=x.device)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute GELU (Hendrycks and Gimpel, arXiv 1606.08415), by the error function or by their approximation of it."""
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


def erf(x: Tensor) -> Tensor:
    """Compute the error function to within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = x.abs()
    t = torch.ones_like(x) / (1.0 + 0.3275911 * size)
    total = torch.zeros_like(x)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = t * (total + factor)
    positive = torch.ones_like(x) - total * torch.exp(-(x * x))
    return torch.where(x < 0, -positive, positive)


def relu(x: Tensor) -> Tensor:
    """Return the larger of x and zero."""
    return torch.maximum(x, torch.zeros_like(x))


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute exp(x) over its sum; the largest is subtracted first, so that no power is beyond the type's range."""
    wide = x if dtype is None else x.to(dtype)
    powers = torch.exp(wide - wide.amax(dim, keepdim=True))
    return powers / powers.sum(dim, keepdim=True)


def shift_right(x: Tensor, by: int) -> Tensor:
    """Compute an arithmetic shift of int32."""
    amount = torch.full((), by, dtype=x.dtype, device=x.device)
    return torch.bitwise_right_shift(x, amount)


def view_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bit pattern of finite float32 numbers as int32; subnormal ones count as zero, which has no sign.

    Every step multiplies by a power of two or compares, so nothing is rounded. The pieces are joined bit by bit: no
    sum needs more than 24 bits.
    """
    if x.dtype != torch.float32 or dtype != torch.int32:
        raise BackendError(
            f"a graph can read the bits of float32 only as int32, not {x.dtype} as {dtype}; rewrite the step"
        )
    size = x.abs()
    exponent = torch.zeros_like(size)
    for power in _POWERS:
        over = size >= 2.0**power
        size = torch.where(over, size * 2.0**-power, size)
        exponent = torch.where(over, exponent + power, exponent)
    for power in _POWERS:
        under = size < 2.0 ** (1 - power)
        size = torch.where(under, size * 2.0**power, size)
        exponent = torch.where(under, exponent - power, exponent)
    high = (exponent + _BIAS).to(torch.int32) * (1 << _MANTISSA)
    low = ((size - 1.0) * float(1 << _MANTISSA)).to(torch.int32)
    word = torch.where(x < 0, (high | low) ^ _SIGN, high | low)
    return torch.where(x.abs() < 2.0 ** (1 - _BIAS), 0, word)


def to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **_rest: object) -> Tensor:
    """Convert a tensor; 64-bit types become 32-bit."""
    kind = torch.int32 if dtype == torch.int64 else dtype or x.dtype
    return torch.ops.prims.convert_element_type(x, kind)  # type: ignore[no-any-return]


def _narrow_arange(overload: Any) -> Callable[..., Tensor]:
    def arange(*bounds: int, dtype: torch.dtype | None = None, **rest: object) -> Any:
        all_integers = all(isinstance(bound, int) for bound in bounds)
        if dtype == torch.int64 or (dtype is None and all_integers):
            return overload(*bounds, dtype=torch.int32, **rest)
        return NotImplemented

    return arange


def _typed(operation: Any) -> Callable[..., Tensor]:
    """Return an operation with a tensor in place of its Python number."""

    def operate(x: Tensor, number: float) -> Tensor:
        result: Tensor = operation(x, torch.full((), number, dtype=x.dtype, device=x.device))
        return result

    return operate


Product = Callable[[Tensor, Tensor], Tensor]
"""Type of `paceline.neuron.graph_product.operator`."""
TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Type of `paceline.decoder.parallel.vocab_part.topk`."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A functional graph and the roles of its inputs and outputs.

    program   the exported graph; takes ``state`` then the inputs, returns ``changed`` then the outputs
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
        attention: prompt_attention.Attention | None = None,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Execute on the device of the inputs. -> new values of changed state, outputs

        ``ranks`` replaces the step's collectives, and ``topk``, ``product`` and ``attention`` replace
        `vocab_part.topk`, `graph_product` and `prompt_attention`; without them PyTorch's own are called.
        """
        tensors = [state[name] for name in self.state]
        given = {
            vocab_part.topk_operator: topk,
            graph_product.operator: product,
            prompt_attention.operator: attention,
        }
        own: dict[Any, Callable[..., Any]] = {one(): call for one, call in given.items() if call is not None}
        flat = _Anywhere(self.graph, inputs[0].device, ranks=ranks, own=own).run(*tensors, *inputs)
        changed = dict(zip(self.changed, flat, strict=False))
        return changed, list(flat[len(self.changed) :])

    def blank(self) -> list[Tensor]:
        """Return zeros in place of every output, on the CPU."""
        nodes = list(self.graph.graph.nodes)[-1].args[0][len(self.changed) :]
        return [torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in nodes]


def lower(name: str, module: nn.Module, example: tuple[Tensor, ...]) -> Lowered:
    """Trace a step.

    Raises:
        BackendError: it cannot be traced with fixed shapes.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings(), _by_one_path(module):
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about its own trees
            program = torch.export.export(module, example, strict=False).run_decompositions(rewrites())
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise BackendError(f"{name}: tracing failed ({reason}); rewrite the step, or use another backend") from error
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
    """Return the tensors that ``lowered.state`` names: the module's own, and constants that tracing made."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= dict(module.named_buffers(remove_duplicate=False))
    constants = constants_of(lowered)
    return {name: named[name] if name in named else constants[name] for name in lowered.state}


def constants_of(lowered: Lowered) -> dict[str, Tensor]:
    """Return tensors that tracing made, by their names in ``lowered.state``."""
    specs = lowered.program.graph_signature.input_specs
    names = [str(spec.target) for spec in specs if spec.kind == InputKind.CONSTANT_TENSOR]
    return {name: torch.as_tensor(lowered.program.constants[name]) for name in names}


@contextmanager
def _by_one_path(module: nn.Module) -> Iterator[None]:
    """Register each submodule once: the exporter cannot follow a buffer's changes through two paths."""
    seen, before = {id(module)}, list[tuple[nn.Module, dict[str, nn.Module | None]]]()
    for parent in [*module.modules()]:
        for name, child in [*parent._modules.items()]:
            if child is not None and id(child) in seen:
                before.append((parent, dict(parent._modules)))
                parent.__dict__[name] = parent._modules.pop(name)
            seen.add(id(child))
    try:
        yield
    finally:
        for parent, children in reversed(before):
            for name in children.keys() - parent._modules.keys():
                del parent.__dict__[name]
            parent._modules.clear()
            parent._modules.update(children)


def operator(target: object) -> str:
    """Return the bare name of a node's operator."""
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
