"""The fake for the Neuron SDK (see double/README.md), importable under the SDK's names for one test at a time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from paceline.neuron import backend, noise_record
from paceline.neuron import sdk as neuron_sdk
from paceline.neuron.kernels import TraceableKernels
from tests.decoder.tiny import Workshop, fresh

NAMES = ("torch_neuronx", "neuronx_distributed", "neuronxcc", "torch_xla", "libneuronxla", "nki", "nkilib")
DOUBLE = Path(__file__).parent / "double"
SDK = {
    "neuronx-cc": "2.23.6484.0",
    "torch-neuronx": "2.9.0.2.12.0",
    "neuronx-distributed": "0.17.26814",
    "libneuronxla": "2.2.15515.0",
}

VARIABLES = ("NEURON_RT_EXEC_TIMEOUT", "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_COMPILE_CACHE_URL")
"""Those that the backend sets."""

Install = Callable[..., None]
Runtime = Callable[[], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder belongs to `make test-full`."""
    for item in items:
        if item.path.is_relative_to(DOUBLE.parent):
            item.add_marker("full")


def write_packages(site: Path, versions: dict[str, str]) -> None:
    """Write the metadata of installed packages."""
    for name, version in versions.items():
        info = site / f"{name.replace('-', '_')}-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


class Function(nn.Module):
    """A step that is a function of one input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.function(x),)


class Widened(TraceableKernels):
    """A mistake: activations stay float32, and every weight is made float32."""

    def linear(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, weight.float())


def forget() -> None:
    """Reset of the SDK, as by the end of a process."""
    backend.chip.cache_clear()
    runtime = sys.modules.get("torch_neuronx")
    if runtime is not None:
        runtime.RUNTIME.close()
    for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
        del sys.modules[name]
    importlib.invalidate_caches()


def load(workshop: Workshop, role: str = "target", *, backend: str = "neuron", slots: Any = 2, **more: Any) -> Any:
    """A separate decoder, which prints nothing about its graphs."""
    made = fresh(workshop.checkpoint(role), backend=backend, batch_size=slots, **more)
    made.on_graph = lambda _event: None
    return made


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Install the fake: ``install(versions=..., target=..., code=...)``."""

    def made(versions: dict[str, str] | None = None, *, target: str = "inf2", code: bool = True) -> None:
        write_packages(tmp_path / "site", SDK if versions is None else versions)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        if code:
            monkeypatch.syspath_prepend(str(DOUBLE))
        if target:
            monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)

    (tmp_path / "cores").mkdir()
    monkeypatch.setenv("NEURON_DOUBLE_CORES", str(tmp_path / "cores"))
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    forget()
    yield made
    forget()


@pytest.fixture
def runtime(install: Install) -> Runtime:
    """The fake torch_neuronx, imported by the backend. The check of the noise has passed."""
    install()
    noise_record.write(neuron_sdk.find(), outcome=True)
    return lambda: sys.modules["torch_neuronx"].RUNTIME
