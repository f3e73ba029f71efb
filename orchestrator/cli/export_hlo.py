"""`paceline export-hlo`: the graphs of a pair at real size as files for the Neuron compiler on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.core.sampling import known_kinds
from paceline.placement.planning.detect import instance_named

app = typer.Typer()


@app.command(name="export-hlo")
def export_graphs(
    folder: Annotated[Path, typer.Argument(help="Where the graphs go.")],
    *,
    target: Annotated[Path, typer.Option(help="config.json of the target, or a folder with one.")],
    draft: Annotated[Path, typer.Option(help="config.json of the draft model or EAGLE head, or a folder with one.")],
    instance: Annotated[str, typer.Option(help="Instance type of the inf2, trn1 or trn2 family.")] = "inf2.48xlarge",
    tp: Annotated[int, typer.Option(min=1, help="Cores that both models are divided over.")] = 8,
    k: Annotated[int, typer.Option(min=1, help="Drafted tokens a round.")] = 4,
    sampling: Annotated[str, typer.Option(help="Kind of sampling: greedy, top-k, full or wide.")] = "greedy",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers at most; fewer compile sooner.")] = None,
) -> None:
    """Write the graphs of a pair, without weights, and a script that compiles them with neuronx-cc without a chip.

    HLO modules where torch_xla is installed (`make test-xla` builds such an environment), text elsewhere.
    """
    with console.refusals():
        (kind,), machine = known_kinds([sampling]), instance_named(instance)
        from paceline.diagnostics.graph_export import export
        from paceline.diagnostics.round_graphs import RoundSetup, read_config, read_draft

        verifier = read_config(target)
        setup = RoundSetup(verifier, read_draft(draft, verifier), tp, k, kind)
        found = export(setup, machine, folder, layers=layers)
    graphs = found["graphs"]
    assert isinstance(graphs, list)
    for graph in graphs:
        console.say(console.out(), f"{folder / graph['file']}: {graph['operations']} operations, {graph['format']}")
    console.say(console.out(), f"compile them where neuronx-cc is: python {folder / 'compile_graphs.py'}")
