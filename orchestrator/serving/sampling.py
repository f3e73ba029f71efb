"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.core.detokenizer import Tokenizer
from paceline.engine.request import SamplingParams
from paceline.serving.openai.chat import ChatRequest, NamedTool, Tool
from paceline.serving.openai.completion import CompletionRequest
from paceline.serving.openai.fields import StructuredOutputs
from paceline.text.stop_strings import StopStrings
from paceline.text.structured_output import ReasoningMarkers, StructuredOutput


def sampling_params(
    request: CompletionRequest | ChatRequest, tokenizer: Tokenizer, reasoning: ReasoningMarkers | None = None
) -> SamplingParams:
    """What the engine is asked for. A greedy request has all values too, so that one out of range is always refused.

    ``reasoning``: how text is marked that may come before a structured answer.

    Raises:
        SamplingError: a value is out of range, or a schema, expression or grammar cannot be compiled.
    """
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    best_of, structured = request.candidates > request.n, _structured(request)
    return SamplingParams(
        max_new_tokens=request.max_new_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        seed=request.seed,
        do_sample=request.temperature != 0,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        stop_strings=StopStrings(stops, scope="output") if stops else None,
        repetition_penalty=None if request.repetition_penalty == 1 else request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()} or None,
        logprobs=0 if best_of and request.top_logprobs_wanted is None else request.top_logprobs_wanted,
        structured_outputs=None if structured is None else replace(structured, after=reasoning),
        prediction=request.prediction.text if request.prediction is not None else None,
        use_speculation=not request.speculative.is_off,
        max_draft_tokens=request.speculative.k or None,
        tokenizer=tokenizer,
    )


def _structured(request: CompletionRequest | ChatRequest) -> StructuredOutput | None:
    """What the text must be: as the request says, or the calls that it demands."""
    if isinstance(request, ChatRequest) and (calls := _demanded_calls(request)) is not None:
        return StructuredOutput("json_schema", calls)
    return None if request.structured is None else _structured_output(request.structured)


def _structured_output(constraint: StructuredOutputs) -> StructuredOutput | None:
    if constraint.json_object is not None:
        return StructuredOutput("json_object") if constraint.json_object else None
    if constraint.json_schema is not None:
        schema = constraint.json_schema
        return StructuredOutput("json_schema", str(schema).lower() if isinstance(schema, bool) else schema)
    if constraint.regex is not None:
        return StructuredOutput("regex", constraint.regex)
    if constraint.choice is not None:
        return StructuredOutput("choice", constraint.choice)
    return StructuredOutput("grammar", constraint.grammar)


def _demanded_calls(request: ChatRequest) -> dict[str, Any] | None:
    """The schema of what `parsers.tools` reads: arguments of one function, or a list of calls of any."""
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        return next(_arguments(tool) for tool in request.tools if tool.function.name == choice.function.name)
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": _arguments(tool)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in request.tools
    ]
    most = {} if request.parallel_tool_calls else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def _arguments(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object"}
