"""`paceline bench`: the speed of a pair in every mode, beside transformers. The work is in `paceline.experiments`."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, prompt_files
from paceline.cli.config_options import command
from paceline.cli.load import checked, load_decoder
from paceline.cli.options import LoaderOptions, TargetFolder
from paceline.config import SpeculativeConfig
from paceline.core.errors import PromptError, SamplingError

app = typer.Typer()


@command(app)
def bench(
    target: TargetFolder,
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")],
    prompts: Annotated[Path, typer.Option(help='File of JSON lines, each with a "prompt".')],
    *,
    loader: LoaderOptions,
    k: Annotated[list[int] | None, typer.Option(help="Drafted tokens per round; repeatable. Default: 2 4 6.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.")] = 128,
    count: Annotated[int, typer.Option(help="How many of the prompts, from the first on.")] = 6,
) -> None:
    """Measure plain and speculative decoding in one run. The last line of stdout is a JSON object."""
    with console.refusals():
        texts = prompt_files.prompts(prompts)[: max(0, count)]
        if max_new_tokens < 2:  # the first token comes with the prompt, and there would be no round to measure
            raise SamplingError(f"--max-new-tokens must be at least 2, not {max_new_tokens}")
        if not texts:
            raise PromptError(f"{prompts} holds no prompt to measure with; give JSON lines and a --count of 1 or more")
        lengths = tuple(k or (2, 4, 6))
        for length in lengths:
            checked(target, loader, SpeculativeConfig(draft={"path": str(draft)}, k=length))
        from paceline.experiments.bench import bench_pair  # loads much that the other commands do not need

        load = partial(load_decoder, **asdict(loader))
        figures = bench_pair(target, draft, texts, k=lengths, max_new_tokens=max_new_tokens, load=load)
    console.err().print(console.values_table("bench", figures))
    typer.echo(json.dumps(figures))
