"""The fake enforces what the SDK's documents demand: each test breaks one rule, and the fake reports it.

Without this a test on the fake would show little: what it lets through counts as right.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.neuron.chips import Chip
from paceline.neuron.sdk import Sdk
from tests.neuron.conftest import DOUBLE

FLAGS = "--target=inf2"


@pytest.fixture
def sdk(install: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Import a module of the fake, for a process that sees cores 4 to 7 of a chip."""

    def module(name: str, *, cores: str = "4-7", target: str = "inf2") -> ModuleType:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        return importlib.import_module(name)

    install()
    return module


class Step(nn.Module):
    """x, a weight and a state, and whatever is done with them."""

    def __init__(self, function: Callable[..., Any], weight: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2) if weight is None else weight, requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)

    def set(self, name: str, value: Tensor) -> Tensor:
        object.__setattr__(self, name, value)  # as a step writes a buffer while it is traced
        return value


class Other(Step):
    def forward(self, y: Tensor, x: Tensor) -> Any:  # type: ignore[override]
        return self.function(self, x + y)


class Loose(nn.Module):
    def forward(self, *given: Tensor) -> Tensor:
        return given[0]


def count(module: Step, x: Tensor) -> Tensor:
    return x * module.weight + module.set("state", module.state + 1)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step(lambda m, x: x + m.state.add_(1)), "in-place operation"),
        (Step(lambda m, x: x + m.set("state", torch.cat([m.state, x]))[:2]), "changes its shape or type"),
        (Step(lambda m, x: x + m.set("state", m.state.double())), "changes its shape or type"),
        (Step(lambda m, x: x + m.set("weight", m.weight * 2)), "only registered buffers can be states"),
        (Step(lambda _m, x: x if bool(x.sum() > 0) else -x), r"tracing tensor|data-dependent"),
        (Loose(), "not supported"),  # a signature names its inputs
    ],
)
def test_forbidden_operations_of_a_step_raise(sdk: Any, step: nn.Module, words: str) -> None:
    functions = sdk("neuronx_distributed.trace.functions")
    with pytest.raises((RuntimeError, NotImplementedError), match=words):
        functions.trace(step, kwargs={"x": torch.ones(2)})


NARROW = torch.ones(2).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("flags", "weight", "words"),
    [
        ("--auto-cast=none", None, "no --target"),
        ("--target=inf1", None, "no --target"),
        ("--target=trn1 --lnc=2", None, "NCC_EARG001"),
        ("--target=trn2", NARROW, "NCC_EVRF051"),  # the page of this error names the flag
        (Sdk(Chip.TRN2, 31, (), 2).flags(prompt=False, e4m3=True), NARROW, ""),
    ],
)
def test_compiler_flags_are_checked(sdk: Any, tmp_path: Path, flags: str, weight: Tensor | None, words: str) -> None:
    functions = sdk("neuronx_distributed.trace.functions")
    traced = functions.trace(Step(lambda m, x: x * m.weight.float(), weight), kwargs={"x": torch.ones(2)})
    with pytest.raises(RuntimeError, match=words) if words else nullcontext():
        functions.compile(traced.hlo, traced.metaneff, str(tmp_path), flags)


class Maker:
    """An `NxDModel` of the fake, in parts."""

    def __init__(self, sdk: Any, folder: Path) -> None:
        self._functions = sdk("neuronx_distributed.trace.functions")
        self._folder = folder
        states = sdk("neuronx_distributed.trace.nxd_model.base_nxd_model").StateInitializer(
            {"state": [2]}, {"state": torch.float32}, 1
        )
        self.model = sdk("neuronx_distributed.trace.nxd_model.nxd_model").NxDModel(1, state_initializer=states)

    def traced(self, module: nn.Module, **inputs: Tensor) -> tuple[Any, Any]:
        made = self._functions.trace(module, kwargs=inputs)
        return made, self._functions.compile(made.hlo, made.metaneff, str(self._folder), FLAGS)

    def ready(self) -> Any:
        self.model.set_weights([{"weight": torch.ones(2)}])
        self.model.to_neuron()
        return self.model


@pytest.fixture
def maker(sdk: Any, tmp_path: Path) -> Maker:
    return Maker(sdk, tmp_path / "work")


def test_shapes_and_types_are_frozen_and_a_state_stays(maker: Maker) -> None:
    maker.model.add("a", *maker.traced(Step(count), x=torch.ones(2)))
    with pytest.raises(RuntimeError, match="not initialized"):
        maker.model(torch.ones(2))
    with pytest.raises(AssertionError, match="loaded on neuron before"):
        maker.model.read_from_neuron_buffer("state", 0)
    model = maker.ready()
    assert [model(torch.ones(2))[0].tolist() for _ in range(2)] == [[2.0, 2.0], [3.0, 3.0]]
    with pytest.raises(KeyError):
        model(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"must be a CPU tensor of torch\.float32"):
        model(torch.ones(2, dtype=torch.int32))
    with pytest.raises(KeyError, match="another shape"):
        model.write_to_neuron_buffer(torch.ones(3), "state", 0)
    with pytest.raises(ValueError, match="already loaded"):
        model.set_weights([{}])


def test_graphs_of_one_model_share_weights_and_state(maker: Maker) -> None:
    first, second = maker.traced(Step(count), x=torch.ones(2)), maker.traced(Step(count), x=torch.ones(2))
    maker.model.add("a", *first)
    with pytest.raises(AssertionError, match="layout type"):
        maker.model.add("again", *first)
    with pytest.raises(AssertionError, match="different signature"):
        maker.model.add("other", *maker.traced(Other(count), y=torch.ones(2), x=torch.ones(2)))
    with pytest.raises(RuntimeError, match="compiled from another graph"):
        maker.model.add("foreign", second[0], maker.traced(Step(lambda _m, x: x * 3), x=torch.ones(2))[1])
    fresh = maker.traced(Step(count), x=torch.ones(2))
    maker.model.add("b", *fresh)
    model = maker.ready()
    with pytest.raises(AssertionError, match="several possible routes"):
        model(torch.ones(2))
    assert model(torch.ones(2), model_name="b")[0].tolist() == [2.0, 2.0]
    assert model(torch.ones(2), model_name="a")[0].tolist() == [3.0, 3.0], "they share the state"


def test_every_traced_weight_is_required(maker: Maker) -> None:
    maker.model.add("a", *maker.traced(Step(count), x=torch.ones(2)))
    maker.model.set_weights([{}])
    with pytest.raises(RuntimeError, match="weight is not there"):
        maker.model.to_neuron()
    maker.model.set_weights([{"weight": torch.ones(3)}])
    with pytest.raises(RuntimeError, match="another shape or type"):
        maker.model.to_neuron()


@pytest.mark.parametrize("cores", ["3,5,6", "5,4", "7-4"])
def test_cores_are_contiguous(sdk: Any, cores: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"not contiguous|range"):
        sdk("torch_neuronx", cores=cores)


@pytest.mark.parametrize(("target", "good", "bad"), [("inf2", 4, 16), ("trn1", 8, 4), ("trn2", 16, 24)])
def test_degrees_are_limited_by_the_chip_and_the_visible_cores(sdk: Any, target: str, good: int, bad: int) -> None:
    runtime = sdk("torch_neuronx", cores="0-31", target=target).RUNTIME
    with pytest.raises(RuntimeError, match="Unsupported topology"):
        runtime.reserve(bad)
    runtime.reserve(good)
    assert len(runtime.locks) == good
    with pytest.raises(RuntimeError, match="Could not open"):
        type(runtime)(cores=[0]).reserve(2)


ELSEWHERE = "import torch_neuronx; torch_neuronx.RUNTIME.reserve(2); print(len(torch_neuronx.RUNTIME.locks))"


def test_a_core_has_one_process_and_is_numbered_from_its_first(sdk: Any) -> None:
    """Cores 0 and 1 of this process are 4 and 5 of the machine: another process may have 6 and 7, and not 5 and 6."""
    sdk("torch_neuronx").RUNTIME.reserve(2)
    said = []
    for cores in ("6-7", "5-6"):
        env = {**os.environ, "NEURON_RT_VISIBLE_CORES": cores, "PYTHONPATH": str(DOUBLE)}
        done = subprocess.run([sys.executable, "-c", ELSEWHERE], env=env, capture_output=True, text=True, timeout=120)
        said.append((done.returncode, done.stdout.strip(), "nc5-nc5 Available:0" in done.stderr))
    assert said == [(0, "2", False), (1, "", True)]


def test_the_environment_is_read_when_it_is_imported(sdk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = sdk("torch_neuronx").RUNTIME
    monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", "60")
    assert runtime.timeout is None


def test_collectives_need_their_group_and_floats(sdk: Any) -> None:
    mappings = sdk("neuronx_distributed.parallel_layers.mappings")
    context = sdk("neuronx_distributed.trace.parallel_context")
    for collective in (
        mappings.reduce_from_tensor_model_parallel_region,
        mappings.gather_from_tensor_model_parallel_region,
    ):
        with pytest.raises(AssertionError, match="not initialized"):
            collective(torch.ones(2))
    with context.NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        with pytest.raises(RuntimeError, match="NCC_EVRF061"):
            mappings.reduce_from_tensor_model_parallel_region(torch.ones(2, dtype=torch.int32))
        assert mappings.gather_from_tensor_model_parallel_region(torch.ones(2)).shape == (4,)
    with pytest.raises(RuntimeError, match="is not divisible by tensor_model_parallel_size"):
        context.NxDParallelState(world_size=3, tensor_model_parallel_size=2)


def test_ranks_must_agree(sdk: Any, tmp_path: Path) -> None:
    """Only rank 0's outputs come back, so that the others' must be the same."""
    maker = Maker(sdk, tmp_path)
    model = sdk("neuronx_distributed.trace.nxd_model.nxd_model").NxDModel(2)
    model.add("a", *maker.traced(Step(lambda m, x: x * m.weight), x=torch.ones(2)))
    model.set_weights([{"weight": torch.full((2,), float(rank)), "state": torch.zeros(2)} for rank in (1, 2)])
    model.to_neuron()
    with pytest.raises(RuntimeError, match="ranks disagree"):
        model(torch.ones(2))
