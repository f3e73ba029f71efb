"""One deployment's replica: a group of workers in the replica's own placement group, and the text around them.

The replica has no model: it turns text into ids and back, and passes on what the target's worker streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import ray

from paceline.core.errors import PromptError
from paceline.placement.cluster.actors import STREAMS
from paceline.placement.cluster.calls import Stream
from paceline.placement.cluster.deployment import Deployment
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.roles import TokenDelta
from paceline.placement.cluster.worker_group import WorkerGroup
from paceline.placement.planning.plan import Placement, Plan
from paceline.serving.errors import refusal
from paceline.serving.protocol import ChatRequest, CompletionRequest, RefusedError
from paceline.serving.responses import Accepted, Failed, TextDelta
from paceline.text.chat import chat_ids
from paceline.text.stop_strings import StopStringFilter, StopStrings
from paceline.text.tokenizer import Tokenizer, load_tokenizer

Item = Accepted | TextDelta | Failed
_OWN_BUNDLE = 1  # the replica itself has bundle 0


class Replica:
    """Serves the targets of one group. Requests share a target's rounds; those that find no slot wait for one."""

    def __init__(self, plan: Plan, members: Sequence[Placement], fault_policy: FaultPolicy) -> None:
        group = WorkerGroup(
            plan.instance, members, fault_policy, existing=ray.util.get_current_placement_group(), offset=_OWN_BUNDLE
        )
        self._models = Deployment(plan, fault_policy, [group]).start()
        # Each stream blocks a thread of its own; the few of the event loop would make streams wait for each other.
        self._threads = ThreadPoolExecutor(STREAMS, thread_name_prefix="paceline-stream")
        folders = {item.label: item.model.folder for item in members}
        self._tokenizers = {label: load_tokenizer(Path(str(folders[label]))) for label in self._models.models}

    async def stream(self, label: str, request: CompletionRequest | ChatRequest) -> AsyncIterator[Item]:
        """The answer of the target with that label: `Accepted`, then text; wherever it fails, `Failed`."""
        try:
            tokenizer, params = self._tokenizers[label], request.sampling_params
            prompts = await asyncio.to_thread(encode_prompts, tokenizer, request)
            stop = StopStrings.of(params.stop_strings)
            filters = [StopStringFilter(stop, tokenizer, prompt) for prompt in prompts]
            deltas = _iterate_in_threads(self._models.stream(label, prompts, params), self._threads)
            async with aclosing(deltas):
                first = await anext(deltas, None)  # a request that the target refuses is not accepted
                yield Accepted(sum(map(len, prompts)))
                if first is not None:
                    yield _text_of(first, filters[first.index])
                async for delta in deltas:
                    yield _text_of(delta, filters[delta.index])
        except Exception as error:  # tokenizers too, which raise errors of any class
            refused = refusal(error, request)
            yield Failed(refused.status, refused.message, refused.param, refused.code)

    async def check_health(self) -> None:
        """Serve asks; a worker that dies is brought back by the request that finds it dead."""

    def __del__(self) -> None:
        models: Deployment | None = self.__dict__.get("_models")
        if models is not None:
            models.close()


def encode_prompts(tokenizer: Tokenizer, request: CompletionRequest | ChatRequest) -> list[list[int]]:
    """The prompts as ids.

    Raises:
        RefusedError: the model has no chat template, or its template refuses the messages.
    """
    if isinstance(request, CompletionRequest):
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompts]
    messages = [{"role": message.role, "content": message.text} for message in request.messages]
    try:
        return [chat_ids(tokenizer, messages)]
    except PromptError as error:
        raise RefusedError(400, f"{request.model}: {error}", param="messages") from error


def _text_of(delta: TokenDelta, filter_: StopStringFilter) -> TextDelta:
    text = "".join(map(filter_.push, delta.tokens))
    if delta.finish_reason is None:
        return TextDelta(delta.index, text, len(delta.tokens))
    reason = "length" if delta.finish_reason == "length" else "stop"
    return TextDelta(delta.index, text + filter_.flush(), len(delta.tokens), reason)


async def _iterate_in_threads(stream: Stream, threads: Executor) -> AsyncGenerator[TokenDelta, None]:
    """Iterate over a blocking stream beside the event loop; it is closed when nobody wants more."""
    loop = asyncio.get_running_loop()
    step: asyncio.Future[TokenDelta | None] | None = None
    try:
        while True:
            step = loop.run_in_executor(threads, next, stream, None)
            delta = await asyncio.shield(step)
            if delta is None:
                return
            yield delta
    finally:
        stream.close()
        if step is not None and not step.done():
            await asyncio.wait([step])
