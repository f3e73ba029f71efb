"""How often tokens differ between widths of a graph, and between backends. JSON on the last line.

python benchmarks/disagreements.py                  both (several minutes)
python benchmarks/disagreements.py --part widths    decode[1] and verify[5] on the demo prompts
python benchmarks/disagreements.py --part backends  native and eager
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from common import PAIR, prompt_ids, publish

from paceline import AutoDecoder, SpeculativeGenerator


def compared(pairs: Iterable[tuple[list[int], list[int]]], prompts: Iterable[list[int]]) -> dict[str, int]:
    """Texts in pairs: tokens up to the first that differs, and texts that part."""
    differ = tokens = 0
    for (a, b), ids in zip(pairs, prompts, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        tokens += (len(a) if same is None else same + 1) - len(ids)
        differ += same is not None
    return {"tokens": tokens, "disagreements": differ}


def widths() -> dict[str, object]:
    """Greedy texts of all demo prompts at width 1 and at width 5, bf16."""
    figures: dict[str, object] = {}
    for backend, count, new in (("native", 60, 128), ("eager", 4, 24)):
        target = AutoDecoder.from_pretrained(PAIR / "target", n_positions=512, backend=backend)
        samplers = [SpeculativeGenerator(None, target, k=0, verify_width=width) for width in (1, 5)]
        rows = prompt_ids(count)
        texts = ([one.sample([ids], max_new_tokens=new)[0].tolist() for one in samplers] for ids in rows)
        figures[backend] = compared(((narrow, wide) for narrow, wide in texts), rows)
    return figures


def backends() -> dict[str, object]:
    """Texts of the demo target on two backends at the same seeds."""
    rows, figures = prompt_ids(24), dict[str, object]()
    for amp in ("f32", "bf16"):
        decoders = [
            AutoDecoder.from_pretrained(PAIR / "target", n_positions=256, backend=backend, amp=amp)
            for backend in ("native", "eager")
        ]
        for heat in (0.0, 1.0):
            sampling = {"do_sample": True, "temperature": heat, "seed": 7} if heat else {}
            texts = ([one.sample([ids], max_new_tokens=64, **sampling)[0].tolist() for one in decoders] for ids in rows)
            figures[f"{amp}, temperature {heat:g}"] = compared(((a, b) for a, b in texts), rows)
    return figures


PARTS: dict[str, Callable[[], dict[str, object]]] = {"widths": widths, "backends": backends}


def main() -> None:
    """Run the parts of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    part = parser.parse_args().part
    publish({name: PARTS[name]() for name in (PARTS if part == "all" else [part])})


if __name__ == "__main__":
    main()
