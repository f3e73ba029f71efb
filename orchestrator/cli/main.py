"""The command line: `paceline compile`, `paceline bench`, and all other commands gathered from their modules.

Results go to stdout, the rest to stderr. Shared options are in `paceline.cli.options`, what is shown in
`paceline.cli.console`, waiting in `paceline.cli.progress`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import paceline
from paceline.cli import (
    console,
    diagnostics,
    generate,
    medusa_tree,
    options,
    plan,
    progress,
    prompt_files,
    serve,
    train,
    train_eagle,
)
from paceline.cli.load import Drafting, Loading, source_of
from paceline.core.errors import ArtefactError, PromptError, SamplingError
from paceline.decoder.environment import cache_root

app = typer.Typer(
    cls=console.Commands,
    help="Decode with several models at once: small models set the pace, the big one decides.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(train.app, name="train")
diagnostics.register(app)
app.registered_commands += generate.app.registered_commands
app.registered_commands += medusa_tree.app.registered_commands
app.registered_commands += train_eagle.files.registered_commands
train.app.registered_commands += train_eagle.app.registered_commands

plan.register(app)
serve.register(app)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Say the version and leave.")] = False) -> None:
    if version:
        typer.echo(paceline.__version__)
        raise typer.Exit


@app.command(name="compile")
def compile_graphs(
    target: Annotated[Path, typer.Argument(help="Folder of the model.")],
    draft: options.DraftFolder = None,
    medusa: options.MedusaFolder = None,
    tree: options.TreeFile = None,
    eagle: options.EagleFolder = None,
    growth: options.GrowthName = None,
    k: options.Depths = None,
    batch_size: Annotated[int, typer.Option(help="Slots.")] = 1,
    n_positions: options.Positions = None,
    context_length_estimate: options.Chunks = None,
    amp: options.Amp = "bf16",
    backend: options.BackendName = "inductor",
    tp_degree: options.TpDegree = 1,
    group_query_attention: options.GroupQueryAttention = None,
    save: Annotated[Path | None, typer.Option(help="Also copy the graphs to this folder, to ship them.")] = None,
) -> None:
    """Make all graphs of a model, or of a pair, ahead of their first use, and keep them in the cache.

    Made are the graphs of plain decoding, those of rounds of k drafted tokens, and the draft's, if there is one.
    """
    with console.refusals():
        loading = Loading(
            backend, amp, n_positions, context_length_estimate, batch_size, tp_degree, group_query_attention
        )
        if backend == "eager" and save:
            raise ArtefactError("backend 'eager' compiles nothing, so there is nothing to save; use 'inductor'")
        source, decoders = source_of(
            target, loading, Drafting(k, draft, not (draft or medusa or eagle), medusa, tree, "match", eagle, growth)
        )
        if backend == "eager":
            console.say(console.err(), "backend 'eager' runs steps as they are written: there is nothing to compile")
            return
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
    count: Annotated[int, typer.Option(help="How many of the prompts, from the first on.")] = 6,
    backend: options.BackendName = "inductor",
    amp: options.Amp = "bf16",
    tp_degree: options.TpDegree = 1,
    group_query_attention: options.GroupQueryAttention = None,
) -> None:
    """Measure plain and speculative decoding in one run. The last line of stdout is a JSON object."""
    with console.refusals():
        from paceline.experiments.bench import bench_pair  # loads much that the other commands do not need

        texts = prompt_files.prompts(prompts)[: max(0, count)]
        if max_new_tokens < 2:  # the first token comes with the prompt, and there would be no round to measure
            raise SamplingError(f"--max-new-tokens must be at least 2, not {max_new_tokens}")
        if not texts:
            raise PromptError(f"{prompts} holds no prompt to measure with; give JSON lines and a --count of 1 or more")
        figures = bench_pair(
            str(target), str(draft), texts, k=tuple(k or (2, 4, 6)), max_new_tokens=max_new_tokens,
            loading=Loading(backend, amp, tp_degree=tp_degree, group_query_attention=group_query_attention),
        )  # fmt: skip
    console.err().print(console.values_table("bench", figures))
    typer.echo(json.dumps(figures))
