"""From a `DraftSpec` to a drafter: which row of the registry it is, its options checked, its model or heads loaded.

`make_drafter` is the one way from a configuration to a drafter: generators, commands and workers use it.
`AutoDrafter.from_pretrained` is for one folder. Not here: the grammar (`paceline.draft_spec`) and rounds
(`paceline.build`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from paceline import vocab_compat
from paceline.auto import AutoDecoder
from paceline.config import SpeculativeConfig
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.core.protocols import Drafter, Shortens
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.files import is_gguf
from paceline.decoder.weights.locate import checkpoint_path
from paceline.draft.choice import ChoiceDrafter
from paceline.draft.fallback import FallbackDrafter
from paceline.draft.function import FunctionDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.none import NoDrafter
from paceline.draft.retokenizing import RetokenizingDrafter, TokenizerPair
from paceline.draft_spec import CHOICE, DraftSpec, RuleSpec
from paceline.eagle.config import is_eagle_config
from paceline.eagle.tree import parse_draft_tree
from paceline.medusa.config import is_medusa_config
from paceline.registry import ACCEPTANCE_RULES, DRAFTERS, DrafterRow, RuleRow, options_of, resolve

LoadModel = Callable[..., CompiledDecoder]
"""Takes the path and the keywords of `AutoDecoder.from_pretrained`."""


class AutoDrafter:
    """Finds out from a checkpoint's configuration what drafts: a model, Medusa heads or an EAGLE head."""

    @staticmethod
    def from_pretrained(
        path: str | os.PathLike[str],
        target: CompiledDecoder,
        *,
        k: int | None = None,
        acceptor: object = "match",
        confidence_threshold: float = 0.0,
        vocabulary: str | TokenizerPair = "same",
        **options: object,
    ) -> Drafter:
        """Load a drafter for ``target``.

        path     folder of a decoder, Medusa heads or an EAGLE head; of a decoder also a GGUF file, or the name of a
                 model that was fetched; of each of them an id of the Hugging Face hub
        k        drafted tokens per round; default: 4, or what the tree of the heads says
        options  of the row: those of `AutoDecoder.from_pretrained` for a model (default: the target's), ``draft_tree``
                 for heads, ``divided`` for an EAGLE head: whether the ranks of a divided target share its work, and
                 ``aux_layers`` for one of version 3: the target's residual streams that it reads; ``quantization`` of
                 an EAGLE head's own matrices (default: int8 where the target's are integers or blocks; "amp": none)

        Raises:
            CheckpointError: the folder cannot be used.
            PairingError: it does not fit the target.
            ConfigurationError: an option is unknown or out of range.
        """
        config = SpeculativeConfig(
            draft={"path": os.fspath(path), **options},
            k=k,
            acceptor=acceptor,
            confidence_threshold=confidence_threshold,
            vocabulary=vocabulary,
        )
        return make_drafter(config, target)[0]


def load_draft_models(
    config: SpeculativeConfig, target: CompiledDecoder, load: LoadModel = AutoDecoder.from_pretrained
) -> SpeculativeConfig:
    """The same configuration with decoders in place of folders of draft models. Heads stay folders.

    load  `AutoDecoder.from_pretrained`, or the same with a progress bar around it

    Raises:
        CheckpointError: a folder cannot be used.
        ConfigurationError: an option is unknown or out of range.
    """
    draft = tuple(spec.mapped(lambda leaf: _with_model(leaf, target, load)) for spec in config.draft)
    return config.model_copy(update={"draft": draft})


def make_drafter(config: SpeculativeConfig, target: CompiledDecoder) -> tuple[Drafter, list[CompiledDecoder]]:
    """The drafter that ``config.draft`` asks for, and the draft models it is made of, loaded or given.

    Raises:
        CheckpointError: a folder cannot be used.
        PairingError: a draft model or heads do not fit the target.
        ConfigurationError: an option is unknown, out of range, or of a draft model where there is none.
    """
    if not config.draft or config.k == 0:
        return NoDrafter(), []
    makers = _Makers(config, target)
    drafters = [makers.make(spec) for spec in load_draft_models(config, target).draft]
    for name, is_set in (
        ("confidence_threshold", config.confidence_threshold != 0),
        ("vocabulary", config.vocabulary != "same"),
    ):
        if is_set and not makers.decoders:
            raise ConfigurationError(
                f"{name} is an option of draft models, and draft holds none; leave it out (a drafter object has its "
                "own)"
            )
    if len(drafters) == 1:
        return drafters[0], makers.decoders
    if makers.drawn:
        raise ConfigurationError("a list of drafters goes with acceptor='match': none of them reports probabilities")
    return FallbackDrafter(drafters), makers.decoders


def make_rule(config: SpeculativeConfig) -> AcceptanceRule:
    """The acceptance rule of a configuration.

    Raises:
        ConfigurationError: an option of it is unknown or out of range.
    """
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
    """Options of a row, as they are; those in ``options`` must be among its constructor's and of their types.

    Raises:
        ConfigurationError: one is unknown or of another type.
    """
    known = options_of(row)
    for name, value in options.items():
        if name not in known:
            names = [*known, *(["k"] if isinstance(row, DrafterRow) else [])]
            possible = f"it takes {', '.join(names)}" if names else "it takes none"
            raise ConfigurationError(f"{where} has no option {name!r}; {possible}")
        hint = _hints(row).get(name, Any)
        try:
            TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True, strict=True)).validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise ConfigurationError(
                f"{where}: {name}={value!r}: {message[0].lower()}{message[1:]} (it is declared as {known[name]})"
            ) from error
    return dict(options)


def _hints(row: DrafterRow | RuleRow) -> dict[str, Any]:
    """Types of the options; none where a module shows them to the type checker only."""
    path = row.options if isinstance(row, DrafterRow) and row.options else row.path
    maker = resolve(path)
    try:
        return get_type_hints(getattr(maker, "__init__") if isinstance(maker, type) else maker)  # noqa: B009
    except NameError:
        return {}


def recognise(path: str) -> str:
    """The row of the registry that a checkpoint is for: ``model``, ``medusa`` or ``eagle``, by its config.json.

    Raises:
        CheckpointError: there is no such folder, or no config.json in it.
    """
    folder = checkpoint_path(path)
    if is_gguf(folder):
        return "model"
    if not folder.is_dir():
        names = ", ".join(row.name for row in DRAFTERS.values() if row.given_as == "name")
        raise CheckpointError(f"draft {path!r} is neither a folder nor a drafter's name; the names are {names}")
    fields = read_json_object(folder / "config.json")
    if is_medusa_config(fields):
        return "medusa"
    return "eagle" if is_eagle_config(fields) else "model"


def _row_name(spec: DraftSpec) -> str:
    if spec.name is not None:
        return spec.name
    assert spec.path is not None, "a spec names a drafter, a folder or an object"
    return recognise(spec.path)


def _with_model(spec: DraftSpec, target: CompiledDecoder, load: LoadModel) -> DraftSpec:
    """The spec with its draft model loaded, if it is one: with the target's options where it has none of its own."""
    if spec.value is not None or _row_name(spec) != "model":
        return spec
    path = str(spec.path)
    options = check_options(DRAFTERS["model"], dict(spec.options), f"the draft {spec}")
    last = min(ModelConfig.from_pretrained(path).max_position_embeddings, target.n_positions)
    defaults: dict[str, Any] = {
        "batch_size": target.options.batch_buckets or target.batch_size,
        "n_positions": [*(bucket for bucket in target.options.kv_buckets if bucket < last), last],
        "context_length_estimate": list(target.options.chunks),
        "amp": target.options.amp,
        "backend": target.backend.name,
        "tp_degree": target.options.layout.degree,
        "kv_cache_dtype": target.options.kv_cache_dtype,
        "quantization": None if target.options.quantization == "gguf" else target.options.quantization,
    }
    return DraftSpec(k=spec.k, value=load(path, **(defaults | options)))


_HEAD_OPTIONS: dict[str, tuple[str, ...]] = {"medusa": (), "eagle": ("aux_layers", "divided", "quantization")}
"""Options of heads besides ``draft_tree``, by row."""


class _Makers:
    """Makes the drafters of one configuration. ``decoders`` are the draft models among them."""

    def __init__(self, config: SpeculativeConfig, target: CompiledDecoder) -> None:
        self.config, self.target = config, target
        rule = make_rule(config)
        self.drawn = rule.draft_probs
        self.decoders: list[CompiledDecoder] = []

    def make(self, spec: DraftSpec) -> Drafter:
        """The drafter of one entry."""
        if spec.value is not None:
            return self._given(spec, spec.value)
        if spec.parts:
            return self._choice(spec)
        row = DRAFTERS[_row_name(spec)]
        if len(self.config.draft) > 1 and not row.listable:
            raise ConfigurationError(f"{spec} cannot be in a list of drafters ({row.summary}); use it alone")
        if row.trees:
            return self._heads(row, spec)
        options = check_options(row, dict(spec.options), f"the draft {spec}")
        drafter: Drafter = resolve(row.path)(*([] if row.name == "none" else [self._k(spec)]), **options)
        return drafter

    def _choice(self, spec: DraftSpec) -> Drafter:
        """The best of several. A part without a k has that of the choice."""
        if self.drawn:
            raise ConfigurationError("a choice of drafters goes with acceptor='match': none reports probabilities")
        options = check_options(DRAFTERS[CHOICE], dict(spec.options), f"the draft {spec}")
        parts = [part if part.k is not None or spec.k is None else replace(part, k=spec.k) for part in spec.parts]
        return ChoiceDrafter([self.make(part) for part in parts], [str(part) for part in spec.parts], **options)

    def _k(self, spec: DraftSpec) -> int:
        return self.config.longest_draft(self.target.backend.draft_lengths) if spec.k is None else spec.k

    def _given(self, spec: DraftSpec, value: object) -> Drafter:
        """A drafter from a Python object."""
        if isinstance(value, CompiledDecoder):
            return self._model(value, self._k(spec))
        if isinstance(value, type) and hasattr(value, "propose"):
            raise ConfigurationError(f"draft is the class {value.__name__}; give an object of it")
        if isinstance(value, Drafter):
            if spec.k is not None:
                raise ConfigurationError(f"{type(value).__name__} has its own k; put it into the list by itself")
            return value
        if callable(value):
            return FunctionDrafter(value, self._k(spec))
        raise ConfigurationError(
            f"draft is a {type(value).__name__}; give a drafter's name ('ngram', 'suffix'), a folder, a decoder, a "
            "drafter, a function from ids to ids, a list of these, or None"
        )

    def _model(self, decoder: CompiledDecoder, k: int) -> Drafter:
        config, target = self.config, self.target
        self.decoders.append(decoder)
        between = vocab_compat.between(decoder, target, config.vocabulary)
        confidence = config.confidence_threshold
        if isinstance(between, TokenizerPair):
            eos = next(iter(target.config.eos_token_ids), None)
            return RetokenizingDrafter(decoder, k, tokenizers=between, eos=eos, confidence_threshold=confidence)
        return ModelDrafter(decoder, k, vocabulary=between, drawn=self.drawn, confidence_threshold=confidence)

    def _heads(self, row: DrafterRow, spec: DraftSpec) -> Drafter:
        """Heads as deep as their tree, or as ``k`` says where it is set."""
        options = dict(spec.options)
        draft_tree = options.pop("draft_tree", None)
        own = {name: options.pop(name) for name in _HEAD_OPTIONS[row.name] if name in options}
        if options:
            names = ", ".join(("draft_tree", *_HEAD_OPTIONS[row.name]))
            raise ConfigurationError(f"the draft {spec} has no option {min(options)!r}; it takes {names} and k")
        maker = resolve(row.path)
        if row.name == "medusa":
            heads: Drafter = maker(spec.path, self.target, tree=draft_tree)
        else:
            tree = draft_tree  # an object of the user's own, or text
            if draft_tree is None or isinstance(draft_tree, str):
                tree = parse_draft_tree(draft_tree or "chain", k=self._k(spec), drawn=self.drawn)
            heads = maker(spec.path, self.target, tree, **own)
        k = self.config.k if spec.k is None else spec.k
        return _with_depth(heads, k, spec) if isinstance(k, int) else heads


def _with_depth(heads: Drafter, k: int, spec: DraftSpec) -> Drafter:
    """Heads that draft k tokens per round: a chain can be cut, a tree has one depth.

    Raises:
        ConfigurationError: they cannot draft so many.
    """
    shape = heads.draft_shape
    if k == shape.depth:
        return heads
    if not shape.is_chain or not 0 < k < shape.depth or not isinstance(heads, Shortens):
        possible = f"1 to {shape.depth}" if shape.is_chain else "that"
        raise ConfigurationError(
            f"the drafts of {spec} are {shape.depth} tokens deep, and k={k} says otherwise; give {possible}, or no k"
        )
    return heads.shortened(k)
