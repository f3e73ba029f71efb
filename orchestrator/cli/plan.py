"""`paceline plan`: models of a file on the cores of an instance, as a table and a picture, or as JSON."""

from __future__ import annotations

import json

import typer
from rich.table import Table

from paceline.cli import console
from paceline.cli.options import AsJson, InstanceName, ModelsFile
from paceline.placement import Plan, plan, read_fault_policy, read_models
from paceline.placement.planning.detect import instance_named
from paceline.placement.planning.render_plan import marks, render_plan

_MIB = 1 << 20


app = typer.Typer()


@app.command(name="plan")
def plan_models(models: ModelsFile, instance: InstanceName = None, as_json: AsJson = False) -> None:
    """Put the models of a file on the cores of an instance. Starts nothing. Exit status 2 if there is no plan."""
    with console.refusals():
        planned = plan(read_models(models), instance_named(instance))
        read_fault_policy(models)  # nothing is started here, but errors in the file show now
    if as_json:
        typer.echo(json.dumps(planned.to_dict()))
        return
    console.out().print(plan_table(planned))
    console.say(console.out(), render_plan(planned))
    left = planned.fragmentation
    runs = ", ".join(f"{count} of {degree}" for degree, count in left.runs if count)
    console.say(console.out(), f"\nfree: {left.free} cores" + (f"; aligned runs: {runs}" if runs else ""))


def plan_table(planned: Plan) -> Table:
    """One line for each process."""
    table = Table(title=f"plan for {planned.instance.name}", title_justify="left")
    for column in ("", "model", "role", "cores", "tp", "MiB/core", "of", "CPUs"):
        table.add_column(column, justify="right" if column in ("tp", "MiB/core", "of") else "left")
    letters = marks(planned)
    for item in planned.placements:
        role = item.role if not item.drafts_for else "drafts for " + ", ".join(name for name, _ in item.drafts_for)
        size, limit = item.footprint.total / _MIB, planned.instance.memory / _MIB
        table.add_row(
            letters[item.label], item.label, role, str(item.cores), str(len(item.cores)),
            f"{size:.0f}", f"{limit:.0f}", "-".join(map(str, item.affinity)),
        )  # fmt: skip
    return table
