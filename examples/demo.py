"""The demo: two small models complete Python code, then plain and speculative decoding are measured and compared.

Not a benchmark: a few prompts on whatever this machine is doing. `paceline bench` and benchmarks/ are for figures.
Exit status: 1 if speculative decoding gives other tokens than plain decoding at the same width, 2 if it cannot run.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from paceline import AutoDecoder, PacelineError, SpeculativeGenerator, Statistics
from paceline.auto import SamplingDecoder
from paceline.cli.console import TextView, acceptance_by_position, err, out, say
from paceline.cli.progress import bar, compiling, loading
from paceline.generator import Sampler
from paceline.outputs import GenerationResult
from paceline.text.tokenizer import Tokenizer, load_tokenizer

PAIR = Path(__file__).parent / "pycode"
FIRST = 4  # the prompt whose completion is shown


@dataclass
class Measured:
    """One way to decode: tokens per second of every repetition, and what it counted in the last one."""

    speeds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    total: Statistics = field(default_factory=Statistics)

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def main() -> int:
    """Load, stream, measure, compare."""
    parser = argparse.ArgumentParser(description="Plain against speculative decoding with two small code models.")
    modes = ["speculative", "ngram", "medusa", "eagle"]
    parser.add_argument("--mode", choices=modes, default="speculative", help="who drafts")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--prompts", type=positive, default=6, help="how many prompts are measured")
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    parser.add_argument("--repetitions", type=positive, default=3)
    options = parser.parse_args()
    console = out()
    try:
        return demo(console, options)
    except PacelineError as error:
        say(err(), f"error: {error}", style="red")
        return 2


def positive(text: str) -> int:
    """A number of the command line that cannot be 0."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def demo(console: Console, options: argparse.Namespace) -> int:
    """The whole demo; the exit status."""
    prompts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(PAIR / "target")
    decoders = {"target": decoder("target")}
    if options.mode == "speculative":
        decoders["draft"] = decoder("draft")
    drafts: dict[str, object] = {
        "speculative": decoders.get("draft"),
        "ngram": "ngram",
        "medusa": PAIR / "medusa",
        "eagle": PAIR / "eagle3",
    }
    target = decoders["target"]
    k = None if options.mode == "medusa" else options.k  # Medusa's tree says how many tokens it drafts
    source = SpeculativeGenerator(drafts[options.mode], target, k=k)
    say(err(), "Compiling: about a minute the first time on two cores; from then on the graphs are in the cache.")
    graphs = compiling(err(), decoders, [source.compile])
    fresh = [one for one in graphs if one.compiled]
    say(err(), f"{len(graphs)} graphs, {len(fresh)} of them compiled in {sum(one.seconds for one in fresh):.0f} s.")
    stream(console, source, tokenizer, prompt=prompts[FIRST], max_new_tokens=options.max_new_tokens)
    compiling(err(), {"target": target}, [target.compile])
    ids = [tokenizer.encode(text) for text in prompts[: options.prompts]]
    return compare(source, target, ids, console=console, options=options)


def decoder(name: str) -> SamplingDecoder:
    """Load one of the pair; its prompts have up to 128 tokens, so one prefill graph is enough."""
    with loading(err(), PAIR / name) as report:
        return AutoDecoder.from_pretrained(
            PAIR / name, n_positions=512, context_length_estimate=128, amp="bf16", backend="inductor", progress=report
        )


def stream(console: Console, source: Sampler, tokenizer: Tokenizer, *, prompt: str, max_new_tokens: int) -> None:
    """Show one completion as it grows."""
    ids = tokenizer.encode(prompt)
    view = TextView(console, tokenizer, ids, marks=True)
    console.print(f"\n{view.legend()}\n")
    view.prompt(prompt)
    for event in source.stream([ids], max_new_tokens=max_new_tokens):
        view.show(event)
    console.print("\n")


def compare(
    source: Sampler, target: Sampler, prompts: list[list[int]], *, console: Console, options: argparse.Namespace
) -> int:
    """Measure both, check that they agree, show the table; the exit status."""
    plain, fast = Measured(), Measured()
    repetitions = options.repetitions
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    label = "measuring, plain and speculative by turns"
    with bar(err(), label, len(prompts) * 2 * repetitions, still=True) as shown:
        for _ in range(repetitions):
            for sampler, measured in ((target, plain), (source, fast)):
                run(sampler, prompts, measured, max_new_tokens=options.max_new_tokens)
                shown.advance(len(prompts))
        wide = Measured()
        width = None if options.mode == "medusa" else options.k + 1  # a tree has no chain of its width beside it
        run(target, prompts, wide, max_new_tokens=options.max_new_tokens, verify_width=width)
    console.print(table(plain, fast, options))
    narrow = sum(a == b for a, b in zip(plain.texts, fast.texts, strict=True))
    if wide.texts != fast.texts:
        differ = sum(a != b for a, b in zip(wide.texts, fast.texts, strict=True))
        say(console, f"NOT IDENTICAL: {differ} of {len(prompts)} texts differ at width {width or 1}.", style="red")
        return 1
    rows = "one row at a time" if width is None else f"at equal width ({width} rows)"
    say(console, f"Checked: both outputs are identical, token for token, in all {len(prompts)} texts; plain decoding")
    say(console, f"went {rows}. Plain decoding at one row gave the same in {narrow} of {len(prompts)}.")
    if load > 1.5 * cores:
        say(
            console, f"The machine was busy with other work (load {load:.1f} on {cores} cores): speeds here say little."
        )
    elif fast.speed < plain.speed:
        say(console, "Speculation does not pay here: its rounds cost more than the tokens they gain.")
    return 0


def run(
    sampler: Sampler,
    prompts: list[list[int]],
    measured: Measured,
    *,
    max_new_tokens: int,
    verify_width: int | None = None,
) -> None:
    """Decode all prompts once, greedily."""
    measured.texts, measured.total = [], Statistics()
    begin = perf_counter()
    for ids in prompts:
        result = sampler.sample([ids], max_new_tokens=max_new_tokens, verify_width=verify_width, return_dict=True)
        assert isinstance(result, GenerationResult)
        measured.texts.append(result.sequences[0].tolist())
        add(measured.total, result.statistics)
    measured.speeds.append(measured.total.new_tokens / (perf_counter() - begin))


def add(total: Statistics, one: Statistics) -> None:
    """Add the counts of one call."""
    for name in ("num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "new_tokens"):
        setattr(total, name, getattr(total, name) + getattr(one, name))
    for name in ("num_draft_tokens_per_pos", "num_accepted_tokens_per_pos"):
        sums = zip_longest(getattr(total, name), getattr(one, name), fillvalue=0)
        setattr(total, name, [before + now for before, now in sums])


def table(plain: Measured, fast: Measured, options: argparse.Namespace) -> Table:
    """Both, side by side."""
    title = (
        f"{options.prompts} prompts, {options.max_new_tokens} new tokens, greedy, bf16, median of {options.repetitions}"
    )
    label = "medusa" if options.mode == "medusa" else f"{options.mode}, k = {options.k}"
    rows = Table("", "plain", label, title=title)
    rows.add_row("tokens/s, prefill included", *(f"{one.speed:.0f}" for one in (plain, fast)))
    rows.add_row("slowest to fastest", *(f"{min(one.speeds):.0f} to {max(one.speeds):.0f}" for one in (plain, fast)))
    rows.add_row("speed-up", "1", f"{fast.speed / plain.speed:.2f}")
    rows.add_row("mean acceptance length (tau)", "1", f"{fast.total.tau:.2f}")
    rows.add_row("accepted by position", "", acceptance_by_position(fast.total))
    return rows


if __name__ == "__main__":
    sys.exit(main())
