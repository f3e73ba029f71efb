"""Every way to decode with a target, in one table: tokens a round, time of a round, speed. JSON comes last.

    python benchmarks/modes.py                                           all that is listed below, greedy
    python benchmarks/modes.py --temperature 1                           sampled
    python benchmarks/modes.py --modes "plain; pair 3; medusa tree-8" --prompts 4 --repeats 2
    python benchmarks/modes.py --model smollm2                           the chat model, by category of prompts
    python benchmarks/modes.py --model smollm2 --beside transformers llama.cpp
    python benchmarks/modes.py --quantization int8                       quantised target and draft, the same heads

A mode is one of

    plain                    the target alone
    ngram K, suffix K        drafts without a model
    answers K [N]            suffixes of at least N tokens that are in the model's answers.bin too
    pair K, fused K          the draft model, in two graphs or in one with the target
    pair K reject            the same under rejection sampling, which gives other tokens of the same distribution
    medusa FILE              the heads of the model's folder in examples/ with a tree of that folder
    FOLDER TREE              the EAGLE heads of a folder there: "eagle3 chain:3", "eagle3 dynamic:8,4,3"
    MODE + MODE              the first of the two that has a proposal: "suffix 6 + pair 3"; no heads in such a list

Every mode takes its turn on every prompt; a figure is the median of the repeats. Texts are compared with those of the
first mode: one that gives other tokens is counted. Nothing else should run on the machine. Making graphs is not
measured. llama.cpp reads the GGUF file that was fetched, through the package llama-cpp-python.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import PAIR, ROOT, chat_rows, prompt_ids, publish

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.decoder.weights.hub import checkpoint_path
from paceline.experiments.bench import Mode, Outcome, generator_run, take_turns
from paceline.heads.frozen_model import transformers_model

MODES = (
    "plain; ngram 4; suffix 4; fused 2; fused 3; fused 4; pair 2; pair 3; "
    "eagle3 chain:1; eagle3 chain:2; eagle3 chain:3; eagle3 dynamic:4,3,2; eagle3 dynamic:8,4,3; "
    "medusa tree-2; medusa tree-8"
)
CHAT_MODES = (
    "plain; ngram 4; suffix 6; fused 3; medusa tree-8; eagle3 chain:2; eagle3 chain:3; eagle3 chain:4; "
    "eagle3 chain:5; eagle3 dynamic:8,4,3; suffix 6 + pair 3; answers 4"
)


@dataclass(frozen=True, slots=True)
class Model:
    """A target with its drafters.

    folder      its drafters
    target      what `AutoDecoder` loads
    vocabulary  what stands between the draft model's ids and the target's
    """

    folder: Path
    target: str
    vocabulary: str = "same"


MODELS = {
    "pycode": Model(PAIR, str(PAIR / "target")),
    "smollm2": Model(ROOT / "examples" / "smollm2", "smollm2", vocabulary="intersection"),
}


def source(name: str, model: Model, draft: SamplingDecoder | None) -> object:
    """Who drafts in the mode with that name: what `SpeculativeGenerator` takes."""
    kind, _, how = name.partition(" ")
    if kind == "plain":
        return None
    if kind in ("ngram", "suffix"):
        return {"type": kind, "k": int(how)}
    if kind == "answers":
        length, _, least = how.partition(" ")
        return {
            "type": "suffix",
            "k": int(length),
            "min_match": int(least or 1),
            "corpus": str(model.folder / "answers.bin"),
        }
    if kind in ("pair", "fused"):
        return draft
    heads: dict[str, object] = {"path": str(model.folder / kind)}
    if kind == "medusa":
        heads["draft_tree"] = str(model.folder / kind / f"{how}.json")
    elif how.startswith("chain:"):
        heads["k"] = int(how.removeprefix("chain:"))
    else:
        heads["draft_tree"] = how
    return heads


def generator(name: str, model: Model, target: SamplingDecoder, draft: SamplingDecoder | None) -> SpeculativeGenerator:
    """What decodes in the mode with that name."""
    parts = [part.strip() for part in name.split("+")]
    if len(parts) > 1:
        pair = any(part.startswith(("pair", "fused")) for part in parts)
        length = max(int(part.split()[1]) for part in parts)
        return SpeculativeGenerator(
            [source(part, model, draft) for part in parts],
            target,
            k=length,
            vocabulary=model.vocabulary if pair else "same",
        )
    kind, _, how = name.partition(" ")
    if kind not in ("pair", "fused"):
        return SpeculativeGenerator(source(name, model, draft), target)
    length, _, rule = how.partition(" ")
    return SpeculativeGenerator(
        draft,
        target,
        k=int(length),
        fused=kind == "fused",
        acceptor=rule or "match",
        vocabulary=model.vocabulary,
    )


def transformers_side(path: Path, new: int) -> Mode:
    """`generate` in bf16."""
    model: Any = transformers_model(path, torch.bfloat16)

    def run(row: list[int]) -> Outcome:
        ids = torch.tensor([row])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        return Outcome(out[0, len(row) :].tolist())

    return Mode("transformers bf16", run)


def llama_side(path: Path, new: int, positions: int) -> Mode:
    """llama.cpp with the GGUF file itself, every thread of the machine."""
    from llama_cpp import Llama

    (file,) = path.glob("*.gguf")
    model: Any = Llama(str(file), n_ctx=positions, n_threads=os.cpu_count(), n_batch=512, verbose=False)

    def run(row: list[int]) -> Outcome:
        model.reset()
        made: list[int] = []
        for token in model.generate(row, temp=0.0, repeat_penalty=1.0, top_k=1, reset=True):
            made.append(token)
            if len(made) == new or token == model.token_eos():
                break
        return Outcome(made)

    return Mode(f"llama.cpp {file.stem.rpartition('.')[2]}", run)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="pycode")
    parser.add_argument("--modes", help="with semicolons between; _ stands for a space")
    parser.add_argument("--beside", nargs="*", choices=("transformers", "llama.cpp"), default=())
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=12, help="of smollm2: so many of each category, at most 8")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization", help="format of the weights of target and draft; default bf16")
    parser.add_argument("--kv-cache-dtype", help="format of their keys and values; default bf16")
    options = parser.parse_args()
    sampling = {"do_sample": True, "temperature": options.temperature, "seed": 7} if options.temperature else {}
    model, chat = MODELS[options.model], options.model == "smollm2"
    path = checkpoint_path(model.target)
    categories, rows = chat_rows(path, options.prompts) if chat else ([], prompt_ids(options.prompts))
    longest = max(map(len, rows))
    lengths = {"n_positions": longest + options.new, "context_length_estimate": longest}
    names = [one.replace("_", " ").strip() for one in (options.modes or (CHAT_MODES if chat else MODES)).split(";")]
    formats = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    target = AutoDecoder.from_pretrained(path, **lengths, **formats)
    drafting = any(part.strip().startswith(("pair", "fused")) for name in names for part in name.split("+"))
    draft = AutoDecoder.from_pretrained(model.folder / "draft", **lengths, **formats) if drafting else None
    modes = []
    for name in names:
        made = generator(name, model, target, draft)
        made.compile()
        modes.append(Mode(name, generator_run(made, options.new, **sampling)))
    theirs = [transformers_side(path, options.new)] if "transformers" in options.beside else []
    if "llama.cpp" in options.beside:
        theirs.append(llama_side(path, options.new, lengths["n_positions"]))
    take_turns(modes, rows, options.repeats, once=theirs)
    report = {"prompts": len(rows), "new_tokens": options.new, "temperature": options.temperature}
    publish({**report, **formats, "modes": figures(modes + theirs), "categories": by_category(modes, categories)})


def figures(modes: Sequence[Mode]) -> dict[str, object]:
    """Every mode by name, beside the first one."""
    return {mode.name: {**mode.summary(), **mode.beside(modes[0])} for mode in modes}


def by_category(modes: Sequence[Mode], categories: Sequence[str]) -> dict[str, object]:
    """The same of each category alone."""
    places = {name: [i for i, one in enumerate(categories) if one == name] for name in dict.fromkeys(categories)}
    return {name: figures([mode.part(rows) for mode in modes]) for name, rows in places.items()}


if __name__ == "__main__":
    main()
