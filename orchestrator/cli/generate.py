"""`paceline generate`: one text, continued. How it looks is in `paceline.cli.console`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from time import perf_counter

import typer

from paceline.cli import console, progress
from paceline.cli.config_options import command
from paceline.cli.load import checked, load_generator
from paceline.cli.options import LoaderOptions, OutputOptions, PromptOptions, SamplingOptions, TargetFolder
from paceline.config import SpeculativeConfig
from paceline.core.types import TokenLogprobs
from paceline.decoder.backends.registry import BACKENDS
from paceline.draft_checks import make_rule
from paceline.engine.request import Request
from paceline.loadable import request_limits
from paceline.outputs import FinishReason, RequestOutput, Statistics
from paceline.text.chat import chat_ids
from paceline.text.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer, prompt_ids

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Continuation:
    """A finished text: without its prompt, as text and as ids, and why it ended; and log-probabilities, if wanted."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None


@command(app)
def generate(
    target: TargetFolder,
    prompt: PromptOptions,
    config: SpeculativeConfig,
    *,
    sampling: SamplingOptions,
    loader: LoaderOptions,
    output: OutputOptions,
) -> None:
    """Continue a text: plainly, or with any drafter (`paceline list` shows them)."""
    with console.refusals():
        text = prompt.text()
        if sampling.ignores_filters:
            console.say(console.err(), "note: greedy decoding ignores top-k, top-p and min-p; set --temperature")
        params, found = sampling.params(), checked(target, loader, config)
        tokenizer = load_tokenizer(target)
        ids = chat_ids(tokenizer, [{"role": "user", "content": text}]) if prompt.chat else prompt_ids(tokenizer, text)
        params = replace(params, tokenizer=tokenizer)
        Request.batch([ids], params, request_limits(found, make_rule(config)))
        generator, decoders = load_generator(found, config)
        if BACKENDS[loader.backend].compiles:
            progress.compiling(console.err(), decoders, [generator.compile])
        stream = generator.stream([ids], params=params)
        warning = console.acceptance_warning(generator.statistics)
        begin = perf_counter()
        if output.as_json:
            continuation = _quiet(stream, tokenizer, ids, total=sampling.max_new_tokens)
            typer.echo(json.dumps(_json_object(text, continuation, generator.statistics, warning=warning)))
        else:
            continuation = _shown(stream, tokenizer, ids, prompt=text, warning=warning)
        if output.stats:
            console.err().print(console.statistics_table(generator.statistics, perf_counter() - begin))


def _json_object(
    prompt: str, continuation: Continuation, statistics: Statistics, *, warning: str | None
) -> dict[str, object]:
    """What is printed as JSON. The warning comes first, where nobody misses it."""
    first = {} if warning is None else {"warning": warning}
    fields = asdict(continuation)
    if continuation.logprobs is None:
        del fields["logprobs"]
    return {**first, "prompt": prompt, **fields, "statistics": statistics.to_dict()}


def _shown(
    stream: Iterator[RequestOutput], tokenizer: Tokenizer, ids: list[int], *, prompt: str, warning: str | None
) -> Continuation:
    """Write the text while it grows. A warning stands above it, on stdout too: it must not get lost in a pipe."""
    view = console.TextView(console.out(), tokenizer, ids)
    if warning is not None:
        console.say(console.out(), warning, style="bold red")
    if console.out().is_terminal:
        console.err().print(view.legend())
        view.prompt(prompt)
    continuation = _collected(stream, view.show)
    typer.echo()
    return continuation


def _quiet(stream: Iterator[RequestOutput], tokenizer: Tokenizer, ids: list[int], *, total: int) -> Continuation:
    """Show only how far it is."""
    text = IncrementalDetokenizer(tokenizer, ids)
    with progress.bar(console.err(), "generating", total) as bar:

        def piece(output: RequestOutput) -> str:
            bar.advance(len(output.tokens))
            return "".join(map(text.push, output.tokens)) + (text.flush() if output.finish_reason else "")

        return _collected(stream, piece)


def _collected(stream: Iterator[RequestOutput], piece: Callable[[RequestOutput], str]) -> Continuation:
    pieces: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    reason: FinishReason = "length"
    for output in stream:
        if output.error is not None:
            raise output.error
        if output.token_logprobs is not None:
            logprobs = [*(logprobs or ()), *output.token_logprobs]
        pieces.append(piece(output))
        tokens += output.tokens
        reason = output.finish_reason or reason
    return Continuation("".join(pieces), tokens, reason, logprobs)
