"""AOTInductor on the CPU: every graph is compiled ahead of time into a package that holds no weights.

The packages take weights and caches from the one set of the decoder, by reference. Products, attention and the choice
of a token are calls of the native kernels; Inductor fuses what lies between them. A package is reused from the cache
for any checkpoint of the same shape, on the same kind of machine, by the same version of the source.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import ArtefactError, BackendError
from paceline.core.types import MultiRoundLimits, RoundReport
from paceline.decoder import environment
from paceline.decoder.backends.base import Graph, LocalBackend, Step
from paceline.decoder.compile import cache, torch_headers
from paceline.decoder.kernels import graph_product, graph_topk
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.native import build
from paceline.decoder.native.huge_pages import use_huge_pages
from paceline.decoder.native.ops import Native, c_shims
from paceline.decoder.native.rounds import CompiledGraph, Rounds

_PACKAGE = "graph.pt2"


class InductorBackend(LocalBackend):
    """Compiled CPU graphs."""

    name = "inductor"

    def __init__(self) -> None:
        build.require_compiler()
        build.build_both()
        for module in (graph_topk, graph_product):
            module.operator()  # a package from the cache may call it, though nothing was traced in this process
        self.kernels: Kernels = Native()
        self._root = environment.cache_root() / "inductor"
        self._shipped: Path | None = None

    def kv_buckets(self, requested: tuple[int, ...]) -> tuple[int, ...]:
        """One: the attention kernel reads the rows that are there, so a shorter bucket would gain nothing."""
        return requested[-1:]

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        facts = self._facts(graph.facts)
        folder = cache.find(self._shipped, facts) if self._shipped else None
        if folder is None:
            if cache.find(self._root, facts) is None:
                announce(f"compiling {graph.name}")
            folder = cache.ensure(self._root, facts, lambda to: _compile(graph, to))
        return _Package(folder, graph)

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        for graph in graphs:
            facts = self._facts(graph.facts)
            artefact = cache.find(self._shipped, facts) if self._shipped else None
            artefact = artefact or cache.find(self._root, facts)
            assert artefact is not None, f"{graph.name} was compiled but is not in the cache"
            cache.copy(artefact, folder)

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        expected = self._facts(facts)
        try:
            manifests = [json.loads(path.read_text()) for path in sorted(folder.glob(f"*/{cache.MANIFEST}"))]
        except (OSError, ValueError) as error:
            raise ArtefactError(f"{folder} holds a damaged manifest ({error}); copy the graphs again") from error
        if not manifests:
            raise ArtefactError(f"{folder} holds no compiled graphs; write them with decoder.save({str(folder)!r})")
        if not any(all(manifest.get(name) == value for name, value in expected.items()) for manifest in manifests):
            differ = sorted(name for name, value in expected.items() if manifests[0].get(name) != value)
            raise ArtefactError(
                f"the graphs in {folder} were compiled for something else: {', '.join(differ)} differ; compile them "
                "again on this machine with these options"
            )
        self._shipped = folder

    def _facts(self, facts: dict[str, object]) -> dict[str, object]:
        return {"backend": self.name, "source": cache.source_hash(), **cache.machine_facts(), **facts}


def _compile(graph: Graph, folder: Path) -> None:
    """Trace and compile into ``folder``; the weights stay outside."""
    include = torch_headers.include_folders()
    torch_headers.keep_precompiled(environment.cache_root() / "headers")
    configs = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": c_shims(),
        "aot_inductor.compile_wrapper_opt_level": "O0",
        # OpenMP's threads would spin for milliseconds behind each loop, on a core that the kernels' own team needs.
        "cpp.threads": 1,
        **_where_known({"aot_inductor.enable_line_tables": False}),
    }
    try:
        with torch.no_grad(), environment.inductor_scratch(include), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about its own trees
            program = torch.export.export(graph.module, graph.example, strict=False)
            path = str(folder / _PACKAGE)
            torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=configs)
    except Exception as error:
        raise BackendError(f"compiling {graph.name} failed: {type(error).__name__}: {error}") from error
    loader = torch._C._aoti.AOTIModelPackageLoader(str(folder / _PACKAGE), "model", False, 1, -1)
    strange = set(loader.get_constant_fqns()) - set(_state(graph))
    # A tensor made inside a step would have to be shipped with the package; steps use buffers or arange instead.
    assert not strange, f"{graph.name} holds constants of its own: {sorted(strange)}"


def _where_known(configs: dict[str, object]) -> dict[str, object]:
    """Those of Inductor's settings that this version of PyTorch has."""
    from torch._inductor import config  # seconds of imports

    known = config.get_config_copy()
    return {name: value for name, value in configs.items() if name in known}


class _Package:
    """A compiled graph with the decoder's own tensors in it. A `Step`, and a `MultiRoundStep` if the step is fused."""

    def __init__(self, folder: Path, graph: Graph) -> None:
        use_huge_pages(parameter.detach() for parameter in graph.module.parameters())
        try:
            self.graph = CompiledGraph(folder / _PACKAGE, _state(graph))
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ArtefactError(
                f"the package in {folder} cannot be loaded ({reason}); delete that folder, or copy it again"
            ) from error
        self._example = graph.example
        self._rounds: Rounds | None = None

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        return self.graph(*inputs)

    def run_rounds(
        self, inputs: list[Tensor], seconds: float, limits: MultiRoundLimits | None
    ) -> tuple[list[RoundReport], list[Tensor]]:
        """See `paceline.decoder.backends.base.MultiRoundStep`."""
        if self._rounds is None:
            self._rounds = Rounds(self.graph, self._example)
        return self._rounds(inputs, seconds, limits)


def _state(graph: Graph) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(graph.module.named_parameters(remove_duplicate=False))
    tensors |= dict(graph.module.named_buffers(remove_duplicate=False))  # a model that drafts for itself is there twice
    return {name: value.detach() for name, value in tensors.items()}
