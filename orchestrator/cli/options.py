"""Options that several commands share, each declared once. What they mean is in `paceline.cli.load`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Amp = Annotated[str, typer.Option(help="Number format of weights and cache: bf16, f16 or f32.")]
BackendName = Annotated[str, typer.Option("--backend", help="inductor (compiled, CPU), eager, xla or neuron.")]
TpDegree = Annotated[
    int, typer.Option(help="Tensor parallelism: ranks each model is divided over; above 1 with eager and neuron.")
]
GroupQueryAttention = Annotated[
    str | None,
    typer.Option(help="K/V heads of divided models: shard-over-heads, replicated-heads or all-gather-heads."),
]
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
Depths = Annotated[
    str | None,
    typer.Option(
        "--k",
        help="Drafted tokens per round, not counting the target's own: a number, or depths to choose among in every "
        "round, such as 0,2,4, or auto (0,1,2,4,8). Default: 4, or what the tree of heads says.",
    ),
]
Confidence = Annotated[
    float, typer.Option(help="The draft model stops where its largest probability falls below this; 0: never.")
]
VocabularyName = Annotated[
    str, typer.Option("--vocabulary", help="same; or intersection, re-encoding: the draft has another tokenizer.")
]
Exact = Annotated[
    bool, typer.Option("--exact/--no-exact", help="No rounding depends on what was drafted (matters to eager).")
]
FusedOrNot = Annotated[
    bool | None,
    typer.Option("--fused/--no-fused", help="Draft and verify in one graph; default: where it can be done."),
]
