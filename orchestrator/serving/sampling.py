"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from paceline.engine.request import SamplingParams
from paceline.serving.openai.chat import ChatRequest
from paceline.serving.openai.completion import CompletionRequest
from paceline.serving.refused import RefusedError
from paceline.text.stop_strings import StopStrings


def sampling_params(request: CompletionRequest | ChatRequest) -> SamplingParams:
    """What the engine is asked for. A greedy request has all values too, so that one out of range is always refused.

    Raises:
        RefusedError: something is asked for that cannot be done.
        SamplingError: a value is out of range.
    """
    _refuse_unserved(request)
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    best_of = request.candidates > request.n
    return SamplingParams(
        max_new_tokens=request.max_new_tokens,
        seed=request.seed,
        do_sample=request.temperature != 0,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        stop_strings=StopStrings(stops, scope="output") if stops else None,
        repetition_penalty=None if request.repetition_penalty == 1 else request.repetition_penalty,
        output_scores=best_of or request.top_logprobs_wanted is not None,
        use_speculation=not request.speculative.is_off,
        max_draft_tokens=request.speculative.k or None,
    )


def _refuse_unserved(request: CompletionRequest | ChatRequest) -> None:
    """What the engine has no field for."""
    asked = {
        "frequency_penalty": request.frequency_penalty != 0,
        "presence_penalty": request.presence_penalty != 0,
        "logit_bias": bool(request.logit_bias),
        "response_format": request.response_format.type != "text",
        "structured_outputs": request.guided is not None,
        "prediction": request.prediction is not None,
        "tool_choice": isinstance(request, ChatRequest) and request.tool_choice not in (None, "none", "auto"),
        "top_logprobs": bool(request.top_logprobs_wanted),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise RefusedError(400, f"{name} is not served; leave it out", param=name)
