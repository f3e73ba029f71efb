"""Checks of a draft before anything is loaded: folders, options, depths, and whether parts fit together.

Only trees of EAGLE heads need PyTorch. The grammar is in `paceline.draft_spec`; `paceline.auto_drafter` loads and makes
drafters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from paceline import vocab_compat
from paceline.config import OF_MODELS, SpeculativeConfig
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.core.types import DraftShape
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import LoadOptions, check_width
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.hub import checkpoint_path
from paceline.draft.dflash.config import is_dflash_config
from paceline.draft.options import parse_draft_tree
from paceline.draft_spec import CHOICE, DraftSpec, RuleSpec
from paceline.eagle.config import is_eagle_config
from paceline.heads.options import Wanted
from paceline.loadable import Loadable, loadable
from paceline.medusa.config import is_medusa_config
from paceline.registry import ACCEPTANCE_RULES, DRAFTERS, DrafterRow, RuleRow, options_of, options_path, resolve

if TYPE_CHECKING:
    from paceline.decoder.decoder import CompiledDecoder

    Target = Loadable | CompiledDecoder


def prepared(config: SpeculativeConfig, target: Target) -> SpeculativeConfig:
    """Return the checked configuration, with `Loadable`s in place of folders of draft models.

    Raises:
        CheckpointError: a folder cannot be used, or no head can learn for the target.
        PairingError: a draft model does not fit the target.
        ConfigurationError: an option is unknown or out of range, or parts do not fit together.
    """
    rule = make_rule(config)
    if not config.draft or config.k == 0:
        return config
    several = len(config.draft) > 1
    if several and rule.draft_probs:
        raise ConfigurationError(
            "acceptor: expected 'match' for a list of drafters, none of which reports probabilities, got another "
            "rule; use acceptor='match'"
        )
    if several and config.fused:
        raise ConfigurationError("fused: a list of drafters cannot share a graph with the target; omit fused")
    checks = _Checks(config, target, rule)
    config = config.model_copy(update={"draft": tuple(map(checks.spec, config.draft))})
    check_model_keys(config, has_models=any(leaf.value is not None for leaf in config.leaves()))
    if config.learn is not None and target.folder is not None:
        from paceline.heads.frozen_model import check_trainable  # loads PyTorch and transformers

        check_trainable(target.folder, (0,))
    return config


def check_model_keys(config: SpeculativeConfig, *, has_models: bool) -> None:
    """Raise ConfigurationError for keys of draft models where there is none."""
    for name in () if has_models else config.set_of(OF_MODELS):
        raise ConfigurationError(
            f"{name}: expected a draft model with it, got none in draft; omit it (a drafter object has its own)"
        )


def check_depth(spec: DraftSpec, shape: DraftShape, k: object, *, shortens: bool = True) -> None:
    """Raise ConfigurationError if heads cannot draft k tokens per round: a chain can be cut, a tree has one depth."""
    if not isinstance(k, int) or k == shape.depth:
        return
    if not shape.is_chain or not 0 < k < shape.depth or not shortens:
        possible = f"1 to {shape.depth}" if shape.is_chain else "that"
        raise ConfigurationError(
            f"k: expected a draft depth of {shape.depth} for {spec}, got {k}; use {possible}, or omit k"
        )


def check_trees(rule: AcceptanceRule, shape: DraftShape) -> None:
    """Raise ConfigurationError if a rule is for chains, and these are none."""
    if not shape.is_chain and not rule.trees:
        raise ConfigurationError(
            f"acceptor: expected 'match' for a drafter of trees, got {rule.name!r}; use acceptor='match'"
        )


@dataclass(frozen=True, slots=True)
class _Checks:
    """Looks at the drafters of a configuration."""

    config: SpeculativeConfig
    target: Target
    rule: AcceptanceRule

    def spec(self, spec: DraftSpec) -> DraftSpec:
        config = self.config
        if spec.parts:
            return self._choice(spec)
        if spec.value is not None:
            return spec
        row = DRAFTERS[row_name(spec)]
        if len(config.draft) > 1 and not row.listable:
            raise ConfigurationError(
                f"draft: {spec} cannot be in a list of drafters ({row.summary}); use it without a list"
            )
        if config.fused and not row.fused:
            raise ConfigurationError(f"fused: {spec} cannot share a graph with the target; omit fused")
        options = check_options(row, dict(spec.options), f"the draft {spec}")
        k = config.max_k if spec.k is None else spec.k
        if row.name in ("model", "pard"):
            return self._model(row, spec, options, k=k)
        if row.check:
            wanted = Wanted(k, self.rule.draft_probs)
            folder = () if spec.path is None else (checkpoint_path(spec.path),)
            shape: DraftShape | None = resolve(row.check)(self.target.config, wanted, *folder, **options)
        else:
            shape = _text(row, options, k)
        self._check_shape(spec, shape)
        return spec

    def _choice(self, spec: DraftSpec) -> DraftSpec:
        if self.rule.draft_probs:
            raise ConfigurationError(
                "acceptor: expected 'match' for a choice of drafters, none of which reports probabilities, got "
                "another rule; use acceptor='match'"
            )
        if self.config.fused:
            raise ConfigurationError("fused: a choice of drafters cannot share a graph with the target; omit fused")
        check_options(DRAFTERS[CHOICE], dict(spec.options), f"the draft {spec}")
        return replace(spec, parts=tuple(map(self.spec, spec.parts)))

    def _model(self, row: DrafterRow, spec: DraftSpec, options: dict[str, Any], *, k: int) -> DraftSpec:
        """Check a draft model, with the target's options where it has none."""
        path, target = str(spec.path), self.target.options
        tree = options.pop("draft_tree", None)
        last = min(ModelConfig.from_pretrained(path).max_position_embeddings, target.n_positions)
        asked = target.load
        defaults: dict[str, Any] = {one.name: getattr(asked, one.name) for one in fields(asked)}
        defaults |= {
            "backend": self.target.backend_name,
            "n_positions": [*(bucket for bucket in target.kv_buckets if bucket < last), last],
            "group_query_attention": None,
            "quantization": None if asked.quantization == "gguf" else asked.quantization,
            "modules_to_not_convert": (),
        }
        found = loadable(path, LoadOptions(**(defaults | options)))
        shape = parse_draft_tree("chain" if tree is None else tree, k=k, drawn=self.rule.draft_probs)
        self._check_shape(spec, shape)
        vocab_compat.check(found, self.target, self.config.vocabulary)
        return DraftSpec(row.name, k=spec.k, options=(("draft_tree", tree),) if tree is not None else (), value=found)

    def _check_shape(self, spec: DraftSpec, shape: DraftShape | None) -> None:
        if shape is not None:
            check_width(shape.num_draft_tokens + 1)
            check_trees(self.rule, shape)
            check_depth(spec, shape, self.config.k if spec.k is None else spec.k)
            if not shape.is_chain and isinstance(self.config.k, tuple | str):
                raise ConfigurationError(
                    f"k: expected one number, since {spec} drafts a {shape}, got several; give one number, or let it "
                    "draft a chain"
                )


def _text(row: DrafterRow, options: dict[str, Any], k: int) -> DraftShape:
    """Return the shape of a drafter that reads only tokens: it is constructed without the files that it would read."""
    files = {name for name, hint in _hints(row).items() if Path in get_args(hint)}
    unread = {name: value for name, value in options.items() if name not in files or not Path(value).is_file()}
    return cast("DraftShape", resolve(row.path)(k, **unread).draft_shape)


def make_rule(config: SpeculativeConfig) -> AcceptanceRule:
    """Return the acceptance rule of a configuration; ConfigurationError: an option of it is wrong."""
    spec = config.acceptor
    if config.synthetic_acceptance is not None:
        spec = RuleSpec("synthetic", (("alpha", config.synthetic_acceptance),))
    if spec.name is None:
        return cast("AcceptanceRule", spec.value)
    row = ACCEPTANCE_RULES[spec.name]
    options = check_options(row, dict(spec.options), f"acceptor {spec.name!r}")
    rule: AcceptanceRule = resolve(row.path)(**options)
    return rule


def check_options(row: DrafterRow | RuleRow, options: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the options of a row; raise ConfigurationError for one that is unknown or of another type."""
    known = options_of(row)
    for name, value in options.items():
        if name not in known:
            names = [*known, *(["k"] if isinstance(row, DrafterRow) else [])]
            possible = f"use one of {', '.join(names)}" if names else "omit it"
            raise ConfigurationError(f"{where}: {name!r} is not an option; {possible}")
        hint = _hints(row).get(name, Any)
        try:
            TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True, strict=True)).validate_python(value)
        except ValidationError as error:
            raise ConfigurationError(f"{where}: {name}: expected {known[name]}, got {value!r}; correct it") from error
    return dict(options)


def _hints(row: DrafterRow | RuleRow) -> dict[str, Any]:
    """Types of the options; none where a module shows them to the type checker only."""
    maker = resolve(options_path(row))
    try:
        return get_type_hints(getattr(maker, "__init__") if isinstance(maker, type) else maker)  # noqa: B009
    except NameError:
        return {}


def recognise(path: str) -> str:
    """Return the registry row of a checkpoint, by its config.json; CheckpointError: there is none."""
    folder = checkpoint_path(path)
    if is_gguf(folder):
        return "model"
    if not folder.is_dir():
        names = ", ".join(row.name for row in DRAFTERS.values() if row.given_as in ("name", "target"))
        raise CheckpointError(f"draft: expected a folder or one of {names}, got {path!r}; correct it")
    fields = read_json_object(folder / "config.json")
    if is_medusa_config(fields):
        return "medusa"
    if is_dflash_config(fields):
        return "dflash"
    for row in DRAFTERS.values():
        if any(_has_mark(fields, *mark) for mark in row.marks):
            return row.name
    if is_eagle_config(fields):
        return "eagle"
    return "pard" if "pard_token" in fields else "model"


def _has_mark(fields: Mapping[str, object], key: str, value: object) -> bool:
    found = fields.get(key)
    return isinstance(found, int) and found > 0 if value is None else found == value


def row_name(spec: DraftSpec) -> str:
    if spec.name is not None:
        return spec.name
    assert spec.path is not None, "a spec names a drafter, a folder or an object"
    return recognise(spec.path)
