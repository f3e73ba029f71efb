"""Instructions for a chat model: topics x tasks, and tasks with a passage of the standard library's documentation.

    python examples/smollm2/recipe/instructions.py --out train.jsonl --count 4000
    python examples/smollm2/recipe/instructions.py --held-out examples/smollm2/prompts.jsonl

Nothing is downloaded. Every category has topics and modules that are held out: no instruction to train on names one of
them, and the prompts to measure on name no others. A line is {"category", "prompt"}.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
from pathlib import Path

import yaml

WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def passages(modules: list[str], *, code: bool) -> list[str]:
    """Documentation, or source, of the public functions and classes of modules: 200 to 900 characters each."""
    found = []
    for name in modules:
        module = importlib.import_module(name)
        for key, thing in sorted(vars(module).items()):
            if key.startswith("_") or getattr(thing, "__module__", None) != name:
                continue
            try:
                text = inspect.getsource(thing) if code else inspect.getdoc(thing)
            except (OSError, TypeError):
                continue
            if text and 200 <= len(text) <= 900:
                found.append(text.strip())
    return found


def instructions(topics: list[str], modules: list[str], rng: random.Random) -> dict[str, list[str]]:
    """Every instruction there is about these topics and modules, by category, in random order."""
    made: dict[str, list[str]] = {}
    for category, tasks in WORDS["tasks"].items():
        made[category] = [task.replace("{t}", topic) for task in tasks for topic in topics]
    for category, tasks in WORDS["passages"].items():
        texts = passages(modules, code=category == "code")
        made.setdefault(category, []).extend(f"{task}\n\n{text}" for task in tasks for text in texts)
    for listed in made.values():
        rng.shuffle(listed)
    return made


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=4000, help="instructions, as many of every category")
    parser.add_argument("--held-out", type=Path, help="write the prompts to measure on here instead")
    options = parser.parse_args()
    rng = random.Random(0)
    if options.held_out:
        made, count = instructions(WORDS["held_out_topics"], WORDS["held_out_modules"], rng), 8
        made = {category: made[category][:count] for category in made}
    else:
        made = instructions(WORDS["topics"], WORDS["modules"], rng)
        made = {category: made[category][: options.count // len(made)] for category in made}
    rows = [{"category": category, "prompt": prompt} for category, listed in made.items() for prompt in listed]
    if not options.held_out:
        rng.shuffle(rows)
    (options.held_out or options.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} instructions: " + ", ".join(f"{category} {len(listed)}" for category, listed in made.items()))


if __name__ == "__main__":
    main()
