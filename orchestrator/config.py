"""Drafting and verification options. `SpeculativeConfig` declares every key once: Python, commands, YAML, HTTP.

The grammar of drafts is in `paceline.draft_spec`; `paceline.auto_drafter` loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from paceline.core.errors import ConfigurationError
from paceline.decoder.options import renamed
from paceline.draft_spec import DraftSpec, RuleSpec, integer, parse_draft, parse_rule

DEFAULT_K = 4
"""Default number of drafted tokens per round."""

DRAFT_LENGTHS = (0, 1, 2, 4, 8)
"""The draft lengths of ``k="auto"``."""

OF_DRAFTS, OF_MODELS = "needs a draft", "needs a draft model"
"""Mark of options that have no effect without a drafter."""

NOT_SERVED = "for measurements alone"
"""Mark of options that services do not have."""

VOCABULARIES = ("same", "intersection", "retokenize")


def parse_k(k: object) -> int | tuple[int, ...] | Literal["auto"] | None:
    """Draft lengths: a number, ascending numbers to choose among (also ``"auto:0,2,4"``), ``"auto"`` or None."""
    if k is None:
        return None
    if k == "auto":
        return "auto"
    parts = k.removeprefix("auto:").split(",") if isinstance(k, str) else k if isinstance(k, list | tuple) else [k]
    lengths = [int(n) if isinstance(n, str) and n.strip().isdecimal() else integer(n) for n in parts]
    numbers = tuple(length for length in lengths if length is not None)
    if not numbers or len(numbers) < len(lengths) or numbers[0] < 0 or any(a >= b for a, b in pairwise(numbers)):
        raise ConfigurationError(
            f"k: expected a number from 0 on, ascending numbers such as auto:0,2,4, or auto, got {k!r}; correct it"
        )
    return numbers[0] if len(numbers) == 1 else numbers


def _parse_vocabulary(vocabulary: object) -> object:
    pair = hasattr(vocabulary, "target") and hasattr(vocabulary, "draft")  # a TokenizerPair, whose module loads PyTorch
    if not pair and vocabulary not in VOCABULARIES:
        raise ConfigurationError(
            f"vocabulary: expected {', '.join(map(repr, VOCABULARIES))}, or TokenizerPair(target=..., draft=...), "
            f"got {vocabulary!r}; use one of them"
        )
    return vocabulary


class SpeculativeConfig(BaseModel):
    """Drafting and verification options of a generator. Frozen; unknown keys and values out of range are rejected.

    Raises:
        ConfigurationError: a key is unknown or out of range, or two of them contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    draft: Annotated[tuple[DraftSpec, ...], BeforeValidator(parse_draft)] = Field(
        default=(),
        description="Drafter: a name (ngram, suffix) or a folder (draft model, Medusa or EAGLE heads), either with "
        "options "
        "(ngram:prompt_lookup_max=4, DIR:k=3), or a list, whose first drafter with a proposal is used in each "
        "round. Default: none.",
    )
    k: Annotated[int | tuple[int, ...] | Literal["auto"] | None, BeforeValidator(parse_k)] = Field(
        default=None,
        description="Number of draft tokens per round, without the bonus token: a number; auto:0,2,4 to choose "
        "among these in each round; or auto (0,1,2,4,8; on Neuron 0,1,3,4). Default: 4, or the depth of the heads' "
        "tree; auto for a served model.",
    )
    acceptor: Annotated[RuleSpec, BeforeValidator(parse_rule), OF_DRAFTS] = Field(
        default=RuleSpec("match"),
        description="Acceptance rule: match (the tokens of plain decoding), reject (the distribution of plain "
        "decoding) or "
        "typical (LOSSY), also with options (typical:epsilon=0.09).",
    )
    exact: bool = Field(
        default=True, description="Use one graph width in every round, so that rounding cannot depend on drafts."
    )
    fused: Annotated[bool | None, OF_DRAFTS] = Field(
        default=None, description="Draft and verify in one graph. Default: wherever that is possible."
    )
    prefix_caching: bool = Field(
        default=False,
        description=(
            "Keep finished prompts in their slots, so that a request with a shared prefix prefills only its suffix."
        ),
    )
    learn: Annotated[str | None, OF_DRAFTS] = Field(
        default=None,
        description="Folder for an EAGLE head that is trained on the finished texts of this process, at idle priority, "
        "and replaces the given one where it drafts better. Default: none.",
    )
    confidence_threshold: Annotated[float, OF_MODELS] = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Probability below which a draft model stops drafting, from 0 (never) to 1.",
    )
    vocabulary: Annotated[Any, BeforeValidator(_parse_vocabulary), OF_MODELS] = Field(
        default="same",
        description="How to use a draft with another tokenizer: same (reject it), intersection (draft only shared "
        "tokens) "
        "or retokenize (exchange text).",
    )
    synthetic_acceptance: Annotated[float | None, OF_DRAFTS, NOT_SERVED] = Field(
        default=None,
        ge=0,
        le=1,
        description="Probability with which draft tokens are accepted at random, to measure speed; the output is "
        "NOT REAL "
        "TEXT. Default: off.",
    )

    def __init__(self, **values: Any) -> None:
        with renamed(values) as own:
            try:
                super().__init__(**own)
            except ValidationError as error:
                raise configuration_error(error, type(self)) from error

    @model_validator(mode="after")
    def _check(self) -> SpeculativeConfig:
        if self.synthetic_acceptance is not None and self.acceptor != RuleSpec("match"):
            raise ConfigurationError(
                f"synthetic_acceptance: expected no acceptor with it, got {self.acceptor.name or 'a rule'!r}; give "
                "one of them"
            )
        if self.draft:
            return self
        for name in self.set_of(OF_DRAFTS, OF_MODELS):
            raise ConfigurationError(
                f"{name}: expected a drafter with it, got draft=None; give a draft, or omit {name}"
            )
        return self

    @classmethod
    def part_of(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Select the options among other keys; missing ones have their defaults. Errors as of the class."""
        return cls(**{name: values[name] for name in cls.model_fields if name in values})

    @classmethod
    def names(cls, *marks: str) -> frozenset[str]:
        """The options with one of these marks."""
        return frozenset(
            name for name, field in cls.model_fields.items() if any(one in field.metadata for one in marks)
        )

    def set_of(self, *marks: str) -> list[str]:
        """Return the options with one of these marks that differ from their defaults."""
        usual = {name: type(self).model_fields[name].default for name in self.names(*marks)}
        return [name for name, value in self if name in usual and value != usual[name] and value is not False]

    @property
    def max_k(self) -> int:
        if self.k is None:
            return DEFAULT_K
        return DRAFT_LENGTHS[-1] if self.k == "auto" else self.k[-1] if isinstance(self.k, tuple) else self.k

    def longest_draft(self, usual: tuple[int, ...]) -> int:
        """Return `max_k`, with "auto" replaced by the lengths ``usual`` of a backend; () = `DRAFT_LENGTHS`."""
        return usual[-1] if usual and self.k == "auto" else self.max_k

    def leaves(self) -> list[DraftSpec]:
        """Return every drafter, also those inside a choice."""
        return [leaf for spec in self.draft for leaf in spec.leaves()]

    def with_paths(self, located: Callable[[str], str]) -> SpeculativeConfig:
        """The same with every folder's path changed."""

        def change(leaf: DraftSpec) -> DraftSpec:
            return leaf if leaf.path is None else replace(leaf, path=located(leaf.path))

        return self.model_copy(update={"draft": tuple(spec.mapped(change) for spec in self.draft)})

    def draft_lengths(self, deepest: int, usual: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """Return the lengths that rounds choose among, for a drafter of at most ``deepest`` tokens; None: there is one.

        ``usual``: those that "auto" means on a backend; () = `DRAFT_LENGTHS`.
        """
        if self.k == "auto":
            return (*(length for length in usual or DRAFT_LENGTHS if length < deepest), deepest)
        return self.k if isinstance(self.k, tuple) else None


def configuration_error(error: ValidationError, model: type[BaseModel]) -> ConfigurationError:
    """The first error of pydantic as our own: the option, its value, and what is possible."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigurationError):
        return cause
    name = str(first["loc"][0]) if first["loc"] else "the configuration"
    if first["type"] == "extra_forbidden":
        return ConfigurationError(f"{name}: not an option; use one of {', '.join(model.model_fields)}")
    field = model.model_fields.get(name)
    about = f" ({field.description})" if field is not None and field.description else ""
    wanted = first["msg"].removeprefix("Input should be ")
    return ConfigurationError(
        f"{name}: expected {wanted[0].lower()}{wanted[1:]}, got {first['input']!r}; correct it{about}"
    )
