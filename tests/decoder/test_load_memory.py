"""How much memory loading a checkpoint takes, measured in a fresh process for each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import save_quantized
from tests.decoder import gguf_files
from tests.decoder.gguf_files import TOKENIZER

# It loads a small model first, so that what is imported and made only once is there; the kernel keeps the peak of the
# process from then on. The cache, which is no part of the weights, has eight positions.
SCRIPT = """
import json, sys
import torch
from paceline import AutoDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import Layout, Shard
from paceline.decoder.weights.checkpoint import load_weights

torch.set_num_threads(1)

def memory(name):
    line, = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

def load(folder):
    if ranks > 1:
        config, dtype = ModelConfig.from_pretrained(folder), {"bf16": torch.bfloat16, "f32": torch.float32}[amp]
        shard = Shard(config, Layout(ranks), ranks - 1)
        return list(load_weights(folder, config, dtype, shard=shard, quantization=quantization).values())
    decoder = AutoDecoder.from_pretrained(folder, backend="eager", amp=amp, n_positions=8, quantization=quantization)
    return list(decoder.body.parameters())

small, large, amp, quantization = sys.argv[1:5]
quantization, ranks = quantization or None, int(sys.argv[5])
load(small)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = memory("VmRSS")
kept = load(large)
weights = sum(one.nbytes for one in kept)
print(json.dumps([(memory("VmHWM") - before) / weights, weights]))
"""


def model(hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=4000, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=8, num_attention_heads=8,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made = made.to_empty(device="cpu")
    for parameter in made.parameters():  # its own numbers take longer
        parameter.detach().fill_(0.01)
    return made


def write(folder: Path, hidden: int) -> dict[str, Path]:
    """The same model as folders, each of them in another format."""
    network = model(hidden)
    made = {name: folder / name for name in ("bfloat16", "pickle")}
    network.config.save_pretrained(made["pickle"])
    torch.save(network.state_dict(), made["pickle"] / "pytorch_model.bin")
    made["gguf"] = folder / "gguf" / "model.gguf"
    made["gguf"].parent.mkdir()
    no_words = {**dict.fromkeys(TOKENIZER), "tokenizer.ggml.model": "no_vocab"}
    gguf_files.write(made["gguf"], network, Kind.Q8_0, changes=no_words)
    network.to(torch.bfloat16).save_pretrained(made["bfloat16"], max_shard_size="60MB")
    made["packed"] = folder / "packed"
    save_quantized(made["bfloat16"], made["packed"], "q4_0")
    made["gptq"] = save_gptq(network, folder / "gptq")
    return made


def save_gptq(network: LlamaForCausalLM, folder: Path) -> Path:
    """Groups of 16, which no format has, so that all of it becomes floats."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in network.state_dict().items():
        if "_proj." not in name:
            tensors[name] = weight.clone()
            continue
        (rows, columns), module = weight.shape, name.removesuffix("weight")
        tensors[module + "qweight"] = torch.full((columns // 8, rows), 0x12345678, dtype=torch.int32)
        tensors[module + "qzeros"] = torch.full((columns // 16, rows // 8), 0x77777777, dtype=torch.int32)
        tensors[module + "scales"] = torch.full((columns // 16, rows), 0.01, dtype=torch.float16)
    network.config.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(fields | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    save_file(tensors, folder / "model.safetensors")
    return folder


CASES = [
    ("bfloat16", "bf16", "", 1), ("pickle", "f32", "", 1), ("bfloat16", "bf16", "int8", 1),
    ("pickle", "bf16", "q4_0", 1), ("bfloat16", "bf16", "int8", 2), ("gguf", "bf16", "gguf", 1),
    ("packed", "bf16", "", 1), ("gptq", "bf16", "", 1),
]  # fmt: skip
"""What is stored, the type in memory, the quantisation, and over how many ranks; of these, the last one loads."""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small", 64), write(tmp_path / "large", 832)
    found: dict[str, float] = {}
    for name, amp, how, ranks in CASES:
        command = [sys.executable, "-c", SCRIPT, str(small[name]), str(large[name]), amp, how, str(ranks)]
        ratio, weights = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert weights > 30_000_000
        found[f"{name} in {amp} {how}, {ranks} ranks"] = round(ratio, 3)
    assert {name: ratio for name, ratio in found.items() if ratio > 1.2} == {}, found
