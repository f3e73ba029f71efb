"""Load and build the drafter of a `DraftSpec`: its model or heads.

`make_drafter` makes the drafter of a configuration, for generators, commands and workers. `AutoDrafter.from_pretrained`
is for one folder. The grammar is in `paceline.draft_spec`, checks before loading in `paceline.draft_checks`, rounds in
`paceline.build`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline import build, vocab_compat
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.base import FunctionDrafter, NoDrafter
from paceline.draft.choice import ChoiceDrafter, FallbackDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.options import parse_draft_tree
from paceline.draft.pard import PardDrafter, mask_token
from paceline.draft.vocab_map import VocabMap
from paceline.draft_checks import check_depth, check_model_keys, make_rule, prepared, recognise, row_name
from paceline.draft_spec import DraftSpec
from paceline.heads.layouts import read_config
from paceline.loadable import Loadable
from paceline.registry import DRAFTERS, DrafterRow, resolve

LoadModel = Callable[[Loadable], CompiledDecoder]


class AutoDrafter:
    """Finds out from a checkpoint's configuration what drafts: a model, or heads of a row of the registry."""

    @staticmethod
    def from_pretrained(
        path: str | os.PathLike[str],
        target: CompiledDecoder,
        **options: object,
    ) -> Drafter:
        """Load a drafter for ``target``.

        path     folder of a decoder or of heads; of a decoder also a GGUF file, or the name of a fetched model; for
                 each an id of the Hugging Face hub
        options  the fields of `SpeculativeConfig` that concern a draft (k: default 4, or the depth of the heads' tree;
                 acceptor, confidence_threshold, vocabulary), and those of the row: those of
                 `AutoDecoder.from_pretrained` for a model (default: the target's), ``draft_tree`` for heads,
                 ``divided`` for an EAGLE head: whether the ranks of a sharded target share its work, and ``aux_layers``
                 for one of version 3: the target's residual streams that it reads; ``quantization`` of an EAGLE head's
                 own matrices (default: int8 if the target's are integers or blocks; "amp": none)

        Raises:
            CheckpointError: the folder cannot be used.
            PairingError: it does not fit the target.
            ConfigurationError: an option is unknown or out of range.
        """
        of_row = {name: value for name, value in options.items() if name not in SpeculativeConfig.model_fields}
        config = SpeculativeConfig.part_of({**options, "draft": {"path": os.fspath(path), **of_row}})
        return make_drafter(config, target)[0]


def load_draft_models(
    config: SpeculativeConfig, target: CompiledDecoder, load: LoadModel | None = None
) -> SpeculativeConfig:
    """Return the configuration with decoders in place of folders of draft models, all checked before the first is
    loaded by ``load``. Heads stay folders. Errors as of `paceline.draft_checks.prepared`.
    """
    load = load or partial(build.load, kind=CompiledDecoder)

    def loaded(leaf: DraftSpec) -> DraftSpec:
        return replace(leaf, value=load(leaf.value)) if isinstance(leaf.value, Loadable) else leaf

    draft = tuple(spec.mapped(loaded) for spec in prepared(config, target).draft)
    return config.model_copy(update={"draft": draft})


def make_drafter(config: SpeculativeConfig, target: CompiledDecoder) -> tuple[Drafter, list[CompiledDecoder]]:
    """Make the drafter of ``config.draft``; return it and the draft models it is made of, loaded or given.

    Raises:
        CheckpointError: a folder cannot be used.
        PairingError: a draft model or heads do not fit the target.
        ConfigurationError: an option is unknown, out of range, or applies to a draft model and there is none.
    """
    if not config.draft or config.k == 0:
        return NoDrafter(), []
    makers = _Makers(config, target)
    drafters = [makers.make(spec) for spec in load_draft_models(config, target).draft]
    check_model_keys(config, has_models=bool(makers.decoders))
    if len(drafters) == 1:
        return drafters[0], makers.decoders
    return FallbackDrafter(drafters), makers.decoders


class _Makers:
    """Makes the drafters of one configuration. ``decoders`` are the draft models among them."""

    def __init__(self, config: SpeculativeConfig, target: CompiledDecoder) -> None:
        self.config, self.target = config, target
        self.drawn = make_rule(config).draft_probs
        self.decoders: list[CompiledDecoder] = []

    def make(self, spec: DraftSpec) -> Drafter:
        if spec.value is not None:
            return self._given(spec, spec.value)
        if spec.parts:
            return self._choice(spec)
        row, options = DRAFTERS[row_name(spec)], dict(spec.options)
        if row.given_as == "folder":
            return self._heads(row, spec)
        parts = (self._k(spec), self.target) if row.given_as == "target" else (self._k(spec),)
        drafter: Drafter = resolve(row.path)(*parts, **options)
        return drafter

    def _choice(self, spec: DraftSpec) -> Drafter:
        options: dict[str, Any] = dict(spec.options)
        return ChoiceDrafter([self.make(part) for part in spec.parts], [part.label for part in spec.parts], **options)

    def _k(self, spec: DraftSpec) -> int:
        return self.config.longest_draft(self.target.backend.draft_lengths) if spec.k is None else spec.k

    def _given(self, spec: DraftSpec, value: object) -> Drafter:
        if isinstance(value, CompiledDecoder):
            return self._model(value, spec)
        if isinstance(value, type) and hasattr(value, "propose"):
            raise ConfigurationError(
                f"draft: expected an object, got the class {value.__name__}; give an instance of it"
            )
        if isinstance(value, Drafter):
            if spec.k is not None:
                raise ConfigurationError(
                    f"draft: expected a list around {type(value).__name__}, which has its own k; put it into a list"
                )
            return value
        if hasattr(value, "propose"):
            raise ConfigurationError(
                f"draft: expected a subclass of Drafter, got {type(value).__name__}, which only has its methods; "
                "derive it from paceline.core.protocols.Drafter"
            )
        if callable(value):
            return FunctionDrafter(value, self._k(spec))
        raise ConfigurationError(
            "draft: expected a drafter's name ('ngram', 'suffix'), a folder, a decoder, a drafter, a function from "
            f"ids to ids, a list of these, or None, got a {type(value).__name__}; give one of them"
        )

    def _model(self, decoder: CompiledDecoder, spec: DraftSpec) -> Drafter:
        config, target, k = self.config, self.target, self._k(spec)
        self.decoders.append(decoder)
        between = vocab_compat.between(decoder, target, config.vocabulary)
        shape = parse_draft_tree(dict(spec.options).get("draft_tree", "chain"), k=k, drawn=self.drawn)
        confidence = config.confidence_threshold
        if isinstance(between, VocabMap):
            make: Callable[..., ModelDrafter] = ModelDrafter
            folder = decoder.folder
            known = folder is not None and (Path(folder) / "config.json").is_file()
            if known and (spec.name or recognise(str(folder))) == "pard":
                assert folder is not None
                make = partial(PardDrafter, mask=mask_token(read_config(folder)))
            return make(decoder, shape, vocabulary=between, drawn=self.drawn, confidence_threshold=confidence)
        if not shape.is_chain:
            raise ConfigurationError("draft_tree: expected 'chain' for a draft with another tokenizer; omit it")
        from paceline.draft.retokenizing import RetokenizingDrafter

        eos = next(iter(target.config.eos_token_ids), None)
        return RetokenizingDrafter(decoder, k, tokenizers=between, eos=eos, confidence_threshold=confidence)

    def _heads(self, row: DrafterRow, spec: DraftSpec) -> Drafter:
        """Heads as deep as their tree, or as ``k`` says where it is set."""
        maker, options = resolve(row.path), dict(spec.options)
        given: dict[str, Any] = {"k": self._k(spec), "drawn": self.drawn}
        given = {name: value for name, value in given.items() if name in inspect.signature(maker).parameters}
        heads: Drafter = maker(spec.path, self.target, **given, **options)
        asked = self.config.k if spec.k is None else spec.k
        check_depth(spec, heads.draft_shape, asked, shortens=heads.draft_shape.is_chain)
        if not isinstance(asked, int) or asked == heads.draft_shape.depth:
            return heads
        return heads.shortened(asked)
