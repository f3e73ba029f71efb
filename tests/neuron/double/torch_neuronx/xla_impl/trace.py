"""`generate_hlo`: what the real tracer lowers by XLA is recorded as a graph of operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch_neuronx.graphs import Recorded, record
from torch_neuronx.proto.metaneff_pb2 import MetaNeff, MetaTensor
from torch_neuronx.xla_impl.structure import Flattener, Packer

XLA_DTYPE_TO_METANEFF_DTYPE: dict[object, object] = {}
HloArtifacts = SimpleNamespace


class Module(Recorded):
    """The graph as an ``HloModuleProto``, with one computation of no instructions."""

    entry_computation_id = 0
    computations: ClassVar[list[object]] = [SimpleNamespace(id=0, name="entry", instructions=[], root_id=0)]

    def SerializeToString(self, *, deterministic: bool = False) -> bytes:  # noqa: N802  # protobuf's name
        names = repr((self.weights, self.states))  # which the code of a recorded graph has not
        return super().SerializeToString(deterministic=True) + names.encode()


MODULES: dict[bytes, Module] = {}
"""By their bytes: the compiler's stand-in is given those."""


def get_torch_dtype(data_type: torch.dtype) -> torch.dtype:
    return data_type


def hlo_entry_computation(*_given):
    raise NotImplementedError("layouts of weights need the real HLO")


get_hlo_computation_by_id = get_hlo_root_instruction = hlo_entry_computation


_ASKED = {
    "inline_weights_to_neff": False, "return_weights": False, "output_aliased_tensor": False, "cpu_backend": True,
    "preserve_parameters": True, "enable_aliasing": True, "treat_inputs_as_kwargs": True,
}  # fmt: skip


def generate_hlo(func, example_inputs, **options):
    assert options == _ASKED
    found = record(func, dict(example_inputs))
    module = Module(found.graph, found.weights, found.states)
    named = dict(func.named_parameters()) | dict(func.named_buffers())
    kind = MetaTensor.Type
    inputs = [MetaTensor(name, kind.USER_INPUT, list(x.shape), x.dtype) for name, x in example_inputs.items()]
    for name in found.weights:
        held = kind.INPUT_STATE if name in found.states else kind.INPUT_WEIGHT
        inputs.append(MetaTensor(name, held, list(named[name].shape), named[name].dtype, name.encode()))
    with torch.no_grad():
        changed, outputs = found.graph([named[name].detach() for name in found.weights], list(example_inputs.values()))
    given = [*changed, *outputs]
    meta = MetaNeff(
        inputs,
        [MetaTensor(f"output{place}", kind.OUTPUT, list(x.shape), x.dtype) for place, x in enumerate(given)],
        {place: len(example_inputs) + found.weights.index(name) for place, name in enumerate(found.states)},
    )
    MODULES[module.SerializeToString()] = module
    places = {name: place for place, name in enumerate(name for name in found.weights if name not in found.states)}
    return HloArtifacts(
        hlo_module=module,
        metaneff=meta,
        flattener=Flattener(tuple(range(len(example_inputs)))),
        packer=Packer(tuple(range(len(outputs)))),
        weight_name_to_idx=places,
    )
