"""Our calls of neuronx_distributed through its own Python, where a machine has it; nothing of it is in this repository.

PACELINE_NXD_SOURCE names a folder that holds ``neuronx_distributed`` (a site-packages, or ``src`` of its repository).
Its validation, tracing, compilation, routing, parallel state and mappings are real here; below them `generate_hlo`, the
protobufs, the compiler, the loader and `SPMDModel` are the fake's (double/README.md), and so is the device.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.neuron import noise_record
from paceline.neuron import sdk as neuron_sdk
from tests.decoder.tiny import Workshop
from tests.neuron.conftest import load

SOURCE = os.environ.get("PACELINE_NXD_SOURCE")
FILES = (
    "trace/functions.py", "trace/hlo_utils.py", "trace/model_builder_utils.py", "trace/mock_torchdist.py",
    "trace/parallel_context.py", "trace/nxd_model/base_nxd_model.py", "trace/nxd_model/nxd_model.py",
    "trace/nxd_model/utils.py", "parallel_layers/comm.py", "parallel_layers/mappings.py",
    "parallel_layers/parallel_state.py", "parallel_layers/utils.py", "utils/__init__.py", "utils/logger.py",
    "utils/model_utils.py", "utils/random.py", "utils/utils.py",
)  # fmt: skip
"""Those that run. Packages are imported without their own ``__init__``, which imports training and pipelines too."""
BELOW = """import sys
import torch_neuronx.graphs
import torch_neuronx.utils
sys.modules["torch_neuronx.utils.utils"] = torch_neuronx.utils
"""
UNUSED = (
    "neuronxcc.nki", "neuronxcc.nki.language", "neuronxcc.nki.nccl", "neuronxcc.nki._pre_prod_kernels.collectives",
    "neuronxcc.nki.compiler.backends.neuron.dimensions", "torch_neuronx.pyhlo", "torch_neuronx.pyhlo.hlo_pb2",
    "torch_neuronx.pyhlo.xla_data_pb2", "torch_xla.core.xla_env_vars",
)  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 5]]


class Unused(ModuleType):
    """A module that the library imports, and of which our steps use nothing: every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if inner := sys.modules.get(f"{self.__name__}.{name}"):
            return inner
        return type(name, (), {"rank_src_tgt_pairs": ((),), "__init__": lambda _self, **_fields: None})


pytestmark = [
    pytest.mark.skipif(
        SOURCE is None, reason="PACELINE_NXD_SOURCE is not set: it names a folder that holds neuronx_distributed"
    ),
    pytest.mark.filterwarnings("ignore"),  # the library's own
]


@pytest.fixture
def real(install: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """The real files over the fake. Called when a decoder is loaded, gives the fake's runtime."""
    install()
    noise_record.write(neuron_sdk.find(), outcome=True)
    package, source = tmp_path / "real" / "neuronx_distributed", Path(str(SOURCE)) / "neuronx_distributed"
    digest = hashlib.sha256()
    for name in FILES:
        place = package / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source / name)
        digest.update((source / name).read_bytes())
    for folder in ("", "trace", "trace/nxd_model", "parallel_layers"):
        (package / folder / "__init__.py").write_text("" if folder else BELOW)
    for name in UNUSED:
        monkeypatch.setitem(sys.modules, name, Unused(name))
    (package / "trace" / "trace.py").write_text("get_sharded_checkpoint = preprocess_checkpoint = None\n")
    monkeypatch.syspath_prepend(str(package.parent))
    version = re.search(r'__version__ = "(.+)"', (source / "_version.py").read_text())
    print(f"neuronx_distributed {version and version.group(1)}, sha256 of {len(FILES)} files {digest.hexdigest()}")

    def loaded() -> Any:
        base: Any = importlib.import_module("neuronx_distributed.trace.nxd_model.base_nxd_model")
        assert Path(base.__file__).resolve() == (source / "trace/nxd_model/base_nxd_model.py").resolve()
        monkeypatch.setattr(base, "torch", _OnCpu())
        return importlib.import_module("torch_neuronx").RUNTIME

    return loaded


class _OnCpu:
    """PyTorch whose zeros are the host's, since the device of a rank does not exist."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, shape: list[int], *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert re.fullmatch(r"privateuseone:\d+", device)
        return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_fused_pair_keeps_the_tokens_on_the_real_library(
    workshop: Workshop, real: Callable[[], Any], degree: int
) -> None:
    found = []
    for backend in ("eager", "neuron"):
        cores = degree if backend == "neuron" else 1
        made = [load(workshop, role, backend=backend, tp_degree=cores) for role in ("draft", "target")]
        runtime = real() if backend == "neuron" else None
        done = SpeculativeGenerator(made[0], made[1], k=2).sample(PROMPTS, max_new_tokens=8, return_dict=True)
        found.append((done.sequences.tolist(), done.statistics.num_accepted_tokens_per_pos))
    assert found[0] == found[1]
    assert runtime is not None and runtime.calls and all("--target=inf2" in flags for flags in runtime.compiled)
