"""The cells of an experiment's grid: each one target, drafter, depth, sampling, rule, batch size and prompt set.

A cell's key is a digest of everything that decides its figures but the machine and the versions: which models (by
content), which prompts (by content), and every option. So a finished cell is found again, whatever else in the file
has changed. Not here: running them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.locate import checkpoint_path
from paceline.draft_checks import recognise
from paceline.draft_spec import parse_draft
from paceline.experiments.config import (
    Depth,
    DrafterEntry,
    ExperimentConfig,
    PromptSet,
    SamplingEntry,
    TargetEntry,
    digest,
)

_SHARED = {"max_new_tokens", "seed", "repeats", "baseline", "ignore_eos", "backend", "amp", "n_positions", "exact"}
_EDGE = 1 << 16  # bytes at both ends of a weight file that are part of its fingerprint


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination. ``k`` is that of the generator; None where nothing is drafted or a tree says it."""

    target: TargetEntry
    drafter: DrafterEntry
    k: Depth
    sampling: SamplingEntry
    acceptor: str
    batch_size: int
    prompts: PromptSet

    def names(self) -> dict[str, object]:
        """What tells it from the others, for tables and rows."""
        return {
            "target": self.target.label,
            "drafter": self.drafter.label,
            "k": json.dumps(self.k) if isinstance(self.k, tuple) else self.k,
            "sampling": self.sampling.label,
            "temperature": self.sampling.temperature,
            "acceptor": self.acceptor,
            "batch_size": self.batch_size,
            "prompt_set": self.prompts.label,
        }

    def title(self) -> str:
        """One line."""
        depth = "" if self.k is None else f" k={self.k if not isinstance(self.k, tuple) else list(self.k)}"
        rule = "" if self.acceptor == "match" else f", {self.acceptor}"
        return (
            f"{self.target.label} + {self.drafter.label}{depth}, {self.sampling.label}{rule}, batch {self.batch_size}, "
            f"{self.prompts.label}"
        )


def cells(config: ExperimentConfig) -> Iterator[Cell]:
    """All cells, those that share decoders one after the other. Plain decoding has one depth and one rule."""
    for target, batch_size, prompts, drafter in product(
        config.targets, config.batch_sizes, config.prompt_sets, config.drafters
    ):
        depths: tuple[Depth, ...] = drafter.k if drafter.k is not None else config.k
        if drafter.plain or (_is_tree(drafter) and drafter.k is None):
            depths = (None,)
        rules = ("match",) if drafter.plain else config.acceptors
        for sampling, acceptor, k in product(config.samplings, rules, depths):
            yield Cell(target, drafter, k, sampling, acceptor, batch_size, prompts)


def _is_tree(drafter: DrafterEntry) -> bool:
    """Whether its tree says how deep it drafts: an option does, or it is Medusa's, whose folder has one."""
    return any(
        dict(spec.options).get("draft_tree", "chain") != "chain"
        or (spec.path is not None and recognise(spec.path) == "medusa")
        for spec in parse_draft(drafter.draft)
    )


def learns_from_texts(drafter: DrafterEntry) -> bool:
    """Whether what it proposes depends on texts that it drafted before: a suffix drafter with earlier outputs."""
    leaves = (leaf for spec in parse_draft(drafter.draft) for leaf in spec.leaves())
    return any(dict(leaf.options).get("max_cached_tokens") is not None for leaf in leaves)


def cell_key(cell: Cell, config: ExperimentConfig, *, prompts: str, models: tuple[str, ...]) -> str:
    """The cell's name on disk. ``prompts``: digest of its prompts' ids; ``models``: fingerprints."""
    shared = config.model_dump(include=_SHARED)
    parts = [
        cell.target.model_dump(exclude={"path", "name"}),
        cell.drafter.model_dump(exclude={"k", "name"}),
        cell.k,
        cell.sampling.model_dump(),
        cell.acceptor,
        cell.batch_size,
        prompts,
        models,
        shared,
    ]
    return digest(json.dumps(parts, sort_keys=True, default=str))


def fingerprint(path: str) -> str:
    """A digest of a checkpoint's files: configurations whole, of other files names, sizes and both ends.

    Raises:
        CheckpointError: there is no such folder or file.
    """
    place = checkpoint_path(path)
    if not place.exists():
        raise CheckpointError(f"{path} is neither a folder, a GGUF file nor a fetched model; check the path")
    files = [place] if is_gguf(place) or place.is_file() else sorted(file for file in place.iterdir() if file.is_file())
    seen = hashlib.sha256()
    for file in files:
        if file.suffix == ".md":
            continue
        size = file.stat().st_size
        seen.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            if file.suffix == ".json" or size <= 2 * _EDGE:
                seen.update(opened.read())
            else:
                seen.update(opened.read(_EDGE))
                opened.seek(-_EDGE, 2)
                seen.update(opened.read())
    return seen.hexdigest()[:16]


def model_paths(cell: Cell) -> tuple[str, ...]:
    """The checkpoints that a cell needs, the target's first."""
    leaves = (leaf for spec in parse_draft(cell.drafter.draft) for leaf in spec.leaves())
    return (cell.target.path, *(leaf.path for leaf in leaves if leaf.path is not None))


def check_models(config: ExperimentConfig) -> dict[str, str]:
    """The fingerprint of every checkpoint of an experiment, by its path.

    Raises:
        CheckpointError: one of them is not there.
    """
    paths = {path: None for cell in cells(config) for path in model_paths(cell)}
    missing = [path for path in paths if not Path(checkpoint_path(path)).exists()]
    if missing:
        raise CheckpointError(f"{', '.join(missing)}: no such checkpoint; correct the file, or fetch or train it first")
    return {path: fingerprint(path) for path in paths}


def checkpoint_bytes(path: str) -> int:
    """Size of a checkpoint's files."""
    place = checkpoint_path(path)
    files = place.iterdir() if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file == place or (file.is_file() and not is_gguf(file)))
