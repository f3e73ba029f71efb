"""`paceline cost`: what a round of a pair would cost on Neuron, from its graphs at real size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from paceline.cli import console
from paceline.cli.config_options import command
from paceline.cli.options import AsJson
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import known_kinds
from paceline.placement.planning.detect import instance_named

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """The graph of a round."""

    batch_size: Annotated[int, typer.Option(min=1, help="Slots of the cache.")] = 1
    used_slots: Annotated[
        int | None, typer.Option(min=1, help="Slots that the graph computes, the first ones; default: all.")
    ] = None
    rounds: Annotated[int, typer.Option(min=1, max=32, help="Rounds that share a graph (PACELINE_NEURON_ROUNDS).")] = 1

    def lines(self) -> int:
        """As `RoundSetup.lines`.

        Raises:
            ConfigurationError: there are not so many slots.
        """
        if self.used_slots is not None and self.used_slots > self.batch_size:
            raise ConfigurationError(f"--used-slots {self.used_slots}: there are {self.batch_size} (--batch-size)")
        return self.used_slots or 0


@command(app, "cost")
def cost_of_round(
    *,
    target: Annotated[Path, typer.Option(help="config.json of the target, or a folder with one.")],
    draft: Annotated[Path, typer.Option(help="config.json of the draft model or EAGLE head, or a folder with one.")],
    instance: Annotated[str, typer.Option(help="Instance type of the inf2 or trn1 family.")] = "inf2.48xlarge",
    tp: Annotated[int, typer.Option(help="Cores that both models are divided over.")] = 8,
    k: Annotated[int, typer.Option(min=1, help="Drafted tokens a round.")] = 4,
    sampling: Annotated[str, typer.Option(help="Kind of sampling: greedy, top-k, full or wide.")] = "greedy",
    graph: GraphOptions,
    as_json: AsJson = False,
) -> None:
    """Estimate a round of speculation on Inferentia2 or Trainium1 by arithmetic. No weights and no chip are needed."""
    with console.refusals():
        (kind,), lines, machine = known_kinds([sampling]), graph.lines(), instance_named(instance)
        from paceline.diagnostics.round_cost import round_cost, to_json
        from paceline.diagnostics.round_graphs import RoundSetup, read_config, read_draft

        verifier = read_config(target)
        setup = RoundSetup(verifier, read_draft(draft, verifier), tp, k, kind, slots=graph.batch_size)
        found = round_cost(replace(setup, lines=lines), machine, rounds=graph.rounds)
    if as_json:
        typer.echo(to_json(found))
        return
    table = Table(title=f"a round on {instance}, tp {tp}, k {k}, {kind}: milliseconds by arithmetic, not measured")
    table.add_column("")
    for column in ("memory", "tensor", "vector", "scalar", "gather"):
        table.add_column(column, justify="right")
    parts, whole, padding = found["parts_ms"], found["round"], found["padding"]
    assert isinstance(parts, dict) and isinstance(whole, dict) and isinstance(padding, dict)
    for name, part in parts.items():
        table.add_row(name, *(f"{value:.3f}" for value in part.values()))
    console.out().print(table)
    for name in ("ideal_ms", "expected_ms", "worst_ms", "sampler_share", "largest_gather", "instructions"):
        console.say(console.out(), f"{name}: {whole[name]}")
    for side, filled in padding.items():
        for what, (has, computes) in filled.items():
            console.say(console.out(), f"filled up with zeros: {has} {what} of the {side} to {computes}")
    for limit in found["over_limits"] if isinstance(found["over_limits"], list) else []:
        console.say(console.out(), f"over the limit: {limit}")
