"""`paceline compile`: the graphs of a model or of a pair, ahead of their first use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, progress
from paceline.cli.config_options import command
from paceline.cli.load import checked, load_generator
from paceline.cli.options import LoaderOptions
from paceline.config import SpeculativeConfig
from paceline.core.errors import ArtefactError
from paceline.core.sampling import COMPILED_KINDS, known_kinds
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.environment import cache_root
from paceline.draft_spec import parse_draft

app = typer.Typer()


@command(app, "compile")
def compile_graphs(
    target: Annotated[Path, typer.Argument(help="Folder of the model.")],
    config: SpeculativeConfig,
    loader: LoaderOptions,
    *,
    sampling: Annotated[
        list[str] | None,
        typer.Option(help="Kind of sampling, where graphs differ by it; repeatable. Default: greedy, top-k and full."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Also copy the graphs to this folder, to ship them.")] = None,
) -> None:
    """Compile all graphs of a model and its draft ahead of their first use, on a backend that compiles (neuron).

    These are the graphs of plain decoding, those of rounds of k drafted tokens, and those of the draft. Without a
    draft, rounds are compiled for n-grams. CPUs need no such step: native records graphs in milliseconds.
    """
    with console.refusals():
        compiles = BACKENDS[loader.backend].compiles
        if save and not compiles:
            raise ArtefactError(f"--save: backend {loader.backend!r} compiles nothing, so there is nothing to save")
        if not config.draft:
            config = config.model_copy(update={"draft": parse_draft("ngram")})
        kinds = known_kinds(sampling or COMPILED_KINDS)
        found = checked(target, loader, config)
        if not compiles:
            console.say(console.err(), f"backend {loader.backend!r} compiles nothing")
            return
        from paceline.generator import SpeculativeGenerator

        generator, decoders = load_generator(found, config)
        plain = SpeculativeGenerator(None, generator.target, k=0)
        graphs = progress.compiling(
            console.err(), decoders, [partial(one.compile, kinds=kinds) for one in (generator, plain)]
        )
        if save:
            for decoder in decoders.values():
                decoder.save(save)
    console.out().print(console.graphs_table(graphs))
    console.say(console.out(), f"cache: {cache_root()}")
    if save:
        console.say(console.out(), f"copied to: {save}")
