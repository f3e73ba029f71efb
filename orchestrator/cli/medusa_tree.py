"""`paceline medusa-tree` and `paceline convert-medusa`: trees for Medusa heads, and their file formats."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, progress, prompt_files
from paceline.cli.config_options import command
from paceline.cli.options import TargetFolder
from paceline.cli.train import results, token_stream
from paceline.core.errors import ConfigurationError, PromptError
from paceline.outputs import GenerationResult
from paceline.text.tokenizer import load_tokenizer, prompt_ids

if TYPE_CHECKING:
    from paceline.auto import SamplingDecoder
    from paceline.medusa import search
    from paceline.medusa.drafter import MedusaDrafter

_PROMPT = 64  # tokens of a prompt that is cut out of data


app = typer.Typer()


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The tree, and the texts that it is searched and checked on."""

    nodes: int = field(default=64, metadata={"help": "Nodes of the tree."})
    prompts: Path | None = field(default=None, metadata={"help": 'JSON lines, each with a "prompt", to measure on.'})
    data: tuple[Path, ...] | None = field(
        default=None, metadata={"help": "Or text to cut prompts from, or .bin; repeatable."}
    )
    data_dtype: str | None = field(
        default=None, metadata={"help": "Of the ids in .bin files that have no header: uint16 or uint32."}
    )
    eval_samples: int = field(default=48, metadata={"help": "How many texts."})
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens of a text."})

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.max_new_tokens < 1:
            raise ConfigurationError(
                f"--nodes {self.nodes} and --max-new-tokens {self.max_new_tokens} must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How the target is loaded."""

    backend: str = field(default="native", metadata={"help": "native (native kernels, CPU) or eager."})
    amp: str = field(default="bf16", metadata={"help": "Number format of weights and cache: bf16, f16 or f32."})


@command(app, "medusa-tree")
def medusa_tree(
    target: TargetFolder,
    heads: Annotated[Path, typer.Option(help="Folder of the heads.")],
    out: Annotated[Path, typer.Option(help="File for the choices.")],
    *,
    tree: TreeOptions,
    loader: BackendOptions,
) -> None:
    """Build the best tree of so many nodes for the accuracy of heads, measured on the target's own greedy text.

    Half of the texts are for the search. The other half is decoded with the tree, to see whether the expectation
    holds. The last line of stdout is a JSON object with both.
    """
    with console.refusals():
        if out.is_dir():
            raise ConfigurationError(f"{out} is a folder; give a file for the choices")
        rows = _prompts(target, tree) if tree.eval_samples > 1 else []
        if len(rows) < 2:
            raise ConfigurationError("give at least two texts: one half to search with, one half to check on")
        results(out.parent)
        from paceline.auto import AutoDecoder
        from paceline.medusa.drafter import MedusaDrafter

        length = tree.max_new_tokens
        with progress.loading(console.err(), target) as report:
            decoder = AutoDecoder.from_pretrained(
                target,
                n_positions=max(map(len, rows)) + length,
                amp=loader.amp,
                backend=loader.backend,
                progress=report,
            )
        searched, checked = rows[::2], rows[1::2]
        best, independent = _search(decoder, target, heads, rows=searched, nodes=tree.nodes, length=length)
        best.choices.write(out)
        drafter = MedusaDrafter.from_pretrained(heads, decoder, tree=best.choices)
        taus = _run(decoder, drafter, checked, length=length)
    figures = {
        "nodes": len(best.choices),
        "depth": best.choices.depth,
        "expected_tau": round(best.tau, 3),
        "expected_tau_if_heads_were_independent": round(1 + independent, 3),
        "measured_tau": round(statistics.fmean(taus), 3),
        "standard_error": round(statistics.stdev(taus) / len(taus) ** 0.5, 3) if len(taus) > 1 else None,
        "texts": [len(searched), len(checked)],
    }
    console.err().print(console.values_table("tree", figures))
    typer.echo(json.dumps(figures))


@app.command(name="convert-medusa")
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of Medusa heads, in any layout.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    target: Annotated[Path, typer.Option(help="Folder of the target the heads are for.")],
    layout: Annotated[str, typer.Option(help="paceline, medusa or nxd.")] = "paceline",
) -> None:
    """Rewrite Medusa heads in another layout: ours, that of Medusa's own code, or that of NxD Inference."""
    with console.refusals():
        from paceline.medusa import checkpoint
        from paceline.training.frozen_model import FrozenTarget

        path = checkpoint.convert(source, results(out), layout=layout, output=FrozenTarget(target).output.detach())
    console.say(console.out(), str(path))


def _search(
    decoder: SamplingDecoder, target: Path, medusa: Path, *, rows: list[list[int]], nodes: int, length: int
) -> tuple[search.Found, float]:
    """The tree, and what a search with independent heads would expect of it."""
    import torch

    from paceline.medusa import accuracy, checkpoint, search
    from paceline.training.features import Windows
    from paceline.training.frozen_model import FrozenTarget

    frozen = FrozenTarget(target)
    heads = checkpoint.heads(medusa, frozen.output, torch.float32)
    windows = []
    with progress.bar(console.err(), "measuring the heads", len(rows)) as shown:
        for row in rows:
            text = decoder.sample([row], max_new_tokens=length)
            assert isinstance(text, torch.Tensor)
            windows.append(Windows(text, frozen.states(text), len(row) - 1))
            shown.advance()
    measured = accuracy.measure(heads, windows, frozen.output.detach())
    best = search.best(search.by_places(measured.ranks, top=accuracy.TOP), nodes)
    return best, search.expected(best.choices, search.by_heads(measured.top()))


def _run(decoder: SamplingDecoder, drafter: MedusaDrafter, rows: list[list[int]], *, length: int) -> list[float]:
    """Tokens a round of every text, decoded with the tree."""
    from paceline.generator import SpeculativeGenerator

    generator = SpeculativeGenerator(drafter, decoder)
    taus = []
    with progress.bar(console.err(), "decoding with the tree", len(rows)) as shown:
        for row in rows:
            result = generator.sample([row], max_new_tokens=length, return_dict=True)
            assert isinstance(result, GenerationResult)
            taus.append(result.statistics.tau)
            shown.advance()
    return taus


def _prompts(target: Path, tree: TreeOptions) -> list[list[int]]:
    if (tree.prompts is None) == (not tree.data):
        raise PromptError("give texts to measure on with --prompts or with --data, one of them")
    if tree.prompts is None:
        from paceline.training.data import cut

        stream = token_stream(list(tree.data or ()), target, dtype=tree.data_dtype)
        return [[int(token) for token in row] for row in cut(stream, tree.eval_samples, _PROMPT, seed=1).tolist()]
    tokenizer = load_tokenizer(target)
    texts = prompt_files.prompts(tree.prompts)[: tree.eval_samples]
    return [prompt_ids(tokenizer, text, f"prompt {index} of {tree.prompts}") for index, text in enumerate(texts, 1)]
