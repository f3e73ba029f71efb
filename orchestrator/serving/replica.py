"""One deployment's replica: a group of workers in the replica's own placement group, and the text around them.

The replica has no model: it turns text into ids and back, and passes on what the target's worker streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import ray

from paceline.placement.cluster.actors import STREAMS
from paceline.placement.cluster.calls import Stream
from paceline.placement.cluster.deployment import Deployment
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.roles import TokenDelta
from paceline.placement.cluster.worker_group import WorkerGroup
from paceline.placement.planning.plan import Placement, Plan
from paceline.serving.errors import refusal
from paceline.serving.protocol import CompletionRequest, RefusedError
from paceline.serving.responses import Failed, Opening, TextPiece
from paceline.serving.stop_filter import StopStringFilter
from paceline.text.stop_strings import StopStrings
from paceline.text.tokenizer import Tokenizer, load_tokenizer

Item = Opening | TextPiece | Failed
_OWN_BUNDLE = 1  # the replica itself has bundle 0


class Replica:
    """Serves the targets of one group. Requests share a target's rounds; those that find no slot wait for one."""

    def __init__(self, plan: Plan, members: Sequence[Placement], care: FaultPolicy) -> None:
        group = WorkerGroup(
            plan.instance, members, care, given=ray.util.get_current_placement_group(), offset=_OWN_BUNDLE
        )
        self._models = Deployment(plan, care, [group]).start()
        # Each stream blocks a thread of its own; the loop's usual few would make them wait for each other.
        self._threads = ThreadPoolExecutor(STREAMS, thread_name_prefix="paceline-stream")
        folders = {item.label: item.model.folder for item in members}
        self._tokenizers = {label: load_tokenizer(Path(str(folders[label]))) for label in self._models.models}

    async def stream(self, label: str, ask: CompletionRequest) -> AsyncIterator[Item]:
        """An opening and then pieces; or a failure, wherever it happens."""
        try:
            tokenizer = self._tokenizers[label]
            prompts = await asyncio.to_thread(encoded, tokenizer, ask)
            writers = [StopStringFilter(tokenizer, prompt, ask.stop) for prompt in prompts]
            pieces = _threaded(self._models.stream(label, prompts, **keywords(ask)), self._threads)
            async with aclosing(pieces):
                first = await anext(pieces, None)  # a request that the target refuses has no opening
                yield Opening(sum(map(len, prompts)))
                if first is not None:
                    yield _text(first, writers[first.index])
                async for piece in pieces:
                    yield _text(piece, writers[piece.index])
        except Exception as error:  # tokenizers too raise what they like
            refused = refusal(error, ask.kind)
            yield Failed(refused.status, refused.message, refused.param, refused.code)

    async def check_health(self) -> None:
        """Serve asks; workers that die are brought back by the request that finds them dead."""

    def __del__(self) -> None:
        models: Deployment | None = self.__dict__.get("_models")
        if models is not None:
            models.close()


def keywords(ask: CompletionRequest) -> dict[str, object]:
    """The keywords of `sample` for a request."""
    given: dict[str, object] = {
        "max_new_tokens": ask.limit, "seed": ask.seed,
        # Greedy too is told all of them, so that what is out of range is refused at any temperature.
        "do_sample": ask.temperature != 0, "temperature": ask.temperature,
        "top_p": ask.top_p, "top_k": ask.top_k, "min_p": ask.min_p,
    }  # fmt: skip
    if ask.stop:
        given["stop_strings"] = StopStrings(ask.stop, scope="output")
    return given


def encoded(tokenizer: Tokenizer, ask: CompletionRequest) -> list[list[int]]:
    """The prompts as ids.

    Raises:
        RefusedError: the model has no chat template, or it refuses the messages.
    """
    if ask.kind != "chat":
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in ask.prompts]
    whole: Any = tokenizer
    if not getattr(whole, "chat_template", None):
        raise RefusedError(400, f"{ask.model} has no chat template; use /v1/completions", param="messages")
    messages = [{"role": message.role, "content": message.content} for message in ask.messages]
    try:
        text = whole.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs that raise what they like
        raise RefusedError(400, f"the chat template refuses these messages: {error}", param="messages") from error
    return [list(whole.encode(text, add_special_tokens=False))]


def _text(piece: TokenDelta, writer: StopStringFilter) -> TextPiece:
    text = writer.push(piece.tokens)
    if piece.finish_reason is None:
        return TextPiece(piece.index, text, len(piece.tokens))
    reason = "length" if piece.finish_reason == "length" else "stop"
    return TextPiece(piece.index, text + writer.end(), len(piece.tokens), reason)


async def _threaded(pieces: Stream, threads: Executor) -> AsyncGenerator[TokenDelta, None]:
    """An iterator that blocks, run beside the event loop; closed when nobody wants more."""
    loop = asyncio.get_running_loop()
    step: asyncio.Future[TokenDelta | None] | None = None
    try:
        while True:
            step = loop.run_in_executor(threads, next, pieces, None)
            piece = await asyncio.shield(step)
            if piece is None:
                return
            yield piece
    finally:
        pieces.close()
        if step is not None and not step.done():
            await asyncio.wait([step])
