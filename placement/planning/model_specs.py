"""The models file: models to run, in YAML.

    models:
      - {name: chat, path: models/chat, tp_degree: 8, n_positions: 2048, batch_size: 1, amp: bf16}
      - {name: chat-draft, path: models/small, tp_degree: 2, draft_of: chat}

Keys of a model:

    name          letters, digits, "-", "_" and "."
    path          checkpoint folder, GGUF file, or name of a fetched model; or ``config``: a config.json (or its folder)
                  to plan without weights
    tp_degree     a number, or "auto" (default): as many cores as make a token faster and leave others room; above
                  1 it runs with eager and neuron
    batch_size, n_positions, amp, backend, quantization, ...   loading options: all of
                  `paceline.decoder.options.LoadOptions` (more positions than it was trained on can be planned, but not
                  loaded)
    draft         drafter in the target's own process, fused with it where possible: a drafter's name
                  (ngram), a folder with a draft model, Medusa heads or an EAGLE head, either with options (DIR:k=3) or
                  as a mapping ({path: DIR, k: 3}), or a list of these
    k, acceptor, exact, fused, prefix_caching, ...   decoding options: all of
                  `paceline.config.SpeculativeConfig`; but the default of k is "auto", except with heads
    draft_of      the target's name, or a list: a draft model on separate cores, one process for each replica of each of
                  them; of the keys above it has ``k`` only
    replicas      default 1; a draft has one for each replica of its targets
    max_waiting   requests of a replica that may wait for a slot of a served model; more are rejected. Default 1024
    load, pinned, idle_ttl_s, autoscaling   when a served model is in memory (`residency`)

A mapping ``fault_policy`` may be given next to ``models``; `paceline.placement.cluster.fault_policy` reads it.

Relative paths are relative to the file or, if nothing exists at that path, to the current folder. Only configurations
are loaded, no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from paceline.config import NOT_SERVED, SpeculativeConfig
from paceline.core.errors import CheckpointError, ConfigurationError, PlanError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import LoadOptions, renamed
from paceline.decoder.weights.folder import is_gguf, resolved
from paceline.decoder.weights.hub import KNOWN_MODELS, HubId, checkpoint_path
from paceline.placement.planning.footprint import NUMBER_BYTES, Footprint, cache_bytes, footprint
from paceline.placement.planning.residency import Residency
from paceline.placement.planning.yaml_file import STRICT, read_yaml, validate

_STORED_BYTES = 2  # of a number in a file of heads, whatever format it is loaded in
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True, slots=True)
class _InProcessDraft:
    """Draft model or heads that a target loads alongside its own model.

    name        as given in the models file
    config      configuration of a draft model; None for heads
    file_bytes  size of the weight files, from which heads are estimated
    degree      tensor-parallel degree; None: the target's
    """

    name: str
    config: ModelConfig | None
    file_bytes: int
    degree: int | None = None

    def footprint(self, target: ModelConfig, options: LoadOptions, target_degree: int) -> Footprint:
        """Return the bytes on each of the target's cores, in addition to the target's own.

        Heads count as one more layer of the target with its own cache, replicated on every core: a large EAGLE head
        takes less. Scratch and programs are the target's.
        """
        if self.config is None:
            weights = self.file_bytes * NUMBER_BYTES[options.amp] // _STORED_BYTES
            return Footprint(weights, cache_bytes(replace(target, num_layers=1), options, target_degree), 0)
        degree = target_degree if self.degree is None else self.degree
        trained = self.config.max_position_embeddings
        positions = min(options.longest(target.max_position_embeddings), trained)
        alike = replace(options, quantization=None, n_positions=positions, group_query_attention=None)
        own = footprint(self.config, alike, degree)
        return Footprint(own.weights, own.cache, 0)


def _adapted(config: SpeculativeConfig, drafts: Sequence[_InProcessDraft]) -> SpeculativeConfig:
    """Set ``k="auto"`` if no length is given: under load, the best draft length is short, or zero.

    Heads keep the length of their tree, or the usual one. ``drafts``: drafters of the configuration that have weights.
    """
    leaves = config.leaves()
    lengths = [spec.k for spec in (*config.draft, *leaves) if spec.k is not None]
    heads = any(draft.config is None for draft in drafts)
    if config.k is not None or lengths or heads or not leaves or any(leaf.name == "none" for leaf in leaves):
        return config
    return config.model_copy(update={"k": "auto"})


def _in_process_drafts(config: SpeculativeConfig, where: str) -> tuple[_InProcessDraft, ...]:
    """Return the drafters of a target that have weights, with what is known of them without loading any."""
    drafts = []
    for spec in config.leaves():
        if spec.path is None:
            continue
        folder, degree = Path(spec.path), dict(spec.options).get("tp_degree")
        size = sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern))
        try:
            model: ModelConfig | None = ModelConfig.from_pretrained(folder)
        except CheckpointError as error:
            if not size:
                raise PlanError(
                    f"{where}: draft: expected a model or heads in {spec.path!r}, got neither ({error}); correct "
                    "the path"
                ) from error
            model = None
        drafts.append(_InProcessDraft(str(spec), model, size, degree if isinstance(degree, int) else None))
    return tuple(drafts)


MAX_WAITING = 1024
"""Default number of requests of a replica that may wait for a slot."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Model to place.

    folder       its checkpoint; None if only a configuration was given
    options      loading options, except its degree
    degree       tensor-parallel degree; None: `paceline.placement.planning.planner.degrees_of`
    speculative  for a target: the drafter in its process, and how it decodes; for a draft: its k
    drafts       drafters in its process that have weights
    """

    name: str
    config: ModelConfig
    folder: Path | None
    options: LoadOptions
    degree: int | None = None
    draft_of: tuple[str, ...] = ()
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    drafts: tuple[_InProcessDraft, ...] = ()
    replicas: int = 1
    residency: Residency = field(default_factory=Residency)
    max_waiting: int = MAX_WAITING

    @property
    def k(self) -> int:
        return self.speculative.max_k

    @property
    def n_positions(self) -> int:
        return self.options.longest(self.config.max_position_embeddings)


def _valid_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name: expected up to 63 letters, digits, '-', '_' or '.', got {name!r:.80}; rename the model"
        )
    return name


class ModelEntry(Residency):
    """One entry of ``models``, as written."""

    name: Annotated[str, pydantic.AfterValidator(_valid_name)]
    path: Annotated[str, pydantic.Field(min_length=1)] | None = None
    config: Annotated[str, pydantic.Field(min_length=1)] | None = None
    tp_degree: pydantic.PositiveInt | Literal["auto"] = "auto"
    draft_of: str | list[str] = pydantic.Field(default_factory=list)
    max_waiting: pydantic.PositiveInt | None = None
    replicas: pydantic.PositiveInt | None = None

    def spec(self, keys: Mapping[str, object], folder: Path, where: str) -> ModelSpec:
        """Return the model with its configuration loaded. ``keys``: of `LoadOptions` and `SpeculativeConfig`."""
        config, home = _configuration(self, folder, where)
        options = LoadOptions.part_of(keys)
        if options.quantization == "gguf" and (home is None or not is_gguf(home)):
            raise PlanError(
                f"{where}: quantization: expected a GGUF file for gguf, which keeps the formats of that file; give "
                "the path of one"
            )
        targets = [self.draft_of] if isinstance(self.draft_of, str) else self.draft_of
        speculative = self._speculative(keys, folder, where)
        drafts = _in_process_drafts(speculative, where)
        residency = self.residency(where, batch_size=options.slots, is_draft=bool(targets), replicas=self.replicas)
        return ModelSpec(
            self.name,
            config,
            home,
            options,
            None if self.tp_degree == "auto" else self.tp_degree,
            tuple(dict.fromkeys(targets)),
            _adapted(speculative, drafts),
            drafts,
            self.replicas or 1,
            residency=residency,
            max_waiting=self.max_waiting or MAX_WAITING,
        )

    def _speculative(self, keys: Mapping[str, object], folder: Path, where: str) -> SpeculativeConfig:
        """Read the decoding options of a target; of a draft, only its k."""
        keys = {key: keys[key] for key in SpeculativeConfig.model_fields if key in keys}
        k = keys.get("k")
        if self.draft_of:
            foreign = [key for key in (*keys, *(["max_waiting"] if self.max_waiting else [])) if key != "k"]
            if foreign:
                raise PlanError(
                    f"{where}: {foreign[0]} is a key of targets, and this model has draft_of; move it to the target"
                )
            if not isinstance(k, int | None) or isinstance(k, bool) or k == 0:
                raise PlanError(
                    f"{where}: k: expected a whole number of at least 1 for a draft, got {k!r:.80}; correct it"
                )
        config = SpeculativeConfig(**keys)
        for name in config.set_of(NOT_SERVED):
            raise PlanError(f"{where}: {name} is for measurements and not for serving; omit it")

        def located(path: str) -> str:
            found = _resolve(folder, path, where)
            if not found.is_dir() and not is_gguf(found):
                raise PlanError(
                    f"{where}: draft: expected a drafter's name or a folder, got {path!r}; correct it, or give {{path: "
                    "DIR}"
                )
            return str(found)

        return config.with_paths(located)


class _ModelsFile(pydantic.BaseModel):
    """Content of the file. Entries and the fault policy are validated one by one, so that errors name them."""

    model_config = STRICT

    models: list[object]
    fault_policy: object = {}


def read_models(file: Path) -> tuple[ModelSpec, ...]:
    """Read the models of a YAML file.

    Raises:
        PlanError: the file cannot be read, or an entry is wrong; the message names it.
        CheckpointError: a model's configuration cannot be used.
    """
    return models_of(_read(file).models, folder=file.parent, where=str(file))


def read_fault_policy_entry(file: Path) -> object:
    """Return the key ``fault_policy`` of a YAML file as written; an empty mapping if it is absent."""
    return _read(file).fault_policy


def _read(file: Path) -> _ModelsFile:
    from yaml import YAMLError

    try:
        content = read_yaml(file)
    except (OSError, ValueError, YAMLError) as error:  # ValueError: not UTF-8, or an endless number
        raise PlanError(f"{file}: the file cannot be read ({error}); correct the path or its permissions") from error
    if not isinstance(content, dict) or not isinstance(content.get("models"), list):
        raise PlanError(f"{file}: expected a list `models`, got none; see `paceline plan --help`")
    return validate(_ModelsFile, content, str(file))


def models_of(entries: Sequence[object], *, folder: Path, where: str) -> tuple[ModelSpec, ...]:
    """Read the models of a list of entries, checked one by one and against each other.

    Raises:
        PlanError: an entry is wrong; the message names it.
        CheckpointError: a model's configuration cannot be used.
    """
    if not entries:
        raise PlanError(f"{where}: expected at least one model, got none; add an entry below `models`")
    specs: dict[str, ModelSpec] = {}
    parsed: list[ModelEntry] = []
    for number, written in enumerate(entries):
        if not isinstance(written, dict):
            raise PlanError(f"{where}, model {number}: expected a mapping, got {written!r:.80}; correct it")
        place, own = f"{where}, model {written.get('name', number)!r}", ModelEntry.model_fields
        try:
            with renamed(written) as content:
                entry = validate(ModelEntry, content, place, LoadOptions, SpeculativeConfig)
                if entry.name in specs:
                    raise PlanError(f"{where}: name: expected different names, got {entry.name!r} twice; rename one")
                keys = {key: value for key, value in content.items() if value is not None and key not in own}
                specs[entry.name] = entry.spec(keys, folder, place)
        except PlanError:
            raise
        except ConfigurationError as error:
            raise PlanError(f"{place}: {error}") from error
        parsed.append(entry)
    return tuple(_paired(entry, specs) for entry in parsed)


def _configuration(entry: ModelEntry, folder: Path, where: str) -> tuple[ModelConfig, Path | None]:
    if entry.path is not None and entry.config is None:
        home = _resolve(folder, entry.path, where)
        return ModelConfig.from_pretrained(home), home
    if entry.config is not None and entry.path is None:
        file = _resolve(folder, entry.config, where)
        whole = file.is_dir() or is_gguf(file)
        return (ModelConfig.from_pretrained(file) if whole else ModelConfig.from_file(file)), None
    raise PlanError(
        f"{where}: expected either `path` (a checkpoint folder) or `config` (a config.json), got both or neither; "
        "give one"
    )


def _resolve(folder: Path, path: str, where: str) -> Path:
    """Resolve a path in the folder of the models file, else in the current folder, else as a fetched or hub model.

    Absolute, since workers run in other folders.
    """
    try:
        beside, here = resolved(folder / path), resolved(Path(path))
        if beside.exists():
            return beside
        if path in KNOWN_MODELS or (HubId.parse(path) is not None and not here.exists()):
            return resolved(checkpoint_path(path))
        return here if here.exists() else beside
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{where}: path: {path[:80]!r} cannot be searched for ({error}); give the path of a folder"
        ) from error


def _paired(entry: ModelEntry, specs: Mapping[str, ModelSpec]) -> ModelSpec:
    """Return the model of an entry with its number of replicas, from its targets."""
    spec = specs[entry.name]
    if not spec.draft_of:
        return spec
    for target in spec.draft_of:
        _check_pair(spec, target, specs)
    replicas = sum(specs[name].replicas for name in spec.draft_of)
    if entry.replicas not in (None, replicas):
        raise PlanError(
            f"{spec.name!r}: replicas: expected none for a draft, which has one for each of the {replicas} of its "
            f"targets, got {spec.replicas}; remove the key"
        )
    return replace(spec, replicas=replicas)


def _check_pair(draft: ModelSpec, name: str, specs: Mapping[str, ModelSpec]) -> None:
    if name not in specs or name == draft.name:
        raise PlanError(f"{draft.name!r}: draft_of: expected another model of the file, got {name!r}; correct it")
    target = specs[name]
    if target.draft_of:
        raise PlanError(
            f"{draft.name!r}: draft_of: expected a target, got {name!r}, which is a draft itself; name a target"
        )
    if target.speculative.draft:
        raise PlanError(
            f"{name!r}: expected one draft, got a `draft` in its own process and {draft.name!r} (draft_of); remove one"
        )
    if target.options.slots != draft.options.slots:
        raise PlanError(
            f"{draft.name!r}: batch_size: expected {target.options.slots}, as its target {name!r}, got "
            f"{draft.options.slots}; set both to the same value"
        )
    rivals = [other.name for other in specs.values() if name in other.draft_of]
    if len(rivals) > 1:
        raise PlanError(f"{name!r}: expected one draft, got {' and '.join(rivals)}; remove all but one")
