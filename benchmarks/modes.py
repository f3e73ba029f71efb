"""Every way to decode with the demo target, in one table: tokens a round, time of a round, speed. JSON comes last.

    python benchmarks/modes.py                                           all that is listed below, greedy
    python benchmarks/modes.py --temperature 1                           sampled
    python benchmarks/modes.py --modes "plain; pair 3; medusa tree-8" --prompts 4 --repeats 2

A mode is one of

    plain                    the target alone
    ngram K, suffix K        drafts without a model
    pair K, fused K          the draft model, in two graphs or in one with the target
    pair K reject            the same under rejection sampling, which gives other tokens of the same law
    medusa FILE              the heads of examples/pycode/medusa with a tree of that folder
    FOLDER TREE              the EAGLE heads of a folder of examples/pycode: "eagle3 chain:3", "eagle3 dynamic:8,4,3"

Every mode takes its turn on every prompt; a figure is the median of the repeats. Texts are compared with those of the
first mode: one that gives other tokens is counted. Nothing else should run on the machine. Compiling (15 to 40 seconds
a mode, once) is not measured.
"""

from __future__ import annotations

import argparse

from common import PAIR, prompt_ids, publish

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.experiments.bench import Mode, generator_run, take_turns

MODES = (
    "plain; ngram 4; suffix 4; fused 2; fused 3; fused 4; pair 2; pair 3; "
    "eagle3 chain:1; eagle3 chain:2; eagle3 chain:3; eagle3 dynamic:4,3,2; eagle3 dynamic:8,4,3; "
    "medusa tree-2; medusa tree-8"
)


def generator(name: str, target: SamplingDecoder, draft: SamplingDecoder) -> SpeculativeGenerator:
    """What decodes in the mode with that name."""
    kind, _, how = name.partition(" ")
    if kind == "plain":
        return SpeculativeGenerator(None, target)
    if kind in ("ngram", "suffix"):
        return SpeculativeGenerator(kind, target, k=int(how))
    if kind in ("pair", "fused"):
        length, _, rule = how.partition(" ")
        return SpeculativeGenerator(draft, target, k=int(length), fused=kind == "fused", acceptor=rule or "match")
    heads: dict[str, object] = {"path": str(PAIR / kind)}
    if kind == "medusa":
        heads["draft_tree"] = str(PAIR / kind / f"{how}.json")
    elif how.startswith("chain:"):
        heads["k"] = int(how.removeprefix("chain:"))
    else:
        heads["draft_tree"] = how
    return SpeculativeGenerator(heads, target)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=MODES, help="with semicolons between; _ stands for a space")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sampling = {"do_sample": True, "temperature": options.temperature, "seed": 7} if options.temperature else {}
    rows = prompt_ids(options.prompts)
    longest = max(map(len, rows))
    target, draft = (
        AutoDecoder.from_pretrained(PAIR / name, n_positions=longest + options.new, context_length_estimate=longest)
        for name in ("target", "draft")
    )
    modes = []
    for name in (one.replace("_", " ").strip() for one in options.modes.split(";")):
        source = generator(name, target, draft)
        source.compile()
        modes.append(Mode(name, generator_run(source, options.new, **sampling)))
    take_turns(modes, rows, options.repeats)
    figures = {mode.name: {**mode.summary(), **mode.beside(modes[0])} for mode in modes}
    publish({"prompts": len(rows), "new_tokens": options.new, "temperature": options.temperature, "modes": figures})


if __name__ == "__main__":
    main()
