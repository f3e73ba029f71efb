"""Export of a pair's graphs at real size into a folder, for a compiler on another machine: no weights, no chip.

With torch_xla they are HLO modules for neuronx-cc; without it, the lowered graphs as text. For chips of TorchNeuron
each is also the Python module that its compiler is given. `paceline.neuron.compile_graphs`, which compiles both, is
copied next to them. One graph of each kind is written, not one for each length and bucket.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.neuron import compile_graphs
from paceline.neuron.chips import CAPABILITIES
from paceline.neuron.lowering import Lowered, lower
from paceline.neuron.native import in_place
from paceline.neuron.round_cost import chip_in, counted, expected_seconds
from paceline.neuron.round_graphs import RoundSetup, fused_round, prefill_step
from paceline.neuron.sdk import Sdk
from paceline.placement.planning.instances import Instance

MANIFEST = "manifest.json"


def export(setup: RoundSetup, instance: Instance, folder: Path, *, layers: int | None = None) -> dict[str, object]:
    """Write the graphs, a manifest and the script. -> the manifest.

    ``layers``: largest number of layers of the target and of a draft model; None: all.

    Raises:
        ConfigurationError: the instance has no Neuron chip with a compiler target.
    """
    target = chip_in(instance)
    flags = Sdk(target, CAPABILITIES[target].lines[0], (), CAPABILITIES[target].logical[0]).flags
    folder.mkdir(parents=True, exist_ok=True)
    with_xla = importlib.util.find_spec("torch_xla") is not None
    graphs: list[dict[str, object]] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        made_of = _graphs(setup, layers)
    for name, module, example in made_of:
        with mode:
            lowered = lower(name, module, example)
        work = counted(setup, module, example)
        file = _write(folder, name, lowered, degree=setup.degree, with_xla=with_xla)
        graphs.append(
            {
                "name": name,
                "file": file.name,
                "format": "hlo" if with_xla else "fx",
                "flags": flags(prompt=name.startswith("prefill")),
                "operations": int(work.operations),
                "instructions": int(work.tiles),
                "bytes_read": int(work.read),
                "expected_ms": round(expected_seconds(work, instance) * 1e3, 3),
                "state": dict(zip(lowered.state, _shapes(lowered), strict=False)),
                "changed": list(lowered.changed),
                **(_torch(folder, name, lowered) if "neuron-native" in CAPABILITIES[target].backends else {}),
            }
        )
    made: dict[str, object] = {
        "paceline": metadata.version("paceline"),
        "torch": torch.__version__,
        "instance": instance.name,
        "target": target.value,
        "tp_degree": setup.degree,
        "k": setup.k,
        "sampling": setup.kind,
        "layers": layers or setup.target.num_layers,
        "graphs": graphs,
    }
    (folder / MANIFEST).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(compile_graphs.__file__, folder / "compile_graphs.py")
    return made


def _graphs(setup: RoundSetup, layers: int | None) -> list[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    """Return name, step and inputs of a prompt's chunk and of a round."""
    depth = min(layers or setup.target.num_layers, setup.target.num_layers)
    drafted = min(layers or setup.draft.layers, setup.draft.layers)
    return [("prefill", *prefill_step(setup, depth)), ("round", *fused_round(setup, depth, drafted))]


def _write(folder: Path, name: str, lowered: Lowered, *, degree: int, with_xla: bool) -> Path:
    if not with_xla:
        file = folder / f"{name}.fx.txt"
        file.write_text(str(lowered.graph.print_readable(print_output=False)), encoding="utf-8")
        return file
    from paceline.neuron import xla

    file = folder / f"{name}.hlo.pb"
    file.write_bytes(xla.hlo_module(lowered, degree=degree))
    return file


def _torch(folder: Path, name: str, lowered: Lowered) -> dict[str, object]:
    """Write a step as source of a function ``forward`` for `torch.compile`. -> the file, type and shape of inputs"""
    given = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in _values(lowered)]
    code = make_fx(in_place(lowered, torch.device("meta")))(*given).code.replace("def forward(self, ", "def forward(")
    file = folder / f"{name}.torch.py"
    file.write_text(f"import torch\nfrom torch import device, inf, nan\n{code}", encoding="utf-8")
    shapes = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in given]
    return {"torch_file": file.name, "tensors": shapes}


def _values(lowered: Lowered) -> list[Tensor]:
    return [node.meta["val"] for node in lowered.graph.graph.nodes if node.op == "placeholder"]


def _shapes(lowered: Lowered) -> list[str]:
    return [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in _values(lowered)]
