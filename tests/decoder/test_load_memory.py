"""How much memory loading a checkpoint takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = """
import sys, threading, time
import torch
from paceline import AutoDecoder

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def load(folder):
    return AutoDecoder.from_pretrained(folder, backend="eager", amp="bf16", n_positions=64)

load(sys.argv[1])  # what is imported and made only once
before, peak, going = resident(), 0, True

def watch():
    global peak
    while going:
        peak = max(peak, resident())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
kept = load(sys.argv[2])
going = False
watcher.join()
weights = sum(p.numel() * p.element_size() for p in kept.body.parameters())
print((max(peak, resident()) - before) / weights, weights)
"""


def write(folder: Path, *, hidden: int, stored: torch.dtype, pickled: bool) -> None:
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(stored)
    model.save_pretrained(folder, max_shard_size="60MB")
    if pickled:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("stored", "pickled"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)]
)
def test_a_load_takes_little_more_than_the_weights(tmp_path: Path, stored: torch.dtype, pickled: bool) -> None:
    write(tmp_path / "small", hidden=64, stored=stored, pickled=pickled)
    write(tmp_path / "large", hidden=832, stored=stored, pickled=pickled)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "small"), str(tmp_path / "large")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(output[1]) > 100_000_000
    assert float(output[0]) <= 1.2, f"{output[0]} x the weights"
