"""Caches whose rows are in tiles to the compiler, on the stand-in: other shapes, the same numbers and tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.decoder.backends.neuron import backend as neuron
from paceline.decoder.backends.neuron.chip import tiled
from tests.decoder.tiny import Workshop, fresh

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [5, 5]]


def test_a_fused_pair_with_tiled_caches_has_the_tokens_of_eager(
    workshop: Workshop, runtime: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_NEURON_CACHE", "tiled")
    draft, target = (fresh(workshop.checkpoint(role), backend="neuron", batch_size=2) for role in ("draft", "target"))
    for decoder in (draft, target):
        decoder.on_graph = lambda _event: None
    wanted = workshop.decoder(backend="eager", slots=2).sample(PROMPTS, max_new_tokens=8)
    # The second prompt's first tokens come before the last graph does, for which states go home and back.
    assert torch.equal(SpeculativeGenerator(draft, target, k=2).sample(PROMPTS, max_new_tokens=8), wanted)
    cache = target.body.caches[0][0]
    held = neuron.chip().resident
    assert held is not None and held.read(neuron.chip().names.find(cache)).shape == (2, 2, 128, 2, 8)
    there = target.backend.read_state(cache)
    assert there.shape == cache.shape == (2, 2, 256, 8) and there[:, :, : len(PROMPTS[1])].abs().min() > 0
    held.unload()
    assert torch.equal(cache, there), "what is brought home lies where the host has it"


def test_only_whole_tiles_of_caches_are_made() -> None:
    cache = torch.arange(2 * 3 * 256 * 4).reshape(2, 3, 256, 4)
    assert tiled(cache).shape == (2, 3, 128, 2, 4) and torch.equal(tiled(cache).flatten(2, 3), cache)
    for other in (cache[:, :, :128], cache[:, :, :200], cache[0]):
        assert tiled(other) is other


def test_an_unknown_form_is_refused(runtime: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NEURON_CACHE", "tile")
    with pytest.raises(ConfigurationError, match="PACELINE_NEURON_CACHE='tile' is unknown; make it plain or tiled"):
        neuron.NeuronBackend()
