"""Models with a mixture of experts: which experts a row chooses, that no other is read, and bits at every width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import AutoDecoder
from paceline.auto import SamplingDecoder
from paceline.decoder import steps
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.experts import ChosenExperts, EveryExpert, MixtureOfExperts
from paceline.decoder.models.network import DecoderLayer
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.neuron.kernels import TraceableKernels
from tests.decoder.families import VOCABULARY, save_pair

CHUNK, LENGTH = 16, 16
MIXTURES = ["mixtral", "qwen3 moe"]


@pytest.fixture(scope="module", params=MIXTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = save_pair(tmp_path_factory.mktemp("mixture"), request.param, layers=2)[0]
    return made


def load(folder: Path, backend: str, amp: str) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(folder, backend=backend, amp=amp, batch_size=2, context_length_estimate=[CHUNK])


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    found = [one for one in model.modules() if isinstance(one, MixtureOfExperts)]
    assert found
    return found


def read(decoder: SamplingDecoder, text: Tensor, width: int) -> Tensor:
    """Logits of a text [B, LENGTH] that is read ``rows`` rows at a time."""
    parts = []
    for at in range(0, LENGTH, width):
        start = torch.full((len(text),), at, dtype=torch.int32)
        window = text[:, at : at + width].contiguous()
        parts.append(steps.window(decoder, window, start, bucket=decoder.n_positions)[0].clone())
    return torch.cat(parts, 1)


def text_of(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.mark.parametrize("amp", ["f32", "bf16"])
def test_a_row_has_the_same_bits_at_every_width(folder: Path, amp: str) -> None:
    decoder, text = load(folder, "native", amp), text_of(0)
    expected = read(decoder, text, 1)
    assert torch.equal(read(decoder, text, 4), expected)
    beside = torch.stack((text[0], text_of(1)[1]))  # what the other slot holds chooses other experts
    assert torch.equal(read(decoder, beside, 4)[0], expected[0])
    for slot in range(2):
        logits = steps.prefill(decoder, slot, text[slot].tolist())[0]
        assert torch.equal(logits[0, 0], expected[slot, -1])


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_an_inactive_expert_is_not_read_by_the_network(folder: Path, backend: str) -> None:
    """Routers with equal scores choose the first experts; the weights of the others are NaN."""
    decoder, text = load(folder, backend, "f32"), text_of(2)
    for one in mixtures(decoder.body):
        one.router.detach().zero_()
    clean = read(decoder, text, 4)
    for one in mixtures(decoder.body):
        count, chosen = one.router.shape[0], 2
        assert isinstance(one.experts, ChosenExperts)
        for stack in (one.experts.gate_up, one.experts.down):
            assert isinstance(stack, Tensor)
            stack.detach().view(count, -1)[chosen:] = float("nan")
    assert torch.equal(read(decoder, text, 4), clean)
    assert clean.isfinite().all()
    for one in mixtures(decoder.body):  # and the first ones are read
        assert isinstance(one.experts, ChosenExperts) and isinstance(one.experts.down, Tensor)
        one.experts.down.detach().view(one.router.shape[0], -1)[1] = float("nan")
    assert read(decoder, text, 4).isnan().all()


def test_router_ties_go_to_the_lowest_experts(folder: Path) -> None:
    one = mixtures(load(folder, "eager", "f32").body)[0]
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
