"""Compiling for Neuron, and the layout of weights: as one graph, the priority model, wants them, or as they are.

The steps are those of ModelBuilder V2's `compile` with a `priority_model_key` (neuronx_distributed, April 2026), by the
functions below it, since graphs come here one by one. The priority model is the graph of a round that has the most
weights: a round runs for every few tokens, a prompt is read once. When a larger one comes, all are compiled for that.
Not here: names and states (`paceline.decoder.backends.neuron.chip`).
"""

from __future__ import annotations

import copy
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.errors import BackendError
from paceline.decoder.graph_key import GraphKey

NEFF = "graph.neff"
_WRAPPED, _TRANSFORMER = "layout.hlo", "transformer"
_MAX_COMPILERS = 8  # each is a process of several GB


def compilers() -> int:
    """How many graphs are compiled at a time."""
    return min(_MAX_COMPILERS, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """A traced graph.

    traced    the SDK's record of it
    folder    its place in the cache for facts more than its own; filled by the function if it is not there
    announce  tells who asked for it how far it is
    """

    key: GraphKey
    traced: Any
    flags: str
    folder: Callable[[dict[str, object], Callable[[Path], None]], Path]
    announce: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What is loaded: for every graph its record and the folder it was compiled into.

    leader       the graph whose layout of weights all are compiled for; None: weights lie as they come
    transformer  makes weights of the names ``moved`` lie as the graphs want them; None: they do
    failed       graphs that the compiler refused
    """

    parts: dict[str, tuple[Any, Path]]
    failed: dict[str, BackendError]
    leader: str | None = None
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
        """Compile what is not compiled yet, several graphs at a time. One that the compiler refuses stops no other."""
        rounds = [key for key, entry in graphs.items() if entry.key.is_round]
        if not self.layout or not rounds:
            return Arrangement(*self._each(graphs, self._as_it_is))
        first = max(rounds, key=lambda key: len(graphs[key].traced.weight_name_to_idx))
        rest = {key: entry for key, entry in graphs.items() if key != first}
        leader, marked = graphs[first], _anew(graphs[first].traced)
        self._hlo.mark_weights_for_wlo(
            trace_artifacts=marked, weights_to_skip_layout_optimization=marked.weight_names_to_skip
        )
        try:
            # What moves the weights is kept with it and knows them by name.
            names: dict[str, object] = {"layout": "priority", "names": list(marked.weight_name_to_idx)}
            lead = leader.folder(names, partial(self._lead, leader, marked))
        except BackendError as error:  # the next largest round leads
            arrangement = self.arrange(rest)
            return replace(arrangement, failed={**arrangement.failed, first: error})
        if not (lead / _WRAPPED).is_file():  # it wants the weights as they are
            parts, failed = self._each(rest, self._as_it_is)
            return Arrangement({**parts, first: (marked, lead)}, failed)
        artefacts = self._parts.WLOArtifacts(str(lead / NEFF), str(lead / _WRAPPED))

        def follow(entry: Entry) -> tuple[Any, Path]:
            if not entry.traced.weight_name_to_idx:  # nothing of it can lie otherwise, and the SDK refuses it
                return self._as_it_is(entry)
            laid = _anew(entry.traced)
            self._hlo.apply_layout_transformation(
                trace_artifacts=laid, priority_model_trace_artifacts=marked, wlo_artifacts=artefacts, key=str(entry.key)
            )
            return laid, entry.folder({"layout": lead.name}, partial(self._compile, entry, laid))

        parts, failed = self._each(rest, follow)
        files = [str(lead / f"{_TRANSFORMER}.{kind}") for kind in ("hlo", "neff", "metaneff")]
        return Arrangement(
            {**parts, first: (marked, lead)},
            failed,
            leader=first,
            transformer=self._parts.LayoutTransformerArtifacts(*files),
            moved=frozenset(marked.weight_name_to_idx),
        )

    @staticmethod
    def _each(
        graphs: Mapping[str, Entry], make: Callable[[Entry], tuple[Any, Path]]
    ) -> tuple[dict[str, tuple[Any, Path]], dict[str, BackendError]]:
        """``make`` of every graph, each compiler a process beside the others. -> what it made, what was refused"""
        parts: dict[str, tuple[Any, Path]] = {}
        failed: dict[str, BackendError] = {}
        with ThreadPoolExecutor(compilers()) as pool:
            waiting = {key: pool.submit(make, entry) for key, entry in graphs.items()}
        for key, future in waiting.items():
            try:
                parts[key] = future.result()
            except BackendError as error:
                failed[key] = error
        return parts, failed

    def _as_it_is(self, entry: Entry) -> tuple[Any, Path]:
        return _anew(entry.traced), self.plain(entry)

    def plain(self, entry: Entry) -> Path:
        """The folder of a graph for weights as they are."""
        return entry.folder({}, partial(self._compile, entry, entry.traced))

    def _compile(self, entry: Entry, traced: Any, folder: Path) -> None:
        """Into a folder of the cache: the SDK itself caches nothing on this way."""
        with _work(folder, entry) as work:
            compiled = self._functions.compile(traced.hlo, traced.metaneff, work, entry.flags, "graph")
            shutil.copyfile(compiled.neff_filepath, folder / NEFF)

    def _lead(self, entry: Entry, marked: Any, folder: Path) -> None:
        """The same for the priority model: what it wants of the weights comes with it."""
        with _work(folder, entry) as work:
            compiled = self._functions.compile_wlo(marked.hlo, marked.metaneff, work, entry.flags, "graph")
            shutil.copyfile(compiled.neff_filepath, folder / NEFF)
            moving = self._functions.compile_layout_transformer(
                compiled, marked.weight_name_to_idx, work, logical_nc_config=self._logical
            )
            if moving is not None:
                shutil.copyfile(compiled.wrapped_neff_hlo_filepath, folder / _WRAPPED)
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
    record = copy.copy(traced)
    record.hlo, record.metaneff, record.flattener = (
        copy.deepcopy(x) for x in (record.hlo, record.metaneff, record.flattener)
    )
    return record
