"""Peak memory and time of loading a checkpoint, from every kind of file into every format. JSON on the last line.

    python benchmarks/load.py                     random weights of the 110m shape
    python benchmarks/load.py --shape 1.1b        needs 10 GB of disk
    python benchmarks/load.py --shape tiny        a minute, to try it out
    python benchmarks/load.py --held              memory after answers, as a served model has it

Each row has a process of its own, which loads a tiny model of the same kind first, so that what is imported and made
only once is there. ``peak`` is the most memory that the process held from then on (VmHWM of /proc, Linux only), less
what it held before, over the bytes of the weights in the format they are held in: mapped pages of the files count. The
cache has eight positions. Files were just written, so that reading them is no wait for a disk.

``--held``: on ``native``, with four slots of 512 positions, what the process holds (VmRSS) after four answers more than
after those of the tiny model, over the bytes of weights and cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from common import child, publish
from gguf import GGMLQuantizationType
from gguf_writer import write_gguf
from shapes import SHAPES, config_of
from transformers import LlamaForCausalLM

from paceline import AutoDecoder, SpeculativeGenerator, save_quantized
from paceline.auto import SamplingDecoder

KINDS = (
    ("safetensors", "bf16", ""),
    ("safetensors", "f32", ""),
    ("safetensors", "bf16", "int8"),
    ("safetensors", "bf16", "fp8_e4m3"),
    ("safetensors", "bf16", "q4_0"),
    ("pickle", "bf16", ""),
    ("pickle", "f32", ""),
    ("pickle", "bf16", "int8"),
    ("pickle", "bf16", "q4_0"),
    ("int8", "bf16", ""),
    ("gguf", "bf16", "gguf"),
    ("gguf", "bf16", ""),
)
"""What is stored: bf16 in safetensors, float32 in a pickle, int8 in compressed-tensors' layout, or Q8_0 in a GGUF file;
the type in memory; the quantisation."""


HELD = ("", "int8", "fp8_e4m3", "q8_0", "q4_0", "q4_1")
"""Quantisations that ``--held`` measures."""


def save(folder: Path, shape: str) -> None:
    config = config_of(SHAPES[shape], tie_word_embeddings=False)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    model = empty.to_empty(device="cpu").eval()
    for parameter in model.parameters():  # random numbers take longer, and no less memory
        parameter.detach().fill_(0.01)
    config.save_pretrained(folder / "pickle")
    torch.save(model.state_dict(), folder / "pickle" / "pytorch_model.bin")
    model.to(torch.bfloat16).save_pretrained(folder / "safetensors", max_shard_size="1GB")
    save_quantized(folder / "safetensors", folder / "int8")
    (folder / "gguf").mkdir()
    write_gguf(folder / "gguf" / "model.gguf", model, GGMLQuantizationType.Q8_0)


def memory(name: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def measure(small: Path, large: Path, kind: tuple[str, str, str]) -> dict[str, object]:
    stored, amp, quantization = kind

    def load(folder: Path) -> SamplingDecoder:
        return AutoDecoder.from_pretrained(
            folder / stored, backend="eager", amp=amp, n_positions=8, quantization=quantization or None
        )

    load(small)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin = memory("VmRSS"), perf_counter()
    decoder = load(large)
    seconds, peak = perf_counter() - begin, memory("VmHWM") - before
    weights = sum(parameter.nbytes for parameter in decoder.body.parameters())
    return {
        "stored": stored,
        "held": quantization or amp,
        "weights_mb": round(weights / 2**20, 1),
        "peak": round(peak / weights, 3),
        "seconds": round(seconds, 2),
    }


def held(small: Path, large: Path, quantization: str) -> dict[str, object]:
    """Memory of a model that has answered, in this process."""

    def answered(folder: Path) -> tuple[SamplingDecoder, int]:
        target = AutoDecoder.from_pretrained(
            folder / "safetensors", amp="bf16", n_positions=512, batch_size=4, quantization=quantization or None
        )
        generator = SpeculativeGenerator("ngram", target, k=4)
        generator.sample([[1, 2, 3, 1, 2, 3]] * 4, None, max_new_tokens=16, ignore_eos=True)
        gc.collect()
        return target, memory("VmRSS")

    _small, before = answered(small)
    target, after = answered(large)
    state = [*target.body.parameters(), *target.body.buffers()]
    counted = sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in state}.values())
    return {
        "held": quantization or "bf16",
        "weights_and_cache_mb": round(counted / 2**20, 1),
        "resident_mb": round((after - before) / 2**20, 1),
        "ratio": round((after - before) / counted, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="110m")
    parser.add_argument("--held", action="store_true", help="memory after answers")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--kind", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        small, large = map(Path, options.child)
        report = held(small, large, options.kind[0]) if options.held else measure(small, large, tuple(options.kind))
        print(json.dumps(report))
        return
    kinds = [(one,) for one in HELD] if options.held else KINDS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        save(small, "tiny")
        save(large, options.shape)
        for kind in kinds:
            more = ["--held"] if options.held else []
            rows.append(child("--child", str(small), str(large), "--kind", *kind, *more))
    publish({"shape": options.shape, "held" if options.held else "load": rows})


if __name__ == "__main__":
    main()
