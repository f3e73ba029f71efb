"""Models with a mixture of experts: which experts a row chooses. That no other is read: `test_native_experts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.experts import ChosenExperts, EveryExpert, MixtureOfExperts
from paceline.decoder.models.network import DecoderLayer
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.neuron.kernels import TraceableKernels
from tests.decoder.families import save_pair
from tests.decoder.tiny import load

CHUNK = 16
MIXTURES = ["mixtral", "qwen3 moe"]


@pytest.fixture(scope="module", params=MIXTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = save_pair(tmp_path_factory.mktemp("mixture"), request.param, layers=2)[0]
    return made


def test_router_ties_go_to_the_lowest_experts(folder: Path) -> None:
    one = next(one for one in load(folder).body.modules() if isinstance(one, MixtureOfExperts))
    probs = torch.tensor([[[0.1, 0.3, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25], [0.2, 0.2, 0.1, 0.5]]])
    wanted = torch.tensor([[[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0], [0.2 / 0.7, 0, 0, 0.5 / 0.7]]])
    torch.testing.assert_close(one.chosen(probs), wanted)


def test_graphs_of_fixed_shape_compute_every_expert(folder: Path) -> None:
    """XLA and Neuron: the same sum, of matrices that are apart."""
    config = ModelConfig.from_pretrained(folder)
    shard = Shard(config)
    made: list[Any] = []
    for kernels in (TraceableKernels(), TorchKernels()):
        weights = load_weights(folder, config, torch.float32)
        model = registry.family(config.model_type).build(shard, weights, kernels, positions=CHUNK, group=SingleRank())
        layer = model.layers[0]
        assert isinstance(layer, DecoderLayer)
        made.append(layer.mlp)
    every, chosen = made
    assert isinstance(every.experts, EveryExpert) and isinstance(chosen.experts, ChosenExperts)
    x = torch.randn(2, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(every(x), chosen(x), rtol=1e-5, atol=1e-5)
