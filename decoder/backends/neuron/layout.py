"""Compiling for Neuron, and the layout of weights: as one graph, the priority model, wants them, or as they are.

The steps are those of ModelBuilder V2's `compile` with a `priority_model_key` (neuronx_distributed, April 2026), by the
functions below it, since graphs come here one by one. The priority model is the graph of a round that has the most
weights: a round runs for every few tokens, a prompt is read once. When a larger one comes, all are compiled for that.
Not here: names and states (`paceline.decoder.backends.neuron.state`).
"""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.errors import BackendError
from paceline.decoder.graph_key import GraphKey

NEFF = "graph.neff"
_WRAPPED, _TRANSFORMER = "layout.hlo", "transformer"


@dataclass(frozen=True, slots=True)
class Entry:
    """A traced graph.

    traced  the SDK's record of it
    folder  its place in the cache for facts more than its own; filled by the function if it is not there
    """

    key: GraphKey
    traced: Any
    flags: str
    folder: Callable[[dict[str, object], Callable[[Path], None]], Path]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What is loaded: for every graph its record and the folder it was compiled into.

    transformer  makes weights of the names ``moved`` lie as the graphs want them; None: they do
    """

    parts: dict[str, tuple[Any, Path]]
    transformer: Any = None
    moved: frozenset[str] = frozenset()


class Compiler:
    """The SDK's compiler, with or without a priority model. ``logical``: physical cores of a logical one."""

    def __init__(self, *, layout: bool, logical: int) -> None:
        self.layout, self._logical = layout, logical
        self._functions: Any = importlib.import_module("neuronx_distributed.trace.functions")
        self._parts: Any = importlib.import_module("neuronx_distributed.trace.model_builder_utils")
        self._hlo: Any = importlib.import_module("neuronx_distributed.trace.hlo_utils") if layout else None

    def arrange(self, graphs: Mapping[str, Entry]) -> Arrangement:
        """Compile what is not compiled yet.

        Raises:
            BackendError: the compiler refuses a graph.
        """
        rounds = [key for key, entry in graphs.items() if entry.key.is_round]
        if not self.layout or not rounds:
            return Arrangement({key: (_anew(entry.traced), self.plain(entry)) for key, entry in graphs.items()})
        first = max(rounds, key=lambda key: len(graphs[key].traced.weight_name_to_idx))
        leader, marked = graphs[first], _anew(graphs[first].traced)
        self._hlo.mark_weights_for_wlo(
            trace_artifacts=marked, weights_to_skip_layout_optimization=marked.weight_names_to_skip
        )
        lead = leader.folder({"layout": "priority"}, partial(self._lead, leader, marked))
        if not (lead / _WRAPPED).is_file():  # it wants the weights as they are
            rest = {key: (_anew(entry.traced), self.plain(entry)) for key, entry in graphs.items() if key != first}
            return Arrangement({**rest, first: (marked, lead)})
        wanted = self._parts.WLOArtifacts(str(lead / NEFF), str(lead / _WRAPPED))
        parts = {first: (marked, lead)}
        for key, entry in graphs.items():
            if key != first:
                laid = _anew(entry.traced)
                self._hlo.apply_layout_transformation(
                    trace_artifacts=laid, priority_model_trace_artifacts=marked, wlo_artifacts=wanted, key=key
                )
                parts[key] = laid, entry.folder({"layout": lead.name}, partial(self._compile, entry, laid))
        files = [str(lead / f"{_TRANSFORMER}.{kind}") for kind in ("hlo", "neff", "metaneff")]
        return Arrangement(parts, self._parts.LayoutTransformerArtifacts(*files), frozenset(marked.weight_name_to_idx))

    def plain(self, entry: Entry) -> Path:
        """The folder of a graph for weights as they are."""
        return entry.folder({}, partial(self._compile, entry, entry.traced))

    def _compile(self, entry: Entry, traced: Any, folder: Path) -> None:
        """Into a folder of the cache: the SDK itself caches nothing on this way."""
        with _work(folder, entry) as work:
            made = self._functions.compile(traced.hlo, traced.metaneff, work, entry.flags, "graph")
            shutil.copyfile(made.neff_filepath, folder / NEFF)

    def _lead(self, entry: Entry, marked: Any, folder: Path) -> None:
        """The same for the priority model: what it wants of the weights comes with it."""
        with _work(folder, entry) as work:
            made = self._functions.compile_wlo(marked.hlo, marked.metaneff, work, entry.flags, "graph")
            shutil.copyfile(made.neff_filepath, folder / NEFF)
            moving = self._functions.compile_layout_transformer(
                made, marked.weight_name_to_idx, work, logical_nc_config=self._logical
            )
            if moving is not None:
                shutil.copyfile(made.wrapped_neff_hlo_filepath, folder / _WRAPPED)
                for kind in ("hlo", "neff", "metaneff"):
                    shutil.copyfile(getattr(moving, f"{kind}_filepath"), folder / f"{_TRANSFORMER}.{kind}")


@contextmanager
def _work(folder: Path, entry: Entry) -> Iterator[str]:
    """A folder for the compiler, removed behind it; its errors become ours."""
    work = folder / "work"
    try:
        yield str(work)
    except Exception as error:
        raise BackendError(f"neuronx-cc refused {entry.key} ({entry.flags}): {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _anew(traced: Any) -> Any:
    """A record of its own: layouts are written into it, and `NxDModel.add` takes one only once."""
    made = copy.copy(traced)
    made.hlo, made.metaneff, made.flattener = (copy.deepcopy(x) for x in (made.hlo, made.metaneff, made.flattener))
    return made
