"""Plain against speculative decoding by turns: measured, checked token for token, and shown as tables.

What `demo.py` ends with. Not a benchmark: a few prompts on whatever the machine is doing.
"""

import argparse
import os
import statistics
from dataclasses import dataclass, field
from functools import reduce
from time import perf_counter

from rich.console import Console
from rich.table import Table

from paceline import SpeculativeGenerator, Statistics
from paceline.auto import Sampler
from paceline.cli.console import acceptance_by_position, bar, err, say
from paceline.outputs import GenerationResult


@dataclass
class Prompt:
    """A prompt: the text to show, its ids, and its category."""

    text: str
    ids: list[int]
    category: str = ""


@dataclass
class Measured:
    """One way to decode: seconds of every repetition by prompt, and what it counted in the last one."""

    seconds: list[list[float]] = field(default_factory=list)
    results: list[GenerationResult] = field(default_factory=list)

    @property
    def texts(self) -> list[list[int]]:
        return [result.sequences[0, : int(result.lengths[0])].tolist() for result in self.results]

    def speeds(self, rows: list[int]) -> list[float]:
        """Tokens per second over these prompts, of every repetition."""
        tokens = sum(self.results[row].statistics.new_tokens for row in rows)
        return [tokens / sum(run[row] for row in rows) for run in self.seconds]

    def speed(self, rows: list[int]) -> float:
        return statistics.median(self.speeds(rows))

    def total(self, rows: list[int]) -> Statistics:
        return reduce(Statistics.plus, (self.results[row].statistics for row in rows))


def compare(
    source: Sampler,
    target: Sampler,
    prompts: list[Prompt],
    *,
    console: Console,
    options: argparse.Namespace,
    label: str,
    width: int | None,
) -> int:
    """Measure both, check that they agree, show the tables; the exit status. ``width``: of a chain; None: a tree."""
    plain, fast = Measured(), Measured()
    repetitions = options.repetitions
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    with bar(err(), "measuring, plain and speculative by turns", len(prompts) * 2 * repetitions, still=True) as shown:
        for _ in range(repetitions):
            for sampler, measured in ((target, plain), (source, fast)):
                run(sampler, prompts, measured, max_new_tokens=options.max_new_tokens)
                shown.advance(len(prompts))
        wide = Measured()
        at_width = SpeculativeGenerator(None, target, k=0, verify_width=width)
        run(at_width, prompts, wide, max_new_tokens=options.max_new_tokens)
    console.print(table(plain, fast, options, label))
    if any(prompt.category for prompt in prompts):
        console.print(by_category(plain, fast, [prompt.category for prompt in prompts]))
    narrow = sum(a == b for a, b in zip(plain.texts, fast.texts, strict=True))
    if wide.texts != fast.texts:
        differ = sum(a != b for a, b in zip(wide.texts, fast.texts, strict=True))
        say(console, f"NOT IDENTICAL: {differ} of {len(prompts)} texts differ at width {width or 1}.", style="red")
        return 1
    rows = "one row at a time" if width is None else f"at equal width ({width} rows)"
    say(console, f"Checked: both outputs are identical, token for token, in all {len(prompts)} texts; plain decoding")
    say(console, f"went {rows}. Plain decoding at one row gave the same in {narrow} of {len(prompts)}.")
    every = list(range(len(prompts)))
    if load > 1.5 * cores:
        say(
            console, f"The machine was busy with other work (load {load:.1f} on {cores} cores): speeds here say little."
        )
    elif fast.speed(every) < plain.speed(every):
        say(console, "Speculation does not pay here: its rounds cost more than the tokens they gain.")
    return 0


def run(sampler: Sampler, prompts: list[Prompt], measured: Measured, *, max_new_tokens: int) -> None:
    measured.results, seconds = [], []
    for prompt in prompts:
        begin = perf_counter()
        result = sampler.sample([prompt.ids], max_new_tokens=max_new_tokens, return_dict=True)
        seconds.append(perf_counter() - begin)
        assert isinstance(result, GenerationResult)
        measured.results.append(result)
    measured.seconds.append(seconds)


def table(plain: Measured, fast: Measured, options: argparse.Namespace, label: str) -> Table:
    every = list(range(len(plain.results)))
    new, repetitions = options.max_new_tokens, options.repetitions
    title = f"{len(every)} prompts, up to {new} new tokens, greedy, bf16, median of {repetitions}"
    rows = Table("", "plain", label, title=title)
    both, total = (plain, fast), fast.total(every)
    rows.add_row("tokens/s, prefill included", *(f"{one.speed(every):.0f}" for one in both))
    rows.add_row(
        "slowest to fastest", *(f"{min(one.speeds(every)):.0f} to {max(one.speeds(every)):.0f}" for one in both)
    )
    rows.add_row("speedup", "1", f"{fast.speed(every) / plain.speed(every):.2f}")
    rows.add_row("mean acceptance length (tau)", "1", f"{total.tau:.2f}")
    rows.add_row("accepted by position", "", acceptance_by_position(total))
    return rows


def by_category(plain: Measured, fast: Measured, categories: list[str]) -> Table:
    rows = Table("category", "plain, tokens/s", "speculative", "speedup", "tau")
    for name in dict.fromkeys(categories):
        of = [row for row, category in enumerate(categories) if category == name]
        slow, quick = plain.speed(of), fast.speed(of)
        rows.add_row(name, f"{slow:.0f}", f"{quick:.0f}", f"{quick / slow:.2f}", f"{fast.total(of).tau:.2f}")
    return rows
