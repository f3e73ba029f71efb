"""The models file: which models are wanted, in YAML, checked key by key.

    models:
      - {name: chat, path: models/chat, tp_degree: 8, n_positions: 2048, batch_size: 1, amp: bf16}
      - {name: chat-draft, path: models/small, tp_degree: 2, draft_of: chat}

Keys of a model:

    name          letters, digits, "-", "_" and "."
    path          checkpoint folder; or ``config``: a config.json (or its folder) to plan without weights
    tp_degree     a number, or "auto" (default): the smallest legal degree whose share fits on a core
    n_positions   longest text; default: what the model was trained on (loading refuses more; planning does not)
    batch_size    slots, default 1
    amp           bf16 (default), f16 or f32
    quantisation  none (default), int8 or fp8: of the products' weights; planned with, not yet run
    draft_of      the target's name, or a list: one draft server for several targets
    k             drafted tokens a round, default 4 (of a draft)
    quota         what the targets of a draft may have (`quota`): max_targets, max_slots, weights: {target: its weight}
    replicas      default 1; of a draft: as many as its target has, or fewer, which are then shared
    backend       inductor (default), eager, xla or neuron; tp_degree above 1 runs with eager and neuron
    group_query_attention  where K/V heads of a divided model live; default: whole heads, or copies

A mapping ``fault_policy`` may stand beside ``models``: how the workers are looked after (`care`).

Relative paths are relative to the file, or, where nothing is there, to the current folder. Nothing is loaded here but
configurations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import PlanError
from paceline.decoder.backends.base import BACKENDS
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import GQA
from paceline.placement.cluster.fault_policy import FaultPolicy, fault_policy_of
from paceline.placement.planning.footprint import NUMBER_BYTES, QUANTISED_BYTES, Shape
from paceline.placement.planning.quota import Quota, read_quota, settled
from paceline.placement.planning.yaml_file import read_yaml

_KEYS = frozenset(
    {
        "name", "path", "config", "tp_degree", "n_positions", "batch_size", "amp", "quantisation", "draft_of", "k",
        "replicas", "backend", "group_query_attention", "quota",
    }
)  # fmt: skip
_BACKENDS = ("inductor", *(name for name in BACKENDS if name != "inductor"))
_LAYOUTS = tuple(one.value for one in GQA)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One entry.

    ``folder`` is None when only a configuration was given; ``degree`` None means auto; ``clients`` is how many targets
    each replica of a draft serves, each with a cache of its own.
    """

    name: str
    config: ModelConfig
    folder: Path | None
    shape: Shape
    degree: int | None = None
    draft_of: tuple[str, ...] = ()
    k: int = 4
    replicas: int = 1
    clients: int = 1
    backend: str = "inductor"
    gqa: GQA | None = None
    quota: Quota = field(default_factory=Quota)


def read_models(file: Path) -> tuple[ModelSpec, ...]:
    """The models of a YAML file.

    Raises:
        PlanError: the file cannot be read, or an entry is wrong; the message names it.
        CheckpointError: a model's configuration cannot be used.
    """
    return models_of(_content(file)["models"], folder=file.parent, where=str(file))


def read_care(file: Path) -> FaultPolicy:
    """How the workers of a YAML file's models are to be looked after: its ``fault_policy``, or the defaults.

    Raises:
        PlanError: the file cannot be read, or a value is wrong; the message names it.
    """
    return fault_policy_of(_content(file).get("fault_policy", {}), f"{file}, fault_policy")


def _content(file: Path) -> Mapping[str, Any]:
    from yaml import YAMLError

    try:
        content = read_yaml(file)
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise PlanError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("models"), list):
        raise PlanError(f"{file} must hold a list `models`; see `paceline plan --help`")
    unknown = sorted(str(key) for key in set(content) - {"models", "fault_policy"})
    if unknown:
        raise PlanError(f"{file}: {unknown[0]!r} is not a key of the file; there are models and fault_policy")
    return content


def models_of(entries: Sequence[object], *, folder: Path, where: str) -> tuple[ModelSpec, ...]:
    """The models of a list of entries, checked one by one and against each other."""
    if not entries:
        raise PlanError(f"{where} names no model; add an entry below `models`")
    found: list[ModelSpec] = []
    given: dict[str, Mapping[str, object]] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise PlanError(f"{where}: model {number} is not a mapping of keys")
        model = _model(entry, folder, f"{where}, model {entry.get('name', number)!r}")
        if model.name in given:
            raise PlanError(f"{where}: two models are called {model.name!r}; names must differ")
        given[model.name] = entry
        found.append(model)
    return tuple(_paired(model, found, given[model.name]) for model in found)


def _model(entry: Mapping[str, object], folder: Path, where: str) -> ModelSpec:
    unknown = sorted(str(key) for key in set(entry) - _KEYS)
    if unknown:
        raise PlanError(f"{where}: {unknown[0]!r} is not a key; there are {', '.join(sorted(_KEYS))}")
    name = _text(entry, "name", where, default=None)
    if not _NAME.fullmatch(name):
        raise PlanError(f"{where}: a name is up to 63 letters, digits, '-', '_' or '.', not {name!r}")
    config, home = _configuration(entry, folder, where)
    amp = _choice(entry, "amp", where, of=tuple(NUMBER_BYTES))
    quantisation = _choice(entry, "quantisation", where, of=("none", *QUANTISED_BYTES))
    positions = _count(entry, "n_positions", where, default=config.max_position_embeddings)
    shape = Shape(amp, quantisation, _count(entry, "batch_size", where, default=1), positions)
    wanted = entry.get("tp_degree", "auto")
    degree = None if wanted == "auto" else _count(entry, "tp_degree", where, default=1)
    backend = _choice(entry, "backend", where, of=_BACKENDS)
    gqa = GQA(_choice(entry, "group_query_attention", where, of=_LAYOUTS)) if "group_query_attention" in entry else None
    k, replicas = (_count(entry, key, where, default=default) for key, default in (("k", 4), ("replicas", 1)))
    return ModelSpec(name, config, home, shape, degree, _targets(entry, where), k, replicas, backend=backend, gqa=gqa)


def _configuration(entry: Mapping[str, object], folder: Path, where: str) -> tuple[ModelConfig, Path | None]:
    if ("path" in entry) == ("config" in entry):
        raise PlanError(f"{where}: give `path` (a checkpoint folder) or `config` (a config.json), one of them")
    if "path" in entry:
        home = _found(folder, _text(entry, "path", where, default=None), where)
        return ModelConfig.from_pretrained(home), home
    file = _found(folder, _text(entry, "config", where, default=None), where)
    if file.is_dir():
        return ModelConfig.from_pretrained(file), None
    return ModelConfig.from_file(file), None


def _found(folder: Path, given: str, where: str) -> Path:
    """Beside the models file, else in the current folder; absolute, since workers run in other folders."""
    try:
        beside, here = (folder / given).resolve(), Path(given).resolve()
        return here if here.exists() and not beside.exists() else beside
    except (OSError, ValueError) as error:
        raise PlanError(f"{where}: {given[:80]!r} cannot be looked for ({error}); give the path of a folder") from error


def _targets(entry: Mapping[str, object], where: str) -> tuple[str, ...]:
    value = entry.get("draft_of", [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PlanError(f"{where}: draft_of is the name of a target, or a list of names, not {value!r}")
    return tuple(dict.fromkeys(names))


def _paired(model: ModelSpec, models: Sequence[ModelSpec], entry: Mapping[str, object]) -> ModelSpec:
    """The model with its replicas and its quota settled, after a look at its targets."""
    if not model.draft_of:
        if "quota" in entry:
            raise PlanError(f"{model.name!r} has a quota and drafts for nobody; give `draft_of`, or take it away")
        return model
    known = {other.name: other for other in models}
    for name in model.draft_of:
        if name not in known or name == model.name:
            raise PlanError(f"draft_of of {model.name!r} names {name!r}; it must be another model of the file")
        target = known[name]
        if target.draft_of:
            raise PlanError(f"{model.name!r} drafts for {name!r}, which is a draft itself; name a target")
        if target.shape.batch_size != model.shape.batch_size:
            raise PlanError(
                f"{model.name!r} has batch_size={model.shape.batch_size} and its target {name!r} "
                f"{target.shape.batch_size}; give both the same"
            )
        rivals = [other.name for other in models if name in other.draft_of]
        if len(rivals) > 1:
            raise PlanError(f"{' and '.join(rivals)} both draft for {name!r}; a target has one draft")
    most = max(known[name].replicas for name in model.draft_of)
    if model.replicas > most:
        raise PlanError(
            f"{model.name!r} has {model.replicas} replicas for {most} of its target; ask for at most as many"
        )
    replicas = model.replicas if "replicas" in entry or len(model.draft_of) > 1 else most
    clients = sum(-(-known[name].replicas // replicas) for name in model.draft_of)  # the first has most
    where = f"model {model.name!r}"
    asked = read_quota(entry.get("quota", {}), where)
    slots = clients * model.shape.batch_size
    quota = settled(asked, where, targets=model.draft_of, clients=clients, slots=slots)
    return replace(model, replicas=replicas, clients=clients, quota=quota)


def _text(entry: Mapping[str, object], key: str, where: str, *, default: str | None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str) or not value:
        raise PlanError(f"{where}: {key} must be a text, not {value!r}")
    return value


def _choice(entry: Mapping[str, object], key: str, where: str, *, of: tuple[str, ...]) -> str:
    value = _text(entry, key, where, default=of[0])
    if value not in of:
        raise PlanError(f"{where}: {key}={value!r} is unknown; use one of {', '.join(of)}")
    return value


def _count(entry: Mapping[str, object], key: str, where: str, *, default: int) -> int:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{where}: {key} must be a whole number of at least 1, not {value!r}")
    return value
