"""The command line: `paceline generate`, `paceline compile`, `paceline bench`. Results on stdout, the rest on stderr.

Only options and their wiring are here; what is shown is in `paceline.console`, waiting in `paceline.progress`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

import paceline
from paceline import console, health, medusa_cli, plan_cli, progress, serve_cli, train_cli, train_eagle
from paceline.core.errors import ArtefactError, PromptError
from paceline.decoder.environment import cache_root
from paceline.detokenise import Detokeniser, Tokenizer, load_tokenizer
from paceline.result import Event, FinishReason
from paceline.sources import Drafting, Loading, source_of

app = typer.Typer(
    help="Decode with several models at once: small models set the pace, the big one decides.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(train_cli.app, name="train")
health.register(app)
app.registered_commands += medusa_cli.app.registered_commands
app.registered_commands += train_eagle.files.registered_commands
train_cli.app.registered_commands += train_eagle.app.registered_commands

plan_cli.register(app)
serve_cli.register(app)

Amp = Annotated[str, typer.Option(help="Number format of weights and cache: bf16, f16 or f32.")]
BackendName = Annotated[str, typer.Option("--backend", help="inductor (compiled, CPU) or eager.")]
Positions = Annotated[int | None, typer.Option(help="Longest text, prompt included; default: the model's own.")]
Chunks = Annotated[
    list[int] | None,
    typer.Option("--context-length-estimate", help="Length of a prefill graph; repeatable. Default: 64 and 256."),
]
DraftFolder = Annotated[Path | None, typer.Option(help="Folder of the draft model.")]
MedusaFolder = Annotated[Path | None, typer.Option("--medusa", help="Folder of Medusa heads for the target.")]
TreeFile = Annotated[Path | None, typer.Option("--tree", help="File of their choices; default: the folder's own.")]
EagleFolder = Annotated[Path | None, typer.Option("--eagle", help="Folder of an EAGLE head for the target.")]
GrowthName = Annotated[str | None, typer.Option(help="Of EAGLE drafts: chain (of k), tree:-1,-1,0 or dynamic:16,4,4.")]
Drafted = Annotated[int, typer.Option("--k", help="Drafted tokens per round, not counting the target's own.")]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished text: without its prompt, as text and as ids, and why it ended."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Say the version and leave.")] = False) -> None:
    if version:
        typer.echo(paceline.__version__)
        raise typer.Exit


@app.command()
def generate(
    target: Annotated[Path, typer.Option(help="Folder of the model whose text it is.")],
    draft: DraftFolder = None,
    ngram: Annotated[bool, typer.Option("--ngram", help="Draft from n-grams of the text, without a model.")] = False,
    medusa: MedusaFolder = None,
    tree: TreeFile = None,
    eagle: EagleFolder = None,
    growth: GrowthName = None,
    k: Drafted = 4,
    acceptor: Annotated[str, typer.Option(help="match (exact), reject (exact in law) or typical (LOSSY).")] = "match",
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
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the generation; repeatable.")] = None,
    backend: BackendName = "inductor",
    amp: Amp = "bf16",
    n_positions: Positions = None,
    context_length_estimate: Chunks = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts and times on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")] = False,
) -> None:
    """Continue a text: plainly, or with a draft model, n-grams, Medusa heads or an EAGLE head."""
    with console.refusals():
        text = _prompt(prompt, prompt_file)
        options = Loading(backend, amp, n_positions, context_length_estimate)
        if not temperature and (top_k, top_p, min_p) != (None, None, None):
            console.say(console.err(), "note: greedy decoding ignores top-k, top-p and min-p; set --temperature")
        source, decoders = source_of(target, options, Drafting(k, draft, ngram, medusa, tree, acceptor, eagle, growth))
        tokenizer = load_tokenizer(target)
        ids = tokenizer.encode(text)
        stream = source.stream(
            [ids], max_new_tokens=max_new_tokens, do_sample=temperature > 0, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p, seed=seed, stop_strings=stop, tokenizer=tokenizer,
        )  # fmt: skip
        if backend != "eager":
            progress.compiling(console.err(), decoders, [source.compile])
        begin = perf_counter()
        done = (
            _quiet(stream, tokenizer, ids, total=max_new_tokens)
            if as_json
            else _shown(stream, tokenizer, ids, prompt=text)
        )
        seconds = perf_counter() - begin
    if as_json:
        typer.echo(json.dumps({"prompt": text, **asdict(done), "statistics": source.statistics.to_dict()}))
    if stats:
        console.err().print(console.statistics_table(source.statistics, seconds))


@app.command(name="compile")
def compile_graphs(
    target: Annotated[Path, typer.Argument(help="Folder of the model.")],
    draft: DraftFolder = None,
    medusa: MedusaFolder = None,
    tree: TreeFile = None,
    eagle: EagleFolder = None,
    growth: GrowthName = None,
    k: Drafted = 4,
    batch_size: Annotated[int, typer.Option(help="Slots.")] = 1,
    n_positions: Positions = None,
    context_length_estimate: Chunks = None,
    amp: Amp = "bf16",
    backend: BackendName = "inductor",
    save: Annotated[Path | None, typer.Option(help="Also copy the graphs to this folder, to ship them.")] = None,
) -> None:
    """Make all graphs of a model, or of a pair, ahead of their first use, and keep them in the cache.

    Made are the graphs of plain decoding, those of rounds of k drafted tokens, and the draft's, if there is one.
    """
    with console.refusals():
        options = Loading(backend, amp, n_positions, context_length_estimate, batch_size)
        if backend == "eager":
            if save:
                raise ArtefactError("backend 'eager' compiles nothing, so there is nothing to save; use 'inductor'")
            console.say(console.err(), "backend 'eager' runs steps as they are written: there is nothing to compile")
            return
        source, decoders = source_of(
            target, options, Drafting(k, draft, not (draft or medusa or eagle), medusa, tree, "match", eagle, growth)
        )
        plain = decoders["target"]
        made = progress.compiling(console.err(), decoders, [source.compile, plain.compile])
        if save:
            for decoder in decoders.values():
                decoder.save(save)
    console.out().print(console.graphs_table(made))
    console.say(console.out(), f"cache: {cache_root()}")
    if save:
        console.say(console.out(), f"copied to: {save}")


@app.command()
def bench(
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")],
    prompts: Annotated[Path, typer.Option(help='File of JSON lines, each with a "prompt".')],
    k: Annotated[list[int] | None, typer.Option(help="Drafted tokens per round; repeatable. Default: 2 4 6.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.")] = 128,
    count: Annotated[int, typer.Option(help="How many of the prompts.")] = 6,
    backend: BackendName = "inductor",
    amp: Amp = "bf16",
) -> None:
    """Measure plain and speculative decoding in one run. The last line of stdout is a JSON object."""
    with console.refusals():
        from paceline.bench import bench_pair  # loads much that the other commands do not need

        texts = _prompts(prompts)[:count]
        figures = bench_pair(
            str(target), str(draft), texts, k=tuple(k or (2, 4, 6)), max_new_tokens=max_new_tokens, backend=backend,
            amp=amp,
        )  # fmt: skip
    console.err().print(console.values_table("bench", figures))
    typer.echo(json.dumps(figures))


def _shown(stream: Iterator[Event], tokenizer: Tokenizer, ids: list[int], *, prompt: str) -> Outcome:
    """Write the text while it grows."""
    view = console.TextView(console.out(), tokenizer, ids)
    if console.out().is_terminal:
        console.err().print(view.legend())
        view.prompt(prompt)
    done = _outcome(stream, view.show)
    typer.echo()
    return done


def _quiet(stream: Iterator[Event], tokenizer: Tokenizer, ids: list[int], *, total: int) -> Outcome:
    """Show only how far it is."""
    text = Detokeniser(tokenizer, ids)
    with progress.bar(console.err(), "generating", total) as shown:

        def piece(event: Event) -> str:
            shown.advance(len(event.tokens))
            return "".join(map(text.push, event.tokens)) + (text.flush() if event.finish_reason else "")

        return _outcome(stream, piece)


def _outcome(stream: Iterator[Event], piece: Callable[[Event], str]) -> Outcome:
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
        return text or ""
    return _read(file).removesuffix("\n")


def _prompts(file: Path) -> list[str]:
    try:
        return [str(json.loads(line)["prompt"]) for line in _read(file).splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(f'{file} must hold JSON lines, each with a "prompt" ({error})') from error


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {file}: {error}") from error
