"""A compiled graph is used again only where everything it depends on is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.decoder import steps
from paceline.decoder.backends.base import Graph
from paceline.decoder.graph_key import GraphKey
from paceline.neuron import backend
from tests.decoder.tiny import Workshop, fresh
from tests.neuron.conftest import SDK, forget


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * self.by,)


class Cache:
    """One cache folder for several processes, each with a compiler of its own and another machine around it."""

    def __init__(self, site: Path, patch: pytest.MonkeyPatch) -> None:
        self._site, self._patch = site, patch

    def compiled(
        self, *, kind: str = "verify", by: float = 2.0, target: str = "trn2", logical: str = "2", **versions: str
    ) -> list[str]:
        """The flags of what this process compiles for one graph; nothing if it finds the graph."""
        forget()
        self._patch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        self._patch.setenv("NEURON_LOGICAL_NC_CONFIG", logical)
        for variable in ("NEURON_RT_EXEC_TIMEOUT", "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_COMPILE_CACHE_URL"):
            self._patch.delenv(variable, raising=False)
        for package, version in (SDK | {key.replace("_", "-"): value for key, value in versions.items()}).items():
            info = self._site / f"{package.replace('-', '_')}-{SDK[package]}.dist-info"
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        step = backend.NeuronBackend().compile(
            Graph(GraphKey(kind), Scale(by), (torch.ones(2),), {"graph": "the same"}), lambda _line: None
        )
        assert step(torch.ones(2))[0].tolist() == [by, by]
        import torch_neuronx

        return list(torch_neuronx.RUNTIME.compiled)


@pytest.fixture
def cache(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    install()
    return Cache(tmp_path / "site", monkeypatch)


def test_the_key_holds_versions_chip_flags_and_the_graph(cache: Cache) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"neuronx_cc": "2.24.5133.0"},
        {"neuronx_cc": "2.23.9999.0"},
        {"torch_neuronx": "2.9.0.2.13.0"},
        {"neuronx_distributed": "0.18.1"},
        {"target": "inf2", "logical": "1"},
        {"target": "trn1", "logical": "1"},
        {"logical": "1"},
        {"by": 3.0},
        {"kind": "prefill"},  # the same graph, with the flags of one that reads a prompt
    ]
    flags = [cache.compiled(**change) for change in changes]
    assert [len(one) for one in flags] == [1] * len(changes), "each is compiled by itself"
    assert [cache.compiled(**change) for change in changes] == [[]] * len(changes), "and found again"
    assert "-O1" in flags[-1][0] and "-O2" in flags[0][0]
    assert "--lnc=2" in flags[0][0] and "--lnc=1" in flags[7][0] and "--target=inf2" in flags[5][0]


def test_another_process_that_traces_in_another_order_finds_every_graph(workshop: Workshop, runtime: Any) -> None:
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
        backend.chip.cache_clear()
    assert said[0] == said[1]
    assert (made, seen >= 3) == (0, True)
