"""`NxDModel`: several graphs over one set of weights and one set of states. Tensors go in and out on the host only."""

from __future__ import annotations

import itertools

import torch
import torch_neuronx
from torch_neuronx.graphs import execute


class SPMDModel:
    """`torch.classes.neuron.SPMDModel`: one graph, which is loaded over weights and states that are on the device."""

    def __init__(self, key, graph, neff, ranks) -> None:
        self.key, self.graph, self.neff, self.ranks, self.initialized = key, graph, neff, ranks, False

    def initialize(self, states, weights, start_rank):
        assert start_rank == 0 and not self.initialized
        for names, store in ((self.graph.metaneff.weights, weights), (self.graph.metaneff.states, states)):
            for rank, (name, (shape, dtype)) in itertools.product(range(self.ranks), names.items()):
                if name not in store[rank]:
                    raise RuntimeError(f"{self.key}: {name} is not there for rank {rank}")
                found = store[rank][name]
                if (list(found.shape), found.dtype) != (shape, dtype):
                    raise RuntimeError(f"{self.key}: {name} has another shape or type on rank {rank}")
        torch_neuronx.RUNTIME.load_graph(self.key, self.neff)
        self.initialized = True


class NxDModel(torch.nn.Module):
    def __init__(self, world_size, start_rank=None, local_ranks_size=None, state_initializer=None) -> None:
        super().__init__()
        assert start_rank is None or local_ranks_size is not None
        self.world_size, self.state_initializer = world_size, state_initializer
        self.model_params, self.spmd_models, self.routes, self.start_rank = [], {}, {}, 0
        self.weights, self.states, self.loaded_on_neuron = [{}] * world_size, [{}] * world_size, False

    def add(self, key, trace_artifacts, compilation_artifacts):
        if not self.model_params:
            self.model_params = trace_artifacts.model_params
        pairs = zip(self.model_params, trace_artifacts.model_params, strict=False)
        assert all(a == b for a, b in pairs), "a different signature than all other models added prior"
        flattener = trace_artifacts.flattener
        assert isinstance(flattener.layout, tuple), "Expected flattener layout type to be tuple"
        flattener.layout = list(flattener.layout)
        neff = compilation_artifacts.get_neff_bytes()
        if neff.decode() != trace_artifacts.hlo.fingerprint():
            raise RuntimeError(f"the NEFF of {key} was compiled from another graph")
        self.spmd_models[key] = SPMDModel(key, trace_artifacts, neff, self.world_size)
        route = ", ".join(f"{arg.param_name}: {list(arg.tensor.shape)}" for arg in trace_artifacts.provided_args)
        self.routes.setdefault(f"({route})", []).append(key)
        return self

    def set_weights(self, sharded_checkpoint):
        if self.loaded_on_neuron:
            raise ValueError("set_weights() was called when the model was already loaded on neuron.")
        assert len(sharded_checkpoint) == self.world_size
        self.weights = torch.ops.neuron._parallel_load(sharded_checkpoint)

    def to_neuron(self):
        torch_neuronx.RUNTIME.reserve(self.world_size)
        self.states = self.state_initializer() if self.state_initializer is not None else self.states
        for model in self.spmd_models.values():
            model.initialize(self.states, self.weights, self.start_rank)
        self.loaded_on_neuron = True

    def read_from_neuron_buffer(self, buffer_key, rank):
        assert self.loaded_on_neuron, "Model must be loaded on neuron before calling these methods"
        found = self.states[rank][buffer_key].clone()
        torch_neuronx.RUNTIME.fetched.append((buffer_key, found.numel() * found.element_size()))
        return found

    def write_to_neuron_buffer(self, tensor, buffer_key, rank):
        assert self.loaded_on_neuron, "Model must be loaded on neuron before calling these methods"
        if tensor.shape != self.states[rank][buffer_key].shape:
            raise KeyError("Cannot write tensor of another shape")
        self.states[rank][buffer_key].copy_(tensor)

    def forward(self, *args, model_name=None, forward_mode="default"):
        if not self.loaded_on_neuron:
            raise RuntimeError("Model not initialized. Call set_weights() followed by to_neuron()")
        assert forward_mode == "default", "the stand-in has no other mode"
        names = [param.param_name for param in self.model_params]
        keys = self.routes["(" + ", ".join(f"{n}: {list(x.shape)}" for n, x in zip(names, args, strict=False)) + ")"]
        if len(keys) > 1:
            assert model_name is not None, "Got several possible routes but model_name wasn't provided."
        else:
            assert model_name in (None, keys[0]), "Provided model_name does not match the shape router"
        return self._execute(model_name or keys[0], args)

    def _execute(self, key, args):
        assert self.spmd_models[key].initialized, f"{key} was added after the model was loaded"
        graph = self.spmd_models[key].graph
        for given, wanted in zip(args, graph.provided_args, strict=True):
            if (given.dtype, given.device.type) != (wanted.tensor.dtype, "cpu"):
                raise RuntimeError(f"{key}: {wanted.param_name} must be a CPU tensor of {wanted.tensor.dtype}")
        out = execute(key, graph.hlo, self.states, self.weights, args)
        size = [sum(x.numel() * x.element_size() for x in part) for part in (args, out)]
        torch_neuronx.RUNTIME.calls.append((key, size[0], size[1]))
        return out
