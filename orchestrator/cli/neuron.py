"""`paceline compile`, `cost` and `export-hlo`: the graphs of a model or a pair, ahead of their first use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from paceline.cli import console
from paceline.cli.options import (
    BATCH_SIZE,
    AsJson,
    ConfigFile,
    DraftConfigFile,
    FixedK,
    InstanceName,
    TargetFolder,
    TargetFormat,
    TpDegree,
    checked,
    command,
    load,
    load_draft,
    neuron_instance,
)
from paceline.config import SpeculativeConfig
from paceline.core.errors import ArtefactError, ConfigurationError
from paceline.core.sampling import COMPILED_KINDS, known_kinds
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.environment import cache_root
from paceline.decoder.options import LoadOptions
from paceline.draft_spec import parse_draft

app = typer.Typer()

SamplingMode = Annotated[str, typer.Option(help="Sampling mode: greedy, top-k, full or wide.")]


@command(app, "compile")
def compile_graphs(
    target: TargetFolder,
    config: SpeculativeConfig,
    loader: LoadOptions,
    *,
    sampling: Annotated[
        list[str] | None,
        typer.Option(help="Sampling mode to compile graphs for; repeatable. Default: greedy, top-k and full."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Folder to copy the graphs to, for deployment. Default: only the cache.")
    ] = None,
) -> None:
    """Compile all graphs of a model and its draft before their first use, on a backend that compiles (neuron).

    These are the graphs of plain decoding, those of rounds of k drafted tokens, and those of the draft. Without a
    draft, rounds are compiled for n-grams. CPUs need no such step: native records graphs in milliseconds.
    """
    with console.refusals():
        compiles = BACKENDS[loader.backend].compiles
        if save and not compiles:
            raise ArtefactError(f"--save: expected a backend that compiles graphs, got {loader.backend!r}; omit --save")
        if not config.draft:
            config = config.model_copy(update={"draft": parse_draft("ngram")})
        kinds = known_kinds(sampling or COMPILED_KINDS)
        found = checked(target, loader, config)
        if not compiles:
            console.say(console.err(), f"backend {loader.backend!r} compiles nothing")
            return
        from paceline.generator import SpeculativeGenerator

        generator, decoders = load_draft(load(found), config)
        plain = SpeculativeGenerator(None, generator.target, k=0)
        graphs = console.compiling(
            console.err(), decoders, [partial(one.compile, kinds=kinds) for one in (generator, plain)]
        )
        if save:
            for decoder in decoders.values():
                decoder.save(save)
    console.table("decoder", "graph", "seconds", "", rows=graphs, title="graphs")
    console.say(console.out(), f"cache: {cache_root()}")
    if save:
        console.say(console.out(), f"copied to: {save}")


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """The graph of a round."""

    batch_size: Annotated[int, typer.Option(min=1, help=BATCH_SIZE)] = 1
    used_slots: Annotated[
        int | None,
        typer.Option(min=1, help="Number of slots that the graph computes, from the first on. Default: all."),
    ] = None

    context: Annotated[int, typer.Option(min=1, help="Positions of the cache, all of which a graph reads.")] = 2048
    quantization: TargetFormat = None

    def batch(self) -> int:
        """Number of batch rows, for `RoundSetup.batch`, or ConfigurationError: there are fewer slots."""
        if self.used_slots is not None and self.used_slots > self.batch_size:
            raise ConfigurationError(
                f"--used-slots: expected at most {self.batch_size} (--batch-size), got {self.used_slots}; lower it"
            )
        return self.used_slots or 0


@command(app, "cost")
def cost_of_round(
    *,
    target: Annotated[Path, ConfigFile],
    draft: Annotated[Path | None, DraftConfigFile] = None,
    instance: InstanceName = None,
    tp: TpDegree = 1,
    k: FixedK = 4,
    sampling: SamplingMode = "greedy",
    graph: GraphOptions,
    as_json: AsJson = False,
) -> None:
    """Estimate the time of a speculative round, or of a plain step, on Neuron chips, without weights or a chip."""
    with console.refusals():
        (kind,), batch, machine = known_kinds([sampling]), graph.batch(), neuron_instance(instance)
        from paceline.neuron import chips
        from paceline.neuron.round_cost import round_cost, to_json
        from paceline.neuron.round_graphs import ModelDraft, RoundSetup, read_config, read_draft

        verifier = read_config(target)
        drafts, k = (read_draft(draft, verifier), k) if draft else (ModelDraft(verifier), 0)
        setup = RoundSetup(verifier, drafts, tp, k, kind, slots=graph.batch_size, rows=graph.context)
        found = round_cost(replace(setup, batch=batch, quantization=graph.quantization), machine)
    if as_json:
        typer.echo(to_json(found))
        return
    table = Table(title=f"a round on {machine.name}, tp {tp}, k {k}, {kind}: milliseconds by arithmetic, not measured")
    table.add_column("")
    for column in ("memory", "tensor", "vector", "scalar", "gather"):
        table.add_column(column, justify="right")
    parts, whole, padding = found["parts_ms"], found["round"], found["padding"]
    assert isinstance(parts, dict) and isinstance(whole, dict) and isinstance(padding, dict)
    for name, part in parts.items():
        table.add_row(name, *(f"{value:.3f}" for value in part.values()))
    console.out().print(table)
    for name in ("ideal_ms", "expected_ms", "worst_ms", "sampler_share", "largest_gather"):
        console.say(console.out(), f"{name}: {whole[name]}")
    console.say(console.out(), f"collectives: {sum(one['count'] for one in whole['collectives'])}")
    console.say(console.out(), f"instructions: {whole['instructions']} of {chips.MAX_INSTRUCTIONS.value:.0f}")
    memory = f"{whole['memory_per_core'] / 2**30:.1f} of {machine.memory / 2**30:.0f}"
    console.say(console.out(), f"memory per core: {memory} GiB")
    prefill = found["prefill"]
    assert isinstance(prefill, dict)
    console.say(console.out(), f"prefill: {prefill['expected_ms']} ms for each {prefill['chunk']} tokens of a prompt")
    for side, filled in padding.items():
        for what, (has, computes) in filled.items():
            console.say(console.out(), f"padded with zeros: {has} {what} of the {side} to {computes}")
    for limit in found["over_limits"] if isinstance(found["over_limits"], list) else []:
        console.say(console.out(), f"over the limit: {limit}")


@app.command(name="export-hlo")
def export_graphs(
    folder: Annotated[Path, typer.Argument(help="Folder for the graphs.")],
    *,
    target: Annotated[Path, ConfigFile],
    draft: Annotated[Path, DraftConfigFile],
    instance: InstanceName = None,
    tp: TpDegree = 1,
    k: FixedK = 4,
    sampling: SamplingMode = "greedy",
    max_layers: Annotated[
        int | None, typer.Option(min=1, help="Largest number of layers to export; fewer compile sooner. Default: all.")
    ] = None,
) -> None:
    """Write the graphs of a pair, without weights, and a script that compiles them on any machine.

    By neuronx-cc, HLO modules where torch_xla is installed (`make test-xla` builds such an environment), text
    elsewhere; and for Trainium2 and Trainium3 by TorchNeuron.
    """
    with console.refusals():
        (kind,), machine = known_kinds([sampling]), neuron_instance(instance)
        from paceline.neuron.graph_export import export
        from paceline.neuron.round_graphs import RoundSetup, read_config, read_draft

        verifier = read_config(target)
        setup = RoundSetup(verifier, read_draft(draft, verifier), tp, k, kind)
        found = export(setup, machine, folder, layers=max_layers)
    graphs = found["graphs"]
    assert isinstance(graphs, list)
    for graph in graphs:
        console.say(console.out(), f"{folder / graph['file']}: {graph['operations']} operations, {graph['format']}")
    console.say(console.out(), f"compile them where a compiler is: python {folder / 'compile_graphs.py'}")
