"""The file of an experiment: a grid of targets, drafters, samplings, rules, batch sizes and prompt sets.

Every key is checked here, before any work; unknown ones are refused. Not here: prompts (`prompts.py`), the cells of the
grid (`cells.py`), and running them (`runner.py`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.config import parse_k
from paceline.core.errors import ConfigurationError
from paceline.draft_spec import parse_draft, parse_rule

Layout = Literal["auto", "jsonl", "spec-bench", "speed-bench", "aiperf", "text", "lines"]
Depth = int | tuple[int, ...] | Literal["auto"] | None


def _listed(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _depths(value: object) -> object:
    """One depth, or a list of them; a list in the list is a ladder to choose from in every round."""
    entries = value if isinstance(value, list | tuple) else [value]
    return tuple(parse_k(entry) for entry in entries)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetEntry(_Strict):
    """A target, and how it is loaded; what is not said here is as the experiment says."""

    path: str
    name: str | None = None
    amp: str | None = None
    backend: str | None = None
    tp_degree: int = Field(default=1, ge=1)

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name or Path(self.path).name or self.path


class DrafterEntry(_Strict):
    """A drafter of the grid in the grammar of `paceline.draft_spec`, a list of them, or ``none`` for plain decoding."""

    draft: Any
    name: str | None = None
    k: Annotated[tuple[Depth, ...] | None, BeforeValidator(lambda v: None if v is None else _depths(v))] = None
    fused: bool | None = None
    confidence_threshold: float = Field(default=0.0, ge=0, le=1)
    vocabulary: Literal["same", "intersection", "retokenize"] = "same"

    @field_validator("draft")
    @classmethod
    def _known(cls, value: object) -> object:
        if any(leaf.value is not None for spec in parse_draft(value) for leaf in spec.leaves()):
            raise ConfigurationError("a file of an experiment names drafters by text; objects are for Python")
        return value

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name or "+".join(str(spec) for spec in parse_draft(self.draft)) or "none"

    @property
    def plain(self) -> bool:
        """Whether nothing is drafted."""
        return not parse_draft(self.draft)


class SamplingEntry(_Strict):
    """How the texts are sampled; the names are those of `paceline.engine.request.SamplingParams`."""

    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)

    @property
    def label(self) -> str:
        """For tables: ``greedy``, or what is not at its default."""
        if not self.temperature:
            return "greedy"
        filters = ((name, getattr(self, name)) for name in ("top_k", "top_p", "min_p"))
        return ", ".join([f"T={self.temperature:g}", *(f"{name}={v:g}" for name, v in filters if v is not None)])


class PromptSet(_Strict):
    """Prompts from a file or a folder.

    ``chat``: put them into the target's chat template; ``auto``: where it has one and the file holds questions.
    """

    path: str
    name: str | None = None
    layout: Layout = "auto"
    chat: bool | Literal["auto"] = "auto"
    system: str | None = None
    count: int | None = Field(default=None, ge=1)
    per_category: int | None = Field(default=None, ge=1)
    categories: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name or Path(self.path).stem


def _target(value: object) -> object:
    return [{"path": entry} if isinstance(entry, str) else entry for entry in _as_list(value)]


def _drafters(value: object) -> object:
    return [entry if isinstance(entry, dict) and "draft" in entry else {"draft": entry} for entry in _as_list(value)]


def _prompt_sets(value: object) -> object:
    return [{"path": entry} if isinstance(entry, str) else entry for entry in _as_list(value)]


def _rules(value: object) -> object:
    for entry in _as_list(value):
        parse_rule(entry)
    return tuple(str(parse_rule(entry)) for entry in _as_list(value))


def _as_list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


class ExperimentConfig(_Strict):
    """A whole experiment.

    max_new_tokens  of every text
    repeats         timed runs of every group of prompts; medians are shown
    baseline        also time plain decoding of every group, in turns with the cell, and compare the tokens
    traces          record every drafter's proposals along the texts, for what-if questions
    runs            run the cells; off: record traces alone, which answer whatever is no question of time
    ray             address of a Ray cluster on which cells run at the same time; "auto" finds that of this machine,
                    "local" starts one; None: one cell after the other, in this process
    cores_per_cell  on it: NeuronCores, or CPUs where there are none, that a cell has for itself
    cells_at_once   on it; None: as many as it has room for
    ignore_eos      let texts go on behind their end, so that all have one length
    """

    name: str = "experiment"
    targets: Annotated[tuple[TargetEntry, ...], BeforeValidator(_target)] = Field(min_length=1)
    drafters: Annotated[tuple[DrafterEntry, ...], BeforeValidator(_drafters)] = Field(min_length=1)
    prompt_sets: Annotated[tuple[PromptSet, ...], BeforeValidator(_prompt_sets)] = Field(min_length=1)
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
    backend: str = "native"
    amp: str = "bf16"
    n_positions: int | None = Field(default=None, ge=2)
    exact: bool = True
    ray: str | None = None
    cores_per_cell: int = Field(default=1, ge=1)
    cells_at_once: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_names(self) -> ExperimentConfig:
        """Results, traces and comparisons go by names, so that none may stand for two things."""
        for key in ("targets", "drafters", "samplings", "prompt_sets"):
            names = [one.label for one in getattr(self, key)]
            if twice := [name for name in names if names.count(name) > 1]:
                remedy = "leave one out" if key == "samplings" else "give each a `name` of its own"
                raise ConfigurationError(f"two {key} are called {twice[0]!r}; {remedy}")
        return self


def load_config(path: Path) -> ExperimentConfig:
    """The experiment of a YAML file. Paths in it are relative to the working directory.

    Raises:
        ConfigurationError: it cannot be read, or a key is unknown or out of range.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read as an experiment: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold a mapping with targets, drafters and prompt_sets")
    return parse_config(values, str(path))


def parse_config(values: dict[str, Any], where: str) -> ExperimentConfig:
    """The same from plain values; ``where`` is what errors call them.

    Raises:
        ConfigurationError: a key is unknown or out of range.
    """
    try:
        return ExperimentConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        if first["type"] == "extra_forbidden":
            raise ConfigurationError(f"{where}: there is no key {place!r}; leave it out or correct it") from error
        raise ConfigurationError(f"{where}: {place}: {first['msg']}") from error
    except TypeError as error:  # keys that are no text
        raise ConfigurationError(f"{where}: {error}") from error


def digest(value: str | bytes) -> str:
    """A short name for what is in a text."""
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16]
