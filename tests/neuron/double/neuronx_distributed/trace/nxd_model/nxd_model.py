"""`NxDModel`: several graphs over one set of weights and one set of states. Tensors go in and out on the host only."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
import torch_neuronx

from neuronx_distributed.parallel_layers import parallel_state


class Rank(torch.fx.Interpreter):
    """Runs a graph as one rank of several."""

    def __init__(self, graph, rank, meeting) -> None:
        super().__init__(graph)
        self._rank, self._meeting = rank, meeting

    def call_function(self, target, args, kwargs):
        if str(target).startswith("neuron_double."):
            every = self._meeting.exchange(self._rank, args[0])
            return sum(every[1:], every[0]) if "reduce" in str(target) else torch.cat(every, -1)
        return super().call_function(target, args, kwargs)


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
                laid = getattr(found, "laid", False)
                if laid != (name in self.graph.hlo.laid):
                    raise RuntimeError(f"{self.key}: {name} lies otherwise than this graph was compiled for")
                found = found.T if laid else found
                if (list(found.shape), found.dtype) != (shape, dtype):
                    raise RuntimeError(f"{self.key}: {name} has another shape or type on rank {rank}")
        torch_neuronx.RUNTIME.load_graph(self.key, self.neff)
        self.initialized = True


class NxDModel(torch.nn.Module):
    def __init__(
        self, world_size, start_rank=None, local_ranks_size=None, state_initializer=None, layout_transformer=None
    ) -> None:
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
        meeting = parallel_state.Meeting(self.world_size)

        def one(rank):
            try:
                states, held = self.states[rank], self.weights[rank]
                values = [(states if name in states else held)[name] for name in graph.hlo.weights]
                values = [x.T if getattr(x, "laid", False) else x for x in values]
                with torch.no_grad():
                    # A flat list: what a graph of lists takes, in order.
                    return Rank(graph.hlo.graph, rank, meeting).run(*values, *[x.clone() for x in args])
            except BaseException:
                meeting.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            results = list(pool.map(one, range(self.world_size)))
        for rank, (changed, _) in enumerate(results):
            for name, value in zip(graph.hlo.states, changed, strict=True):
                self.states[rank][name].copy_(value)
        out = [x.clone() for x in results[0][1]]
        if any(not torch.equal(x, y) for _, other in results[1:] for x, y in zip(out, other, strict=True)):
            raise RuntimeError(f"{key}: ranks disagree, and only the first one's outputs come back")
        size = [sum(x.numel() * x.element_size() for x in part) for part in (args, out)]
        torch_neuronx.RUNTIME.calls.append((key, size[0], size[1]))
        return out
