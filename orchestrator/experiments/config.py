"""The file of an experiment: a grid of targets, drafters, samplings, rules, batch sizes and prompt sets.

Every key is checked before any work; unknown ones are rejected. Prompts are in `prompts.py`; `runner.py` runs cells.

A cell's key is a digest of everything that determines its figures except the machine and the versions: models and
prompts (by content), and every option. So a finished cell is found again after other changes of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from paceline.config import OF_DRAFTS, OF_MODELS, SpeculativeConfig, parse_k
from paceline.core.errors import CheckpointError, ConfigurationError, PacelineError
from paceline.decoder.options import LoadOptions, renamed
from paceline.decoder.weights.folder import is_gguf, parts
from paceline.decoder.weights.hub import checkpoint_path
from paceline.draft_checks import recognise
from paceline.draft_spec import parse_draft, parse_rule
from paceline.engine.request import SamplingParams

PromptLayout = Literal["auto", "jsonl", "spec-bench", "speed-bench", "aiperf", "text", "lines"]
Depth = int | tuple[int, ...] | Literal["auto"] | None


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _depths(value: object) -> object:
    """One depth, or a list of them; of a list in the list every round chooses one."""
    return tuple(map(parse_k, _listed(value)))


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _apart(values: Any, **parts: frozenset[str]) -> Any:
    if not isinstance(values, Mapping):
        return values
    with renamed(values) as named:
        own = {key: value for key, value in named.items() if not any(key in keys for keys in parts.values())}
    found = {name: {key: named[key] for key in keys if named.get(key) is not None} for name, keys in parts.items()}
    return {**own, **{name: given for name, given in found.items() if name not in own}}


def _checked_load(given: Mapping[str, Any]) -> Mapping[str, Any]:
    LoadOptions.part_of(given)
    return given


def _checked_speculative(given: Mapping[str, Any]) -> Mapping[str, Any]:
    SpeculativeConfig.part_of({"draft": "ngram", **given})  # regardless of the drafter
    return given


def _checked_sampling(given: Mapping[str, Any]) -> Mapping[str, Any]:
    SamplingParams.asked(given).check()
    return {name: given[name] for name in SamplingParams.asked_names() if name in given}  # in one order


SAMPLING = frozenset(SamplingParams.asked_names()) - {
    *("temperature", "seed", "max_new_tokens", "ignore_eos", "logprobs", "prompt_logprobs"),
}
LOAD = frozenset(one.name for one in fields(LoadOptions)) - {"batch_size"}
SPECULATIVE = frozenset(SpeculativeConfig.model_fields) - {"draft", "k", "acceptor"}
"""Options of a sampling, a target and a drafter, except those of the whole experiment and of the grid."""

Load = Annotated[Mapping[str, Any], AfterValidator(_checked_load)]
Speculative = Annotated[Mapping[str, Any], AfterValidator(_checked_speculative)]


class TargetEntry(_Strict):
    """A target with its loading options, others than those of the experiment: in a file they are at its own level."""

    path: str
    name: str | None = None
    load: Load = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _parts(cls, values: Any) -> Any:
        return _apart(values, load=LOAD)

    @property
    def label(self) -> str:
        return self.name or Path(self.path).name or self.path


class DrafterEntry(_Strict):
    """A drafter of the grid in the grammar of `paceline.draft_spec`, a list of them, or ``none`` for plain decoding.
    Its keys of `SpeculativeConfig` are at its own level in a file.
    """

    draft: Any
    name: str | None = None
    k: Annotated[tuple[Depth, ...] | None, BeforeValidator(lambda v: None if v is None else _depths(v))] = None
    speculative: Speculative = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _parts(cls, values: Any) -> Any:
        return _apart(values, speculative=SPECULATIVE)

    @field_validator("draft")
    @classmethod
    def _known(cls, value: object) -> object:
        if any(leaf.value is not None for spec in parse_draft(value) for leaf in spec.leaves()):
            raise ConfigurationError(
                "drafters: expected text in the file of an experiment, got an object; use objects only from Python"
            )
        return value

    @property
    def label(self) -> str:
        return self.name or "+".join(str(spec) for spec in parse_draft(self.draft)) or "none"

    @property
    def vocabulary(self) -> str:
        return str(self.speculative.get("vocabulary", "same"))

    @property
    def plain(self) -> bool:
        return not parse_draft(self.draft)


class SamplingEntry(_Strict):
    """Sampling of an experiment: keys of `SamplingParams`, next to the temperature in a file."""

    temperature: float = Field(default=0.0, ge=0)
    params: Annotated[Mapping[str, Any], AfterValidator(_checked_sampling)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _parts(cls, values: Any) -> Any:
        return _apart(values, params=SAMPLING)

    @property
    def keys(self) -> dict[str, Any]:
        return {"temperature": self.temperature, **self.params}

    @property
    def label(self) -> str:
        """For tables: ``greedy``, or what is not at its default."""
        shown = (name for name in self.params if self.temperature or name not in ("top_k", "top_p", "min_p"))
        first = f"T={self.temperature:g}" if self.temperature else "greedy"
        return ", ".join([first, *(f"{name}={self.params[name]:g}" for name in shown)])


class PromptSet(_Strict):
    """Prompts from a file or a folder. ``chat``: apply the target's template; ``auto``: if there is one and these are
    questions.
    """

    path: str
    name: str | None = None
    layout: PromptLayout = "auto"
    chat: bool | Literal["auto"] = "auto"
    system: str | None = None
    count: int | None = Field(default=None, ge=1)
    per_category: int | None = Field(default=None, ge=1)
    categories: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        return self.name or Path(self.path).stem


def _paths(value: object) -> object:
    return [{"path": entry} if isinstance(entry, str) else entry for entry in _listed(value)]


def _drafters(value: object) -> object:
    return [entry if isinstance(entry, dict) and "draft" in entry else {"draft": entry} for entry in _listed(value)]


def _rules(value: object) -> object:
    return tuple(str(parse_rule(entry)) for entry in _listed(value))


class ExperimentConfig(_Strict):
    """A whole experiment.

    load            keys of `LoadOptions`, for all targets; in a file they are at the same level as the others
    speculative     keys of `SpeculativeConfig`, for all drafters; likewise

    max_new_tokens  of every output
    repeats         timed runs of every group of prompts; medians are reported
    baseline        also time plain decoding of every group, alternating with the cell, and compare the tokens
    traces          record every drafter's proposals along the outputs, for what-if queries
    runs            run the cells; off: only record traces, which answer all queries that need no times
    ray             address of a Ray cluster on which cells run concurrently; "auto" finds that of this machine, "local"
                    starts one; None: one cell after the other, in this process
    cores_per_cell  exclusive NeuronCores of a cell on the cluster, or CPUs if there are none
    cells_at_once   on the cluster; None: up to its capacity
    ignore_eos      ignore eos ids, so that all outputs have one length
    """

    name: str = "experiment"
    targets: Annotated[tuple[TargetEntry, ...], BeforeValidator(_paths)] = Field(min_length=1)
    drafters: Annotated[tuple[DrafterEntry, ...], BeforeValidator(_drafters)] = Field(min_length=1)
    prompt_sets: Annotated[tuple[PromptSet, ...], BeforeValidator(_paths)] = Field(min_length=1)
    k: Annotated[tuple[Depth, ...], BeforeValidator(_depths)] = (4,)
    samplings: Annotated[tuple[SamplingEntry, ...], BeforeValidator(_listed)] = (SamplingEntry(),)
    acceptors: Annotated[tuple[str, ...], BeforeValidator(_rules)] = ("match",)
    batch_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_listed)] = (1,)
    max_new_tokens: int = Field(default=128, ge=2)
    seed: int = Field(default=0, ge=0)
    repeats: int = Field(default=1, ge=1)
    baseline: bool = True
    traces: bool = False
    runs: bool = True
    ignore_eos: bool = False
    load: Load = Field(default_factory=dict)
    speculative: Speculative = Field(default_factory=dict)
    ray: str | None = None
    cores_per_cell: int = Field(default=1, ge=1)
    cells_at_once: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _parts(cls, values: Any) -> Any:
        return _apart(values, load=LOAD, speculative=SPECULATIVE)

    @model_validator(mode="after")
    def _check_names(self) -> ExperimentConfig:
        """Results, traces and comparisons go by names, so that none may stand for two things."""
        for key in ("targets", "drafters", "samplings", "prompt_sets"):
            names = [one.label for one in getattr(self, key)]
            if twice := [name for name in names if names.count(name) > 1]:
                remedy = "leave one out" if key == "samplings" else "give each a different `name`"
                raise ConfigurationError(f"{key}: expected different names, got {twice[0]!r} twice; {remedy}")
        return self


def load_options(config: ExperimentConfig, target: TargetEntry) -> dict[str, Any]:
    return {**config.load, **target.load}


def speculative_options(config: ExperimentConfig, cell: Cell) -> dict[str, Any]:
    """The keys of `SpeculativeConfig` that are given for a cell."""
    given = {**config.speculative, **cell.drafter.speculative, "k": cell.k}
    if cell.drafter.plain:
        needless = SpeculativeConfig.names(OF_DRAFTS, OF_MODELS)
        return {name: value for name, value in given.items() if name not in needless}
    return {**given, "draft": cell.drafter.draft, "acceptor": cell.acceptor}


def load_config(path: Path) -> ExperimentConfig:
    """Read a YAML file, or raise ConfigurationError. Paths in it are relative to the working directory."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: the experiment cannot be read ({error}); correct the file") from error
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{path}: expected a mapping with targets, drafters and prompt_sets, got another value; correct the file"
        )
    return parse_config(values, str(path))


def parse_config(values: dict[str, Any], where: str) -> ExperimentConfig:
    """Make an experiment from plain values, or raise ConfigurationError; ``where`` is their name in errors."""
    try:
        return ExperimentConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        place = f"{where}: {'.'.join(map(str, first['loc']))}" if first["loc"] else where
        if first["type"] == "extra_forbidden":
            raise ConfigurationError(f"{place}: not a key; correct or remove it") from error
        if isinstance(cause := first.get("ctx", {}).get("error"), PacelineError):
            text = str(cause).removeprefix(f"{first['loc'][-1]}: " if first["loc"] else "")
            raise ConfigurationError(f"{place}: {text}") from error
        if first["type"] == "missing":
            raise ConfigurationError(f"{place}: expected a value, got none; give one") from error
        wanted = first["msg"].replace("Input should be", "expected", 1)
        raise ConfigurationError(f"{place}: {wanted}, got {first['input']!r:.60}; correct it") from error
    except TypeError as error:  # keys that are not text
        raise ConfigurationError(f"{where}: {error}; correct the keys") from error


def digest(value: str | bytes) -> str:
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16]


_SHARED = {"max_new_tokens", "seed", "repeats", "baseline", "ignore_eos"}
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
        """Fields that distinguish this cell from others, for tables and rows."""
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
        depth = "" if self.k is None else f" k={self.k if not isinstance(self.k, tuple) else list(self.k)}"
        rule = "" if self.acceptor == "match" else f", {self.acceptor}"
        return (
            f"{self.target.label} + {self.drafter.label}{depth}, {self.sampling.label}{rule}, batch {self.batch_size}, "
            f"{self.prompts.label}"
        )


def cells(config: ExperimentConfig) -> Iterator[Cell]:
    """Return all cells; those that share decoders are consecutive. Plain decoding has one depth and one rule."""
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
    """Whether its proposals depend on earlier sequences, as in a suffix drafter with earlier outputs."""
    leaves = (leaf for spec in parse_draft(drafter.draft) for leaf in spec.leaves())
    return any(dict(leaf.options).get("max_cached_tokens") is not None for leaf in leaves)


def cell_key(cell: Cell, config: ExperimentConfig, *, prompts: str, models: tuple[str, ...]) -> str:
    """The cell's name on disk. ``prompts``: digest of its prompts' ids; ``models``: fingerprints."""
    shared = config.model_dump(include=_SHARED)
    parts = [
        load_options(config, cell.target),
        {**speculative_options(config, cell), "draft": cell.drafter.draft},
        cell.sampling.model_dump(),
        cell.batch_size,
        prompts,
        models,
        shared,
    ]
    return digest(json.dumps(parts, sort_keys=True, default=str))


def fingerprint(path: str) -> str:
    """Digest of whole configurations and, of other files, names, sizes and both ends, or CheckpointError."""
    place = checkpoint_path(path)
    if not place.exists():
        raise CheckpointError(f"{path}: expected a folder, a GGUF file or a fetched model, got neither; check the path")
    files = sorted(file for file in place.iterdir() if file.is_file()) if place.is_dir() else parts(place)
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
    """Fingerprint of every checkpoint of an experiment, by its path; CheckpointError: one does not exist."""
    paths = {path: None for cell in cells(config) for path in model_paths(cell)}
    missing = [path for path in paths if not Path(checkpoint_path(path)).exists()]
    if missing:
        raise CheckpointError(
            f"{', '.join(missing)}: the checkpoint does not exist; correct the file, or fetch or train it first"
        )
    return {path: fingerprint(path) for path in paths}


def checkpoint_bytes(path: str) -> int:
    place = checkpoint_path(path)
    files = place.iterdir() if place.is_dir() else parts(place)
    return sum(file.stat().st_size for file in files if not place.is_dir() or (file.is_file() and not is_gguf(file)))
