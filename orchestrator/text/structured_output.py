"""What a text must be: the type of `SamplingParams.structured_outputs`, in vLLM's words.

Not here: what a grammar lets follow (`paceline.text.grammar`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.core.errors import SamplingError

StructuredKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]

MAX_SOURCE_BYTES = 1 << 16
"""Of a schema, expression or grammar as UTF-8. What a longer one compiles to is past the limits of size anyway."""


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Around free text before a structured answer.

    end    the text, or the special token, behind which the answer must be what was asked for
    start  what opens the free text, if there is any; "": the prompt has opened it, so that it comes first in any case
    """

    end: str
    start: str = ""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the whole text of an answer must be, or all of it behind its reasoning.

    kind   json_schema: JSON that a JSON schema admits; json_object: any JSON object; regex: what a regular expression
           matches from its first to its last character (without look-around); grammar: a context-free grammar in
           llguidance's Lark format; choice: one of some strings
    value  the schema (a mapping, or JSON text), None, the expression, the grammar, or the strings
    after  how reasoning is marked that may come first; None: there is none

    Raises:
        SamplingError: the kind is unknown, or the value is not of it.
    """

    kind: StructuredKind
    value: Mapping[str, object] | str | Sequence[str] | None = None
    after: ReasoningMarkers | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructuredKind):
            kinds = ", ".join(get_args(StructuredKind))
            raise SamplingError(f"structured_outputs of kind {self.kind!r} are unknown; there are {kinds}")
        wrong = None
        if self.kind == "json_schema":
            wrong = None if isinstance(self.value, (Mapping, str)) else "a JSON schema: a mapping, or JSON text"
        elif self.kind == "json_object":
            wrong = None if self.value is None else "nothing: any JSON object will do"
        elif self.kind == "choice":
            listed = isinstance(self.value, Sequence) and not isinstance(self.value, str)
            good = listed and self.value and all(isinstance(one, str) and one for one in self.value or ())
            wrong = None if good else "a list of strings that are not empty"
        elif not isinstance(self.value, str) or not self.value:
            wrong = "a string that is not empty"
        if wrong is not None:
            raise SamplingError(f"structured_outputs of kind {self.kind!r} need {wrong}, not {self.value!r:.60}")
        if (size := len(self.source.encode())) > MAX_SOURCE_BYTES:
            raise SamplingError(
                f"structured_outputs of {size} bytes are longer than the {MAX_SOURCE_BYTES} that are compiled; "
                "ask for something simpler"
            )

    @property
    def source(self) -> str:
        """The value as text: the same for the same demand.

        Raises:
            SamplingError: the schema cannot be written as JSON.
        """
        if isinstance(self.value, str):
            return self.value
        try:
            return json.dumps(self.value)  # in the order given: properties come in the schema's order
        except (TypeError, ValueError, RecursionError) as error:
            raise SamplingError(f"the JSON schema cannot be written as JSON ({error}); give plain values") from None
