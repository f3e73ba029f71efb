"""`paceline generate`: one text, continued. What is shown: `paceline.cli.console`; who drafts: `paceline.cli.load`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from paceline.cli import console, options, progress, prompt_files
from paceline.cli.load import Drafting, Loading, Source, source_of
from paceline.core.errors import PromptError
from paceline.engine.ask import Ask
from paceline.outputs import FinishReason, RequestOutput
from paceline.text.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer, prompt_ids

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished text: without its prompt, as text and as ids, and why it ended."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason


@app.command()
def generate(
    target: Annotated[Path, typer.Option(help="Folder of the model whose text it is.")],
    draft: options.DraftFolder = None,
    ngram: Annotated[bool, typer.Option("--ngram", help="Draft from n-grams of the text; before --draft.")] = False,
    suffix: Annotated[bool, typer.Option("--suffix", help="Draft from repeated suffixes; before --ngram.")] = False,
    medusa: options.MedusaFolder = None,
    tree: options.TreeFile = None,
    eagle: options.EagleFolder = None,
    growth: options.GrowthName = None,
    k: options.Depths = None,
    fused: options.FusedOrNot = None,
    exact: options.Exact = True,
    confidence: options.Confidence = 0.0,
    vocabulary: options.VocabularyName = "same",
    acceptor: Annotated[str, typer.Option(help="match (exact), reject (exact in law) or typical (LOSSY).")] = "match",
    synthetic_acceptance: Annotated[
        float | None, typer.Option(help="Drafts stand with this probability, to measure speed: NOT REAL TEXT.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File with the prompt ('-': stdin); one newline at its end is left out.", allow_dash=True),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Above 0: sample. 0: greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within so much probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Leave out tokens below this share of the best.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same tokens, whatever the draft.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the generation, taken as it is; repeatable. A line end in bash: $'\\n'."),
    ] = None,
    backend: options.BackendName = "inductor",
    amp: options.Amp = "bf16",
    tp_degree: options.TpDegree = 1,
    group_query_attention: options.GroupQueryAttention = None,
    n_positions: options.Positions = None,
    context_length_estimate: options.Chunks = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts and times on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")] = False,
) -> None:
    """Continue a text: plainly, or with a draft model, n-grams, suffixes, Medusa heads or an EAGLE head."""
    sampling: dict[str, object] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed,
        "do_sample": temperature != 0, "max_new_tokens": max_new_tokens, "stop_strings": stop,
    }  # fmt: skip
    with console.refusals():
        loading = Loading(
            backend, amp, n_positions, context_length_estimate, tp_degree=tp_degree,
            group_query_attention=group_query_attention,
        )  # fmt: skip
        how = Drafting(
            k, draft, ngram, medusa, tree, acceptor, eagle, growth, suffix=suffix, fused=fused, exact=exact,
            confidence=confidence, vocabulary=vocabulary, synthetic_acceptance=synthetic_acceptance,
        )  # fmt: skip
        text = _prompt(prompt, prompt_file)
        _generate(target, text, loading=loading, how=how, sampling=sampling, stats=stats, as_json=as_json)


def _generate(
    target: Path, text: str, *, loading: Loading, how: Drafting, sampling: dict[str, object], stats: bool, as_json: bool
) -> None:
    """``sampling``: keywords of `stream`."""
    if not sampling["temperature"] and any(sampling[name] is not None for name in ("top_k", "top_p", "min_p")):
        console.say(console.err(), "note: greedy decoding ignores top-k, top-p and min-p; set --temperature")
    source, decoders = source_of(target, loading, how)
    tokenizer = load_tokenizer(target)
    ids = prompt_ids(tokenizer, text)
    asked: dict[str, object] = {"input_ids": [ids], "tokenizer": tokenizer, **sampling}
    Ask(**asked).requests(decoders["target"])  # type: ignore[arg-type]  # what is refused is refused before compiling
    if loading.backend != "eager":
        progress.compiling(console.err(), decoders, [source.compile])
    stream = source.stream(**asked)  # type: ignore[arg-type]
    warning = console.not_the_target_s(source.statistics.acceptor)
    begin = perf_counter()
    if as_json:
        done = _quiet(stream, tokenizer, ids, total=int(str(sampling["max_new_tokens"])))
    else:
        done = _shown(stream, tokenizer, ids, prompt=text, warning=warning)
    seconds = perf_counter() - begin
    if as_json:
        typer.echo(json.dumps(_object(text, done, source, warning=warning)))
    if stats:
        console.err().print(console.statistics_table(source.statistics, seconds))


def _object(prompt: str, done: Outcome, source: Source, *, warning: str | None) -> dict[str, object]:
    """What is printed as JSON. The warning comes first, where nobody misses it."""
    first = {} if warning is None else {"warning": warning}
    return {**first, "prompt": prompt, **asdict(done), "statistics": source.statistics.to_dict()}


def _shown(
    stream: Iterator[RequestOutput], tokenizer: Tokenizer, ids: list[int], *, prompt: str, warning: str | None
) -> Outcome:
    """Write the text while it grows. A warning stands above it, on stdout too: it must not get lost in a pipe."""
    view = console.TextView(console.out(), tokenizer, ids)
    if warning is not None:
        console.say(console.out(), warning, style="bold red")
    if console.out().is_terminal:
        console.err().print(view.legend())
        view.prompt(prompt)
    done = _outcome(stream, view.show)
    typer.echo()
    return done


def _quiet(stream: Iterator[RequestOutput], tokenizer: Tokenizer, ids: list[int], *, total: int) -> Outcome:
    """Show only how far it is."""
    text = IncrementalDetokenizer(tokenizer, ids)
    with progress.bar(console.err(), "generating", total) as shown:

        def piece(event: RequestOutput) -> str:
            shown.advance(len(event.tokens))
            return "".join(map(text.push, event.tokens)) + (text.flush() if event.finish_reason else "")

        return _outcome(stream, piece)


def _outcome(stream: Iterator[RequestOutput], piece: Callable[[RequestOutput], str]) -> Outcome:
    pieces: list[str] = []
    tokens: list[int] = []
    reason: FinishReason = "length"
    for event in stream:
        pieces.append(piece(event))
        tokens += event.tokens
        reason = event.finish_reason or reason
    return Outcome("".join(pieces), tokens, reason)


def _prompt(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise PromptError("give the text to continue with --prompt or with --prompt-file, one of them")
    if file is None:
        return prompt_files.written(text or "", "--prompt")
    return prompt_files.text(file).removesuffix("\n")
