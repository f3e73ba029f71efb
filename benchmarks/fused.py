"""Fused rounds, lists of drafters and adaptive depth, as ratios measured in one run. JSON on the last line.

    python benchmarks/fused.py --part pair                 the demo pair: plain, two steps and fused
    python benchmarks/fused.py --part 30m --alpha 0.6      random weights, target of 30M and draft of 8M
    python benchmarks/fused.py --part 110m --alpha 0.8     the same with a target of 110M
    python benchmarks/fused.py --part copy                 a file to be repeated with an edit, lists of drafters
    python benchmarks/fused.py --part copier               the same with a target that is made to copy
    python benchmarks/fused.py --part useless              adaptive depth with a draft that is always wrong
    python benchmarks/fused.py --part good                 adaptive depth with the demo draft, and every fixed k

Give --k to choose depths (repeatable) and --tiny to see that a part starts. With --alpha pair, copy, 30m and 110m
simulate acceptance: each draft stands with that probability, whatever the models say, so that speed can be told from
quality; without, pair and copy decode real text. Modes take turns on every prompt, and a mode's figure is the sum over
prompts of the median over turns. Times are of rounds, without prompts and without what a call takes besides (call_us).
Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import PAIR, prompt_ids, publish
from copies import copier, copies
from transformers import LlamaConfig, LlamaForCausalLM
from turns import Mode, measure

from paceline import DRAFT_LENGTHS, AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder

POSITIONS = 512

# Width, layers, heads, width of the MLP and vocabulary of target and draft.
SHAPES = {
    "30m": ((512, 8, 8, 1376, 8192), (256, 5, 4, 688, 8192)),
    "110m": ((768, 12, 12, 2048, 16384), (192, 4, 3, 512, 16384)),
    "tiny": ((64, 2, 2, 96, 512), (32, 1, 2, 48, 512)),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. ``alpha`` None: acceptance is what it is."""

    alpha: float | None
    depths: tuple[int, ...]
    new: int
    count: int
    repeats: int
    backend: str
    tiny: bool


def rounds(
    draft: SamplingDecoder, target: SamplingDecoder, prompts: list[list[int]], options: Options
) -> dict[str, object]:
    """Plain, two steps and fused at every depth, and the speed-up that the formula gives from the graphs' times.

    E = (1 - alpha^(k + 1)) / (1 - alpha) tokens a round (arXiv 2211.17192, section 3), or as many as were counted,
    times the time of a plain step over that of a round.
    """
    modes = {"plain": Mode(SpeculativeGenerator(None, target, k=0))}
    for k in options.depths:
        for name, fused in (("two steps", False), ("fused", True)):
            generator = SpeculativeGenerator(draft, target, k=k, fused=fused, synthetic_acceptance=options.alpha)
            modes[f"{name} k={k}"] = Mode(generator)
    measure(modes, prompts, new=options.new, repeats=options.repeats)
    plain, report = modes["plain"], {name: mode.summary(modes["plain"]) for name, mode in modes.items()}
    step = plain.total("inside") / plain.total("rounds")
    for name, mode in modes.items():
        if mode is plain:
            continue
        k, alpha = int(name.split("=")[1]), options.alpha
        counted = mode.total("tokens") / mode.total("rounds")
        expected = counted if alpha is None else k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
        formula = expected * step * mode.total("rounds") / mode.total("inside")
        report[name] |= {
            "formula": round(formula, 3),
            "of_formula": round(mode.speed() / plain.speed() / formula, 3),
            # The same with the tokens that this run's coins gave, which over few rounds are not quite those expected.
            "of_formula_as_counted": round(mode.speed() / plain.speed() / (formula * counted / expected), 3),
        }
    for k in options.depths:
        two, one = (modes[f"{name} k={k}"] for name in ("two steps", "fused"))
        saved = two.total("seconds") / two.total("rounds") - one.total("seconds") / one.total("rounds")
        report[f"fused k={k}"]["saved_us_a_round"] = round(1e6 * saved, 1)
    return {"alpha": options.alpha, "modes": report}


def pair(options: Options) -> dict[str, object]:
    """The demo pair."""
    draft, target = demo(options)
    return rounds(draft, target, prompt_ids(options.count), options)


def shape(name: str) -> Callable[[Options], dict[str, object]]:
    """Random weights; acceptance has to be simulated."""

    def part(options: Options) -> dict[str, object]:
        if options.alpha is None:
            raise SystemExit("random weights agree on nothing: give --alpha")
        draft, target = random_pair("tiny" if options.tiny else name, options)
        torch.manual_seed(1)
        prompts = torch.randint(1, 500, (options.count, 32)).tolist()
        return rounds(draft, target, prompts, options)

    return part


def copying(options: Options) -> dict[str, object]:
    """The demo pair, whose target does not copy reliably. With ``alpha`` a draft stands with that probability."""
    draft, target = demo(options)
    return lists(draft, target, copies(options.count).prompts, options)


def copied(options: Options) -> dict[str, object]:
    """A target that writes what the copy asks for, with the demo draft, which knows nothing of that."""
    asks = copies(options.count)
    with tempfile.TemporaryDirectory() as folder:
        copier(asks, Path(folder))
        target = AutoDecoder.from_pretrained(folder, n_positions=POSITIONS, backend=options.backend)
    return lists(demo(options)[0], target, asks.prompts, options)


def lists(
    draft: SamplingDecoder, target: SamplingDecoder, prompts: list[list[int]], options: Options
) -> dict[str, object]:
    """Drafters one by one and in lists, up to the largest depth."""
    k = max(options.depths)
    few = min(3, k)
    drafts: dict[str, object] = {
        "draft": draft,
        "suffix": "suffix",
        "suffix, draft": ["suffix", draft],
        f"suffix, draft of {few}": ["suffix", (draft, few)],
        "ngram, draft": ["ngram", draft],
    }
    modes = {"plain": Mode(SpeculativeGenerator(None, target, k=0))}
    for name, one in drafts.items():
        modes[name] = Mode(SpeculativeGenerator(one, target, k=k, synthetic_acceptance=options.alpha))
    measure(modes, prompts, new=min(options.new, 120), repeats=options.repeats)
    return {"k": k, "alpha": options.alpha, "modes": {name: m.summary(modes["plain"]) for name, m in modes.items()}}


def useless(options: Options) -> dict[str, object]:
    """Drafts of random weights, which never stand: what it costs to find that out and to try again now and then."""
    draft, target = random_pair("tiny" if options.tiny else "30m", options)
    torch.manual_seed(1)
    prompts = torch.randint(1, 500, (options.count, 32)).tolist()
    return adaptive(draft, target, prompts, options, fixed=())


def good(options: Options) -> dict[str, object]:
    """The demo pair on real text, against every depth of the ladder by itself."""
    draft, target = demo(options)
    return adaptive(
        draft,
        target,
        prompt_ids(options.count),
        options,
        fixed=DRAFT_LENGTHS[1:3] if options.tiny else DRAFT_LENGTHS[1:],
    )


def adaptive(
    draft: SamplingDecoder, target: SamplingDecoder, prompts: list[list[int]], options: Options, *, fixed: Sequence[int]
) -> dict[str, object]:
    """The ladder against plain decoding and fixed depths. It learns on the first prompt, which does not count."""
    ladder = (0, *fixed) if options.tiny and fixed else DRAFT_LENGTHS
    modes = {"plain": Mode(SpeculativeGenerator(None, target, k=0))}
    modes |= {f"k={k}": Mode(SpeculativeGenerator(draft, target, k=k)) for k in fixed}
    modes["adaptive"] = Mode(SpeculativeGenerator(draft, target, k=ladder))
    measure(modes, prompts, new=options.new, repeats=options.repeats)
    speed = modes["adaptive"].speed()
    report: dict[str, object] = {"adaptive_over_plain": round(speed / modes["plain"].speed(), 3)}
    if fixed:
        report["adaptive_over_best_fixed"] = round(speed / max(modes[f"k={k}"].speed() for k in fixed), 3)
    return {**report, "modes": {name: mode.summary(modes["plain"]) for name, mode in modes.items()}}


def demo(options: Options) -> tuple[SamplingDecoder, SamplingDecoder]:
    draft, target = (
        AutoDecoder.from_pretrained(PAIR / name, n_positions=POSITIONS, backend=options.backend)
        for name in ("draft", "target")
    )
    return draft, target


def random_pair(name: str, options: Options) -> tuple[SamplingDecoder, SamplingDecoder]:
    """Draft and target of a row of SHAPES."""
    decoders = []
    for number, (width, layers, heads, mlp, vocabulary) in enumerate(reversed(SHAPES[name])):
        torch.manual_seed(number)
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads, intermediate_size=mlp, max_position_embeddings=POSITIONS, eos_token_id=None,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
            decoders.append(AutoDecoder.from_pretrained(folder, context_length_estimate=64, backend=options.backend))
    return decoders[0], decoders[1]


PARTS: dict[str, Callable[[Options], dict[str, object]]] = {
    "pair": pair,
    "30m": shape("30m"),
    "110m": shape("110m"),
    "copy": copying,
    "copier": copied,
    "useless": useless,
    "good": good,
}


def main() -> None:
    """Run one part."""
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--k", type=int, action="append")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    depths = tuple(arguments.k or (2, 4, 8))
    options = Options(arguments.alpha, depths, arguments.new, arguments.count, arguments.repeats, "native", tiny=False)
    if arguments.tiny:
        options = Options(arguments.alpha, tuple(arguments.k or (2,)), 12, 1, 1, "eager", tiny=True)
    publish({"part": arguments.part, **PARTS[arguments.part](options)})


if __name__ == "__main__":
    main()
