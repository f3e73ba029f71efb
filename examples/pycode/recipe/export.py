"""Write the finished pair as two plain Hugging Face folders in bfloat16.

python -m recipe.export --work W --tokenizer <folder> --out <folder>
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from recipe.modelling import END_ID, PAD_ID

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def export_model(source: Path, tokenizer: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=END_ID, eos_token_id=END_ID, pad_token_id=PAD_ID)
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, out / name)
    path = out / "config.json"
    config = json.loads(path.read_text())
    # The same facts under the names that older readers look for.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = config["dtype"]
    path.write_text(json.dumps(config, indent=2) + "\n")
    for file in out.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the trained models")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer used")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["target", "draft"], help="folders in WORK to write")
    args = parser.parse_args()
    for name in args.models:
        export_model(args.work / name, args.tokenizer, args.out / name)


if __name__ == "__main__":
    main()
