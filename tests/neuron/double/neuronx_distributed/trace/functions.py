"""`trace` and `compile` of ModelBuilder V2: control flow, shapes and types are frozen, as by the real ones."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
import torch_neuronx
from neuronx_distributed.trace.model_builder_utils import (
    CompilationArtifacts,
    Flattener,
    MetaNeff,
    ModelParamInfo,
    ProvidedArgInfo,
    TraceArtifacts,
)
from torch_neuronx.graphs import Recorded, record

TARGETS = ("inf2", "trn1", "trn2")
__all__ = ["Recorded", "compile", "trace"]


def trace(model, args=None, kwargs=None, spmd=True, preserve_parameters=True):
    assert spmd
    params = _parameters(model)
    given = dict(zip(params, args or (), strict=False)) | (kwargs or {})
    provided = [ProvidedArgInfo(p, params[p].is_positional, given[p]) for p in params if p in given]
    recorded = record(model, {info.param_name: info.tensor for info in provided})
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {name: (list(x.shape), x.dtype) for name, x in named.items()}
    meta = MetaNeff(
        {name: shapes[name] for name in recorded.weights if name not in recorded.states},
        {name: shapes[name] for name in recorded.states},
    )
    places = {name: place for place, name in enumerate(meta.weights)}
    flattener = Flattener(tuple(range(len(provided))))
    return TraceArtifacts(recorded, meta, flattener, places, provided, list(params.values()))


def compile(hlo_module, metaneff, compiler_workdir=None, compiler_args=None, key=None):  # noqa: A001
    _check_types(metaneff, compiler_args or "")
    return CompilationArtifacts(_neff(hlo_module, compiler_workdir, compiler_args, key))


def _check_types(metaneff, flags) -> None:
    held = {dtype for _, dtype in (*metaneff.weights.values(), *metaneff.states.values())}
    if torch.float8_e4m3fn in held and "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3" not in flags:
        raise RuntimeError("NCC_EVRF051: Data type F8E4M3FN is not supported on TRN1/TRN2")


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
        found[name] = ModelParamInfo(name, parameter.default is parameter.empty)
    return found
