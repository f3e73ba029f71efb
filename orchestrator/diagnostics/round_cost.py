"""What a round of speculation costs on Neuron at real size, from the graphs it would compile: no weights, no chip.

A round of a pair is counted with one and with two layers of each model, which gives what a layer costs and what is
left. Times are arithmetic from published figures (`paceline.decoder.backends.neuron.engines`); none was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.core.acceptance.match import Match
from paceline.core.errors import ConfigurationError
from paceline.core.types import DraftShape, SamplingKind
from paceline.decoder.backends.neuron import engines
from paceline.decoder.compile.step_work import Work, step_work
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.traceable import TraceableKernels
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.layers import Weights
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel import sharding
from paceline.decoder.parallel.collectives import DeviceGroup
from paceline.decoder.parallel.sharding import Shard
from paceline.draft.heads import ChainStep
from paceline.draft.model import ModelHead
from paceline.draft.vocab_map import VocabMap
from paceline.placement.planning.instances import Instance
from paceline.target.steps import FusedStep, VerifyStep


@dataclass(frozen=True, slots=True)
class RoundSetup:
    """A fused pair: ``k`` drafted tokens a round over ``slots`` texts of up to ``rows`` tokens, on ``degree`` cores."""

    target: ModelConfig
    draft: ModelConfig
    degree: int
    k: int
    kind: SamplingKind = "greedy"
    slots: int = 1
    rows: int = 2048


def read_config(path: Path) -> ModelConfig:
    """Of a ``config.json``, or of a folder with one and nothing else."""
    return ModelConfig.from_file(path / "config.json" if path.is_dir() else path)


def round_cost(setup: RoundSetup, instance: Instance) -> dict[str, object]:
    """Figures of a round, as plain values: milliseconds by part and resource, and which limits are passed.

    Raises:
        ConfigurationError: the models cannot be divided like that, or the figures of this chip are not known.
    """
    check_instance(setup.degree, instance)
    base = _work(setup, 1, 1)
    target = _work(setup, 2, 1).plus(base, -1)  # of one layer
    draft = _work(setup, 1, 2).plus(base, -1)
    rest = base.plus(target, -1).plus(draft, -1)
    nothing = base.plus(base, -1)
    parts = {
        "target layers": nothing.plus(target, setup.target.num_layers),
        "draft layers": nothing.plus(draft, setup.draft.num_layers),
        "embedding, head and sampler": rest,
    }
    total = parts["target layers"].plus(parts["draft layers"]).plus(rest)
    times = {name: times_of(work, instance) for name, work in parts.items()}
    sampler = sum(times["embedding, head and sampler"][name] for name in ("vector", "scalar", "gather"))
    busy = sum(sum(part.values()) for part in times.values())
    collectives = sum(total.collectives.values())
    expected = busy + collectives * engines.COLLECTIVE.value + engines.LAUNCH.value
    slower = collectives * (engines.COLLECTIVE_SLOW.value - engines.COLLECTIVE.value)
    memory = memory_of(setup.target, setup) + memory_of(setup.draft, setup)
    ideal = sum(max(part["memory"] * engines.BANDWIDTH_SHARE.value, part["tensor"]) for part in times.values())
    return {
        "instance": instance.name,
        "tp_degree": setup.degree,
        "k": setup.k,
        "sampling": setup.kind,
        "padding": {
            name: {what: list(both) for what, both in sharding.padding(config, setup.degree).items()}
            for name, config in (("target", setup.target), ("draft", setup.draft))
        },
        "round": {
            "ideal_ms": round(ideal * 1e3, 3),
            "expected_ms": round(expected * 1e3, 3),
            "worst_ms": round((expected + slower) * 1e3, 3),
            "sampler_share": round(sampler / expected, 4),
            "largest_gather": int(total.largest),
            "launches": 1,
            "bytes_read": int(total.read),
            "bytes_widened": int(total.widened),
            "operations": int(total.operations),
            "instructions": int(total.tiles),
            "products": {name: int(count) for name, count in sorted(total.products.items())},
            "passes_over_vocabulary": round(rest.rows.passes + rest.rows.reductions, 1),
            "top_k_over_vocabulary": round(rest.rows.topk, 1),
            "collectives": _collectives(total),
            "memory_per_core": memory,
        },
        "parts_ms": {
            name: {kind: round(seconds * 1e3, 3) for kind, seconds in part.items()}
            for name, part in sorted(times.items(), key=lambda item: -sum(item[1].values()))
        },
        "over_limits": _over(total, memory, instance),
        "sources": {figure.what: figure.source for figure in _FIGURES},
    }


def check_instance(degree: int, instance: Instance) -> None:
    """Raise ConfigurationError unless the chip's figures are known and models can be divided like that on it."""
    if not instance.name.startswith(engines.CORE_V2):
        known = ", ".join(engines.CORE_V2)
        raise ConfigurationError(f"the engines of {instance.name} have no figures here; use an instance of {known}")
    if degree not in instance.degrees:
        degrees = ", ".join(map(str, instance.degrees))
        raise ConfigurationError(f"tp_degree={degree} is not possible on {instance.name}; use one of {degrees}")


_FIGURES = (
    engines.TENSOR_16,
    engines.TENSOR_32,
    engines.VECTOR,
    engines.SCALAR,
    engines.GATHERED,
    engines.COLLECTIVE,
    engines.COLLECTIVE_SLOW,
    engines.LAUNCH,
    engines.BANDWIDTH_SHARE,
    engines.MAX_INSTRUCTIONS,
    engines.TILE,
)


def times_of(work: Work, instance: Instance) -> dict[str, float]:
    """Seconds by resource, each by itself; a weight that is widened is read twice and written at twice its size."""
    narrow = sum(count for name, count in work.products.items() if name != "float32")
    return {
        "memory": (work.read + 4 * work.widened) / instance.bandwidth / engines.BANDWIDTH_SHARE.value,
        "tensor": narrow / engines.TENSOR_16.value + work.products["float32"] / engines.TENSOR_32.value,
        "vector": work.vector / engines.VECTOR.value,
        "scalar": work.scalar / engines.SCALAR.value,
        "gather": work.gathered / engines.GATHERED.value,
    }


def _over(work: Work, memory: int, instance: Instance) -> list[str]:
    found = []
    if memory > instance.memory:
        found.append(f"memory: {memory / 2**30:.1f} GiB a core of {instance.memory / 2**30:.0f}")
    if work.tiles > engines.MAX_INSTRUCTIONS.value:
        found.append(f"instructions: about {work.tiles:.0f} of {engines.MAX_INSTRUCTIONS.value:.0f}")
    if work.widened:
        found.append(f"widened weights: {work.widened:.0f} bytes a round")
    return found


def _collectives(work: Work) -> list[dict[str, object]]:
    """By name and size, the most frequent first."""
    return [
        {"name": name, "bytes": size, "count": int(count)} for (name, size), count in work.collectives.most_common()
    ]


def memory_of(config: ModelConfig, setup: RoundSetup) -> int:
    """Bytes of weights and caches on one core, in 16 bits."""
    shard = Shard(config, sharding.layout(config, setup.degree))
    weights = sum(shard.numbers_of(spec) for spec in registry.family(config.model_type).tensors(config).values())
    cache = 2 * config.num_layers * setup.slots * len(shard.key_heads) * setup.rows * config.head_dim
    return 2 * (weights + cache)


def _work(setup: RoundSetup, target_layers: int, draft_layers: int) -> Work:
    """A whole round of models of so many layers."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        target = body_of(setup.target, target_layers, setup)
        draft = body_of(setup.draft, draft_layers, setup)
        vocabulary = VocabMap(setup.draft.vocab_size, setup.target.vocab_size)
        drafts = ChainStep(ModelHead(draft, vocabulary, draft.options), setup.k, setup.rows, kind=setup.kind)
        shape = DraftShape.chain(setup.k)
        step = FusedStep(drafts, VerifyStep(target, setup.rows, draft_shape=shape, rule=Match(), kind=setup.kind))
    width = -(-setup.target.vocab_size // setup.degree)
    return step_work(step, _inputs(setup), width, tile=int(engines.TILE.value))


def body_of(config: ModelConfig, layers: int, setup: RoundSetup) -> ModelWithCache:
    """One rank's part of a model of so many layers, on shapes alone where fake tensors are on."""
    config = replace(config, num_layers=layers)
    layout = sharding.layout(config, setup.degree)
    options = DecoderOptions(setup.slots, (setup.rows,), (min(128, setup.rows),), "bf16", layout)
    shard = Shard(config, layout)
    weights: Weights = {}
    for name, spec in registry.family(config.model_type).tensors(config).items():
        size, cut = list(spec.shape), shard.slice_of(spec)
        if cut is not None:
            size[cut.dim] = cut.size
        weights[name] = torch.zeros(size, dtype=torch.bfloat16)
    group = DeviceGroup(setup.degree) if setup.degree > 1 else None
    body: nn.Module = ModelWithCache(config, options, weights, kernels=TraceableKernels(), group=group).eval()
    assert isinstance(body, ModelWithCache)
    return body


def _inputs(setup: RoundSetup) -> tuple[Tensor, ...]:
    one = torch.ones(setup.slots, dtype=torch.int32)
    tokens = torch.ones(setup.slots, setup.k + 1, dtype=torch.int32)
    return (tokens, one, one, one, torch.zeros(setup.slots, 4), torch.zeros(setup.slots, 4, dtype=torch.int32))


def to_json(found: Mapping[str, object]) -> str:
    """One line."""
    return json.dumps(found)
