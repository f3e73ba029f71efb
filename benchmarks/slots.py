"""What slots without a request cost: some requests in a batch of many slots, against a batch of as many as they are.

    python benchmarks/slots.py [--slots 16] [--requests 1 4] [--k 4] [--apart]

Each number of requests is decoded in both batches, in turns, as a server decodes them: in rounds that follow each other
inside the native code. ``--apart`` loads the models in a thread that ends and decodes in another, as a replica does.
Prints JSON on its last line; of each row the best of the turns:
tokens_per_s   of all requests together, prompts included
ratio          to the batch without idle slots
faults         minor page faults for 1,000 tokens
switches       involuntary context switches for 1,000 tokens
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from common import PAIR, prompt_ids, publish

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.placement.host.processes import run_apart


@dataclass(frozen=True, slots=True)
class Row:
    """One number of requests in one batch; see the module."""

    slots: int
    requests: int
    tokens_per_s: float
    faults: float
    switches: float
    ratio: float = 1.0


def load(options: argparse.Namespace, slots: int) -> SpeculativeGenerator:
    """The pair, with its graphs made."""

    def made() -> SpeculativeGenerator:
        sizes = {"batch_size": slots, "n_positions": 512, "amp": "bf16", "backend": options.backend}
        draft, target = (AutoDecoder.from_pretrained(path, **sizes) for path in (options.draft, options.target))
        generator = SpeculativeGenerator(draft, target, k=options.k)
        generator.compile()
        return generator

    return run_apart(made) if options.apart else made()


def decode(generator: SpeculativeGenerator, prompts: list[list[int]], options: argparse.Namespace) -> Row:
    """One turn."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = generator.sample(prompts, max_new_tokens=options.tokens, eos_token_id=[], return_dict=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    tokens = sum(result.lengths) - sum(map(len, prompts))
    return Row(
        generator.target.batch_size,
        len(prompts),
        round(tokens / seconds, 1),
        round(1000 * (after.ru_minflt - before.ru_minflt) / tokens, 1),
        round(1000 * (after.ru_nivcsw - before.ru_nivcsw) / tokens, 1),
    )


def measure(options: argparse.Namespace) -> list[Row]:
    """Every number of requests in both batches."""
    generators = {slots: load(options, slots) for slots in {options.slots, *options.requests}}
    best: dict[tuple[int, int], Row] = {}
    for turn in range(options.turns + 1):
        for requests in options.requests:
            for slots in (requests, options.slots):
                row = decode(generators[slots], prompt_ids(requests)[:requests], options)
                known = best.get((requests, slots))
                if turn and (known is None or row.tokens_per_s > known.tokens_per_s):
                    best[requests, slots] = row
    rows = []
    for (requests, _), row in best.items():
        alone = best[requests, requests].tokens_per_s
        rows.append(Row(**{**asdict(row), "ratio": round(row.tokens_per_s / alone, 3)}))
    return rows


def in_a_thread(work: Callable[[], list[Row]]) -> list[Row]:
    """What it returns, called in a thread of its own."""
    found: list[Row] = []
    thread = threading.Thread(target=lambda: found.extend(work()))
    thread.start()
    thread.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", type=Path, default=PAIR / "target")
    parser.add_argument("--draft", type=Path, default=PAIR / "draft")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    rows = in_a_thread(lambda: measure(options)) if options.apart else measure(options)
    for row in rows:
        print(row)
    publish({"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
