"""Weight layout by a priority model, on the stand-in: the largest round leads, and every graph is compiled for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigurationError
from paceline.core.types import DraftKey, DraftShape
from paceline.decoder import steps
from paceline.decoder.backends.base import Graph
from paceline.decoder.backends.neuron import backend as neuron
from paceline.decoder.graph_key import GraphKey
from tests.decoder.tiny import Workshop, fresh


class Products(nn.Module):
    """x times every weight, and a state that counts calls."""

    def __init__(self, weights: list[nn.Parameter], state: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.register_buffer("calls", state)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        for weight in self.weights:
            x = x @ weight
        return x, self.calls + 0


def weights(count: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4), requires_grad=False) for _ in range(count)]


def laid() -> set[str]:
    return {name for name, x in neuron.chip().resident._model.weights[0].items() if getattr(x, "laid", False)}


def test_every_graph_is_compiled_for_the_largest_round(
    install: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_NEURON_LAYOUT", "rounds")
    backend, state, (target, draft, table) = neuron.NeuronBackend(), torch.zeros(1), weights(3)
    steps, flags = {}, runtime().compiled

    def check(key: GraphKey, own: list[nn.Parameter], calls: int) -> None:
        x = torch.randn(2, 4)
        if key not in steps:
            steps[key] = backend.compile(Graph(key, Products(own, state), (x,), {"graph": str(key)}), print)
        found, count = steps[key](x)
        wanted = x
        for weight in own:
            wanted = wanted @ weight
        torch.testing.assert_close(found, wanted)
        assert count.item() == calls

    prompt, verify = GraphKey("prefill", 16, 64), GraphKey("verify", 3, 64, draft_shape=DraftShape.chain(2))
    check(prompt, [target, table], 1)
    assert not laid()  # there is no round yet
    check(verify, [target], 2)
    assert len(laid()) == 1 and len(flags) == 3  # the prompt's graph again, for the round's layout
    check(replace(verify, draft=DraftKey("draft", DraftShape.chain(2))), [target, draft], 3)
    assert len(laid()) == 2 and len(flags) == 6  # a larger round: it leads, the other two follow
    check(GraphKey("compact", 2, 64), [table], 4)
    assert len(laid()) == 2 and len(flags) == 7  # a weight of its own stays as it is
    for key, own in ((prompt, [target, table]), (verify, [target])):
        check(key, own, 5 if key.is_prompt else 6)
    assert len(flags) == 7


def test_a_start_finds_all_layouts_in_the_cache(install: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NEURON_LAYOUT", "rounds")
    for _ in range(2):
        backend, own = neuron.NeuronBackend(), weights(2)
        seen = len(runtime().compiled)
        for key in (GraphKey("verify", 2, 64), GraphKey("prefill", 16, 64)):
            step = backend.compile(
                Graph(key, Products(own, torch.zeros(1)), (torch.ones(2, 4),), {"graph": str(key)}), print
            )
            torch.testing.assert_close(step(torch.ones(2, 4))[0], torch.ones(2, 4) @ own[0] @ own[1])
        assert len(laid()) == 2
        made = len(runtime().compiled) - seen
        neuron.chip.cache_clear()
    assert made == 0


@pytest.mark.parametrize("layout", ["plain", "rounds"])
def test_another_process_that_traces_in_another_order_finds_every_graph(
    workshop: Workshop, runtime: Any, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setenv("PACELINE_NEURON_LAYOUT", layout)
    tokens, row, said, seen = torch.ones(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), [], 0
    for order in (1, -1):
        decoder = fresh(workshop.checkpoint(), backend="neuron", amp="f32", batch_size=2)
        jobs: list[Any] = [
            lambda one=decoder: steps.prefill(one, 0, [1, 2, 3]),
            lambda one=decoder: steps.window(one, tokens, row, bucket=64),
            lambda one=decoder: one.sample([[5, 5]], max_new_tokens=3),
        ]
        for job in jobs[::order]:
            job()
        said.append(decoder.sample([[5, 5]], max_new_tokens=3).tolist())
        made, seen = len(runtime().compiled) - seen, len(runtime().compiled)
        neuron.chip.cache_clear()
    assert said[0] == said[1]
    assert (made, seen >= 3) == (0, True)


def test_an_unknown_layout_is_refused(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv("PACELINE_NEURON_LAYOUT", "best")
    with pytest.raises(ConfigurationError, match="make it plain or rounds"):
        neuron.NeuronBackend()
