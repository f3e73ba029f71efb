"""Grammar of drafts and acceptance rules, the same for Python, the command line, YAML and HTTP.

    ngram                           a drafter by its name (`paceline.registry.DRAFTERS`)
    ngram:prompt_lookup_max=4       with its own options
    layerskip:layers=8              the target's first layers
    models/small                    a folder; its config.json says whether it is a model, or heads of which kind
    models/small:k=3,amp=f32        with options
    {type: ngram, prompt_lookup_max: 4}, {path: models/small, k: 3}      the same as mappings, for any path
    choice:drafts=["ngram","models/small"]     the one of several that currently predicts the sequence best
    {type: choice, drafts: [ngram, {path: models/small, k: 3}]}
    [ngram, models/small]           a list: in every slot the first that has a proposal drafts

Text that begins with ``[`` or ``{`` is JSON. A folder with the name of a drafter is written as a path (``./ngram``) or
as a mapping. Python also takes objects: decoders, drafters, functions from ids to ids, and pairs (object, k) in lists.

This module reads no files; `paceline.auto_drafter` loads drafters.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path

from paceline.core.errors import ConfigurationError
from paceline.decoder.options import renamed
from paceline.registry import ACCEPTANCE_RULES, DRAFTERS

CHOICE = "choice"
"""Name of the row whose entry names several drafters."""

_FORMS = (
    "write a name (ngram), a folder, either with options (ngram:prompt_lookup_max=4, DIR:k=3), a mapping with `type` "
    "or `path`, or a list of these"
)
_OPTIONS = re.compile(r":(?=[A-Za-z_]\w*=)")  # the first colon before an option, so that paths may contain others
_COMMA = re.compile(r",(?=[A-Za-z_]\w*=)")  # values may have commas too


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One drafter of a configuration.

    name     a row of `paceline.registry.DRAFTERS`; None: the folder's config.json determines it, or ``value`` is given
    path     folder of a draft model or of heads
    k        drafted tokens per round; None: that of the generator, or of the heads' tree
    options  its (name, value) pairs, checked by `paceline.auto_drafter.make_drafter`
    value    a Python object instead: a decoder, a drafter or a function
    parts    the drafters of a choice
    """

    name: str | None = None
    path: str | None = None
    k: int | None = None
    options: tuple[tuple[str, object], ...] = ()
    value: object = None
    parts: tuple[DraftSpec, ...] = ()

    def __str__(self) -> str:
        source = self.name or str(self.path)
        if self.value is not None:  # a decoder knows its folder
            source = str(getattr(self.value, "folder", None) or type(self.value).__name__)
        path = (("path", self.path),) if self.name and self.path else ()
        k = (("k", self.k),) if self.k is not None else ()
        drafts = (("drafts", json.dumps([str(part) for part in self.parts])),) if self.parts else ()
        return _written(source, (*path, *drafts, *k, *self.options))

    @property
    def label(self) -> str:
        """The short name: the drafter's, or the last part of its folder. Server paths do not reach clients."""
        folder = self.path if self.value is None else getattr(self.value, "folder", None)
        return self.name or (Path(folder).name if folder else type(self.value).__name__)

    def leaves(self) -> Iterator[DraftSpec]:
        """Yield this drafter, or the drafters that it is a choice of."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def mapped(self, change: Callable[[DraftSpec], DraftSpec]) -> DraftSpec:
        """The same with every one of its `leaves` changed."""
        if not self.parts:
            return change(self)
        return replace(self, parts=tuple(part.mapped(change) for part in self.parts))


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """An acceptance rule by its name in `paceline.registry.ACCEPTANCE_RULES`, with options; or an object."""

    name: str | None = None
    options: tuple[tuple[str, object], ...] = ()
    value: object = None

    def __str__(self) -> str:
        return _written(self.name or type(self.value).__name__, self.options)


def _written(source: str, options: Sequence[tuple[str, object]]) -> str:
    text = ",".join(f"{name}={value}" for name, value in options)
    return f"{source}:{text}" if text else source


def parse_draft(draft: object) -> tuple[DraftSpec, ...]:
    """The drafters of a draft option, in order; empty for plain decoding."""
    draft = _from_json(draft)
    if isinstance(draft, list | tuple) and not _is_pair(draft):
        return tuple(spec for entry in draft for spec in parse_draft(entry))
    if draft is None:
        return ()
    spec = _parse_entry(draft)
    return () if spec.name == "none" else (spec,)


def _is_pair(entry: Sequence[object]) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and integer(entry[1]) is not None


def _parse_entry(entry: object) -> DraftSpec:
    if isinstance(entry, DraftSpec):
        return entry
    if isinstance(entry, str):
        return _parse_text(entry)
    if isinstance(entry, os.PathLike):
        return _spec("path", os.fspath(entry), {})
    if isinstance(entry, Mapping):
        return _parse_mapping(entry)
    if isinstance(entry, tuple):
        spec = _parse_entry(entry[0])
        if spec.k is not None:
            raise ConfigurationError(f"draft: expected k once, got it twice in {spec}; remove one")
        return replace(spec, k=_entry_k(entry[1], spec))
    if entry is None or isinstance(entry, bool | int | float | bytes | list):
        raise ConfigurationError(f"draft: expected a drafter's name or a folder, got {entry!r}; {_FORMS}")
    return DraftSpec(value=entry)


def _parse_text(text: str) -> DraftSpec:
    source, *rest = _OPTIONS.split(text, maxsplit=1)
    if not source.strip():
        raise ConfigurationError(f"draft: expected a drafter's name or a folder, got {text!r}; {_FORMS}")
    options = _parse_options(rest[0], f"draft {text!r}") if rest else {}
    return _spec("type" if source in DRAFTERS else "path", source, options)


def _parse_mapping(entry: Mapping[object, object]) -> DraftSpec:
    options = {str(key): value for key, value in entry.items()}
    kind = "type" if "type" in options else "path"
    source = options.pop(kind, None)
    if not isinstance(source, str) or not source:
        raise ConfigurationError(f"draft: expected `type` (a name) or `path` (a folder), got {dict(entry)!r}; {_FORMS}")
    return _spec(kind, source, options)


def _spec(kind: str, source: str, options: dict[str, object]) -> DraftSpec:
    """Return the checked value: an existing name, a path if one is needed, k as a number."""
    with renamed(options) as own:
        options = own
    path: object = source if kind == "path" else options.pop("path", None)
    name = source if kind == "type" else None
    if name == CHOICE:
        return _choice(options)
    if name is not None:
        choosable = [row.name for row in DRAFTERS.values() if row.given_as in ("name", "target", "folder")]
        names = [*choosable, CHOICE]
        if name not in names:
            raise ConfigurationError(
                f"draft: expected one of {', '.join(names)}, or a folder, as the type, got {name!r}; correct it"
            )
        needs_folder = DRAFTERS[name].given_as == "folder"
        if needs_folder != (isinstance(path, str) and bool(path)):
            if not needs_folder:
                raise ConfigurationError(f"draft: expected no folder for the drafter {name!r}, got one; omit `path`")
            raise ConfigurationError(
                f"draft: expected a folder for the drafter {name!r}, got none; write {name}:path=DIR, or ./{name} "
                "for a folder of that name"
            )
    spec = DraftSpec(name, str(path) if path else None)
    k = _entry_k(options.pop("k"), spec) if "k" in options else None
    return DraftSpec(name, spec.path, k, tuple((key, _frozen(value)) for key, value in options.items()))


def _choice(options: dict[str, object]) -> DraftSpec:
    """Parse a choice of drafters; its k is the default of its drafters."""
    drafts = options.pop("drafts", None)
    parts = parse_draft(drafts) if isinstance(drafts, list | tuple) else ()
    if len(parts) < 2:
        raise ConfigurationError(
            f"drafts: expected at least two drafters for a choice, got {drafts!r}; write "
            f'{CHOICE}:drafts=["ngram","DIR"] or {{type: {CHOICE}, drafts: [ngram, DIR]}}'
        )
    spec = DraftSpec(CHOICE, parts=parts)
    k = _entry_k(options.pop("k"), spec) if "k" in options else None
    parts = tuple(part.mapped(lambda leaf: leaf if leaf.k is not None else replace(leaf, k=k)) for part in parts)
    return replace(spec, k=k, parts=parts, options=tuple((key, _frozen(value)) for key, value in options.items()))


def _entry_k(value: object, spec: DraftSpec) -> int:
    k = integer(value)
    if k is None or k < 1:
        raise ConfigurationError(
            f"k: expected a whole number of at least 1 for draft {spec}, got {value!r}; correct it"
        )
    return k


def _parse_options(text: str, where: str) -> dict[str, object]:
    """``name=value,name=value``; values are JSON where they are valid JSON, else text."""
    options: dict[str, object] = {}
    for part in _COMMA.split(text):
        name, _, value = part.partition("=")
        if name in options:
            raise ConfigurationError(f"draft: expected {name} once, got it twice in {where}; remove one")
        options[name] = _scalar(value)
    return options


def _scalar(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _from_json(value: object) -> object:
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"draft: expected JSON after the first bracket, got {value!r} ({error}); correct it"
        ) from error


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def integer(value: object) -> int | None:
    """The integer that it is, NumPy's included; None for anything else, also a truth value."""
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None


def parse_rule(rule: object) -> RuleSpec:
    """An acceptance rule: ``"match"``, ``"typical:epsilon=0.09,alpha=0.3"``, ``{type: typical, ...}`` or an object.

    Raises:
        ConfigurationError: the rule does not exist.
    """
    if isinstance(rule, RuleSpec):
        return rule
    options: dict[str, object] = {}
    if isinstance(rule, Mapping):
        options = {str(key): value for key, value in rule.items()}
        rule = options.pop("type", None)
    elif isinstance(rule, str):
        where = f"acceptor {rule!r}"
        rule, *rest = _OPTIONS.split(rule, maxsplit=1)
        options = _parse_options(rest[0], where) if rest else {}
    elif callable(rule) and not isinstance(rule, type):
        return RuleSpec(value=rule)
    if not isinstance(rule, str) or rule not in ACCEPTANCE_RULES:
        raise ConfigurationError(
            f"acceptor: expected one of {', '.join(ACCEPTANCE_RULES)}, or a rule's object, got {rule!r}; use one of "
            "them"
        )
    return RuleSpec(rule, tuple((key, _frozen(value)) for key, value in options.items()))
