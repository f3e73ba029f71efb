"""`trace` and `compile` of ModelBuilder V2: control flow, shapes and types are frozen, as by the real ones."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch_neuronx
from torch.fx.experimental.proxy_tensor import make_fx

from neuronx_distributed.trace.model_builder_utils import (
    CompilationArtifacts,
    Flattener,
    LayoutTransformerArtifacts,
    MetaNeff,
    ModelParamInfo,
    ProvidedArgInfo,
    TraceArtifacts,
    WLOArtifacts,
)

TARGETS = ("inf2", "trn1", "trn2")


@dataclass
class Recorded:
    """Stands for an HLO module: what was traced, as a graph of operations.

    ``computations`` are those of the module's protobuf. There are none, unless a test puts some here.
    """

    computations: ClassVar[list[object]] = []

    graph: torch.fx.GraphModule
    weights: list[str]
    states: list[str]
    marked: set[str] | None = None  # weights whose layout a priority model may choose
    laid: set[str] = field(default_factory=set)  # weights that lie as a priority model wants them

    def SerializeToString(self, *, deterministic: bool = False) -> bytes:  # noqa: N802  # protobuf's name
        assert deterministic, "the maps of a protobuf have no order: bytes to compare must be deterministic"
        return f"{self.graph.code}{sorted(self.marked or ())}{sorted(self.laid)}".encode()

    def __deepcopy__(self, _memo):
        return replace(self, laid=set(self.laid))  # the graph is never written into

    def fingerprint(self) -> str:
        return hashlib.sha256(self.SerializeToString(deterministic=True)).hexdigest()


def trace(model, args=None, kwargs=None, spmd=True, preserve_parameters=True, weights_to_skip_layout_optimization=None):
    if not spmd:
        raise NotImplementedError("MPMD tracing is not currently supported")
    params = _parameters(model)
    given = dict(zip(params, args or (), strict=False)) | (kwargs or {})
    if unknown := set(given) - set(params):
        raise ValueError(f"Found unexpected keys in kwargs: {unknown}")
    if missing := [p for p, info in params.items() if info.is_positional and p not in given]:
        raise ValueError(f"Missing required parameters: {missing}")
    provided = [ProvidedArgInfo(p, params[p].is_positional, given[p]) for p in params if p in given]
    recorded = _record(model, {info.param_name: info.tensor for info in provided})
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {name: (list(x.shape), x.dtype) for name, x in named.items()}
    meta = MetaNeff(
        {name: shapes[name] for name in recorded.weights if name not in recorded.states},
        {name: shapes[name] for name in recorded.states},
    )
    places = {name: place for place, name in enumerate(meta.weights)}
    skipped = set(weights_to_skip_layout_optimization or ())
    flattener = Flattener(tuple(range(len(provided))))
    return TraceArtifacts(recorded, meta, flattener, places, skipped, provided, list(params.values()))


def compile(hlo_module, metaneff, compiler_workdir=None, compiler_args=None, key=None):  # noqa: A001
    if hlo_module.marked is not None:
        raise RuntimeError(f"{key} is marked for compile_wlo")
    return CompilationArtifacts(_neff(hlo_module, compiler_workdir, compiler_args, key))


def compile_wlo(hlo_module, metaneff, compiler_workdir=None, compiler_args=None, key=None):
    if hlo_module.marked is None:
        raise RuntimeError(f"no weights of {key} are marked")
    neff = _neff(hlo_module, compiler_workdir, compiler_args, key)
    wrapped = Path(neff).with_name("wrapped_neff.hlo")
    wrapped.write_text(json.dumps(sorted(hlo_module.laid)))
    return WLOArtifacts(neff, str(wrapped) if hlo_module.laid else None)


def compile_layout_transformer(
    wlo_artifacts, priority_model_weight_name_to_idx, compiler_workdir=None, logical_nc_config=1
):
    if wlo_artifacts.wrapped_neff_hlo_filepath is None:
        return None
    folder = Path(compiler_workdir or "/tmp/nxd_models") / "layout_opt"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("graph.hlo", "graph.neff", "metaneff.pb")]
    files[0].write_text(str(logical_nc_config))
    files[1].write_text(Path(wlo_artifacts.wrapped_neff_hlo_filepath).read_text())
    files[2].write_text(json.dumps(sorted(priority_model_weight_name_to_idx)))
    return LayoutTransformerArtifacts(*map(str, files))


def _neff(hlo_module, compiler_workdir, compiler_args, key) -> str:
    flags = compiler_args or ""
    target = re.search(r"--target[= ](\w+)", flags)
    if target is None or target.group(1) not in TARGETS:
        raise RuntimeError(f"Compilation failed for {key}: no --target")
    if "--lnc=2" in flags and target.group(1) != "trn2":
        raise RuntimeError("NCC_EARG001: lnc")
    torch_neuronx.RUNTIME.compile(flags)
    folder = Path(compiler_workdir or "/tmp/nxd_models") / str(key)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph.neff").write_text(hlo_module.fingerprint())
    return str(folder / "graph.neff")


def _parameters(model) -> dict[str, ModelParamInfo]:
    found = {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise NotImplementedError("Methods with *args or **kwargs are not supported.")
        if parameter.default is not parameter.empty and parameter.default is not None:
            raise ValueError(f"Parameter '{name}' has a non-None default value")
        found[name] = ModelParamInfo(name, parameter.default is parameter.empty)
    if not found:
        raise ValueError("Model must have at least one parameter")
    return found


def _record(model, inputs: dict[str, torch.Tensor]) -> Recorded:
    buffers = dict(model.named_buffers())
    held = dict(model.named_parameters()) | buffers
    states: list[str] = []

    def pure(values, given):
        before = dict(zip(held, values, strict=True))
        with _swapped(model, before):
            out = model.forward(**dict(zip(inputs, given, strict=True)))
            after = {name: getattr(model, name) for name in held}
        states[:] = [name for name in held if after[name] is not before[name]]
        for name in states:
            if name not in buffers:
                raise RuntimeError(f"{name} is a parameter: only registered buffers can be states")
            if (after[name].shape, after[name].dtype) != (before[name].shape, before[name].dtype):
                raise RuntimeError(f"state {name} changes its shape or type, so it cannot be aliased")
        return [after[name] for name in states], list(out) if isinstance(out, (tuple, list)) else [out]

    graph = make_fx(pure)([x.detach() for x in held.values()], list(inputs.values()))
    for node in graph.graph.nodes:
        name = str(node.target).removeprefix("aten.").split(".")[0]
        if node.op == "call_function" and name.endswith("_") and not name.startswith("__"):
            raise RuntimeError(f"in-place operation {node.target} on a traced tensor")
    return Recorded(graph, list(held), list(states))


@contextmanager
def _swapped(model, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Other tensors in place of a module's own, and its own back at the end."""
    stores = {name: model._buffers if name in model._buffers else model._parameters for name in tensors}
    own = {name: store[name] for name, store in stores.items()}
    try:
        for name, tensor in tensors.items():
            stores[name].pop(name)
            object.__setattr__(model, name, tensor)
        yield
    finally:
        for name, store in stores.items():
            model.__dict__.pop(name, None)
            store[name] = own[name]
