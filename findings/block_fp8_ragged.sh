#!/usr/bin/env bash
# transformers 5.24.0 reads block FP8 (`quant_method: fp8`, `weight_block_size`) on a CPU with a block that it derives
# from the shapes, side / number of scales, instead of the block of the configuration. Where a side is no multiple of
# the block, and the number of scales divides it, the model loads without a word and its weights are wrong.
#
# The format (DeepSeek-V3's, and the library's own GPU kernels) gives element (i, j) the scale of block
# (i // rows, j // columns); the last block of a side is short.
#
# Valid input: a Llama of one layer, hidden size 64, MLP of 72, blocks of 32 x 32; 72 needs three scales (32 + 32 + 8).
# Seen on 2026-11-27: q_proj (64 x 64) is exact; up_proj (72 x 64) differs from the definition in 24 of its 72 rows,
# as if blocks had 24 rows. Exits 1 when this changes. For Paceline: its reader goes by the definition, and
# transformers is an oracle for sides that are multiples of the block alone (docs/quantization.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 2>/dev/null
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import json, sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

folder, block = Path(sys.argv[1]), 32
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=72, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
)
LlamaForCausalLM(config).save_pretrained(folder)
tensors, truth = {}, {}
for name, weight in load_file(folder / "model.safetensors").items():
    if not name.endswith("_proj.weight"):
        tensors[name] = weight
        continue
    rows, columns = -(-weight.shape[0] // block), -(-weight.shape[1] // block)
    scales = 0.5 + torch.rand(rows, columns)
    spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
    tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
    tensors[name + "_scale_inv"] = scales
    truth[name] = tensors[name].float() * spread
save_file(tensors, folder / "model.safetensors", {"format": "pt"})
written = json.loads((folder / "config.json").read_text())
written["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
(folder / "config.json").write_text(json.dumps(written))

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
read = dict(model.named_parameters())
wrong = {
    name.split(".")[-2]: int(((read[name] - value).abs() > 1e-6).any(1).sum()) for name, value in truth.items()
}
print("rows that differ from the definition:", wrong)
assert wrong["q_proj"] == 0 and wrong["up_proj"] == 24, "the behaviour has changed"
PYTHON
