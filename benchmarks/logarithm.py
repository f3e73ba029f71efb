"""How often a sampled token differs because a backend takes its own logarithm for the Gumbel noise. JSON comes last.

    python benchmarks/logarithm.py                                    this CPU, 128,256 ids
    python benchmarks/logarithm.py --vocabulary 1024 --rows 1000000   more rows, fewer ids
    python benchmarks/logarithm.py --device cuda
    PJRT_DEVICE=CPU python benchmarks/logarithm.py --device xla       where torch_xla is installed

Every row chooses among the same logits (normal, divided by the temperature) with the same random words three times:
with the arithmetic of `eager` and `native`, with the device's own logarithms (``traced``), and, as the worst that
decision 0011 allows, with every value of the noise moved 2 units in the last place up or down at random. Logits that
differ between backends are left out, although they change more tokens than this does.

Tokens that differ are counted, and expected: two scores lie within a small e of each other at the top of a row with
probability e * sum(p * (1 - p)), and the choice differs where the two move against each other by more than that. The
expectation needs a thousand rows where the count needs a hundred million.
"""

from __future__ import annotations

import argparse
import importlib
import platform
from time import perf_counter

import torch
from common import publish
from torch import Tensor

from paceline.core import noise
from paceline.core.sampling import seed_row

SPREAD = 3.0  # of the logits, in natural units, before the temperature


def noises(high: Tensor, low: Tensor, generator: torch.Generator, *, device: torch.device) -> dict[str, Tensor]:
    """The same words as noise, by name of who computes it. high, low [n, V] int32 -> [n, V] float32 each."""
    own = noise.gumbel_of_words(high, low)
    steps = torch.randint(0, 2, own.shape, generator=generator, device=own.device, dtype=torch.int32) * 4 - 2
    moved = (own.view(torch.int32) + steps).view(torch.float32)
    return {
        "arithmetic": own,
        "device": noise.gumbel_of_words(high.to(device), low.to(device), traced=True).to(high.device),
        "2 ulp": torch.where(own.abs() < 2.0**-100, own, moved),
    }


def gap(scores: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """How far one id of each row is above another. scores [n, V], ids [n] -> [n] float64"""
    above, below = (scores.gather(-1, ids[:, None])[:, 0].double() for ids in (first, second))
    return above - below


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    if options.device == "xla":
        importlib.import_module("torch_xla")  # registers the device
    logarithms, size = torch.device(options.device), options.vocabulary
    # XLA compiles whatever it is given, so that all but the logarithms stay on the CPU.
    device = torch.device("cpu") if logarithms.type == "xla" else logarithms
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.arange(size, dtype=torch.int32, device=device)
    key = torch.tensor([seed_row(1)], dtype=torch.int32, device=device)
    part = max(1, min(options.rows, (1 << (25 if device.type != "cpu" else 21)) // size))
    begin, rows, differing, values = perf_counter(), 0, {"device": 0, "2 ulp": 0}, 0
    expected = dict.fromkeys(differing, 0.0)
    while rows < options.rows and perf_counter() - begin < options.seconds:
        places = torch.arange(rows % (1 << 24), rows % (1 << 24) + part, dtype=torch.int32, device=device) & (2**24 - 1)
        if rows % (1 << 24) < part:  # positions end at 2**24: go on with another seed
            key = torch.tensor([seed_row(1 + (rows >> 24))], dtype=torch.int32, device=device)
        high, low = (x[0] for x in noise.words(noise.row_keys(key, places[None], noise.TARGET), ids))
        logits = torch.randn(part, size, generator=generator, device=device) * (SPREAD / options.temperature)
        made = noises(high, low, generator, device=logarithms)
        chosen = {name: (logits + x).argmax(-1) for name, x in made.items()}
        weights = torch.softmax(logits.double(), -1)
        density = (weights * (1 - weights)).sum(-1)
        first, second = (logits + made["arithmetic"]).topk(2).indices.unbind(-1)
        for name in expected:
            moved = gap(logits + made["arithmetic"], first, second) - gap(logits + made[name], first, second)
            expected[name] += float((moved.clamp(min=0) * density).sum())
        values += int((made["device"] != made["arithmetic"]).sum())
        for name in differing:
            differing[name] += int((chosen[name] != chosen["arithmetic"]).sum())
        rows += part
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    if logarithms.type == "xla":
        where = f"xla on {where}"
    publish(
        {
            "device": where,
            "vocabulary": size,
            "temperature": options.temperature,
            "rows": rows,
            "values_that_differ": round(values / rows / size, 6),
            "tokens_that_differ": differing,
            "expected_per_million": {name: round(1e6 * total / rows, 3) for name, total in expected.items()},
        }
    )


if __name__ == "__main__":
    main()
