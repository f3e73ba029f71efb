"""How much memory loading a checkpoint takes, measured in a fresh process for each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.decoder import gguf_files
from tests.decoder.test_packed import settings

# It loads a small model first, so that what is imported and made only once is there; the kernel keeps the peak of the
# process from then on. The cache, which is no part of the weights, has eight positions.
SCRIPT = """
import json, sys
import torch
from paceline import AutoDecoder

torch.set_num_threads(1)

def memory(name):
    line, = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

def load(folder, amp, quantization):
    return AutoDecoder.from_pretrained(
        folder, backend="eager", amp=amp, n_positions=8, quantization=quantization or None)

small, large, amp, quantization = sys.argv[1:]
load(small, amp, quantization)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = memory("VmRSS")
kept = load(large, amp, quantization)
weights = sum(p.numel() * p.element_size() for p in kept.body.parameters())
print(json.dumps([(memory("VmHWM") - before) / weights, weights]))
"""


def model(hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=4000 if hidden > 64 else gguf_files.VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=gguf_files.HEADS,
        num_key_value_heads=gguf_files.KEY_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made = made.to_empty(device="cpu")
    for parameter in made.parameters():  # its own numbers take longer
        parameter.detach().fill_(0.01)
    return made


def write(folder: Path, hidden: int) -> dict[str, Path]:
    """The same model as folders and a file, each of them in another format."""
    network = model(hidden)
    made = {name: folder / name for name in ("bfloat16", "pickle", "packed")}
    for name in ("pickle", "packed"):
        network.config.save_pretrained(made[name])
    torch.save(network.state_dict(), made["pickle"] / "pytorch_model.bin")
    made["q8_0"] = gguf_files.write(folder / "q8_0.gguf", network, GGMLQuantizationType.Q8_0)
    network.to(torch.bfloat16).save_pretrained(made["bfloat16"], max_shard_size="60MB")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in network.float().state_dict().items():
        if "proj" not in name:
            tensors[name] = tensor.clone()
            continue
        zeros = torch.zeros(tensor.shape[0], tensor.shape[1] // 8, dtype=torch.int32)
        scales = torch.full((tensor.shape[0], tensor.shape[1] // 32), 0.0078125)
        tensors |= {
            name + "_packed": zeros,
            name + "_scale": scales,
            name + "_shape": torch.tensor(tensor.shape),
        }
    save_file(tensors, made["packed"] / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((made["packed"] / "config.json").read_text())
    config["quantization_config"] = settings("4 bits in groups")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32
    (made["packed"] / "config.json").write_text(json.dumps(config))
    return made


CASES = [
    ("bfloat16", "bf16", ""), ("pickle", "bf16", ""), ("pickle", "f32", ""), ("bfloat16", "bf16", "int8"),
    ("pickle", "bf16", "q4_0"), ("q8_0", "bf16", "gguf"), ("packed", "bf16", "q4_0"),
]  # fmt: skip
"""What is stored, the type in memory and the quantisation."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_load_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small", 64), write(tmp_path / "large", 832)
    found: dict[str, float] = {}
    for name, amp, how in CASES:
        command = [sys.executable, "-c", SCRIPT, str(small[name]), str(large[name]), amp, how]
        ratio, weights = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert weights > 30_000_000
        found[f"{name} in {amp} {how}"] = round(ratio, 3)
    print(found)
    assert {name: ratio for name, ratio in found.items() if ratio > 1.2} == {}, found
