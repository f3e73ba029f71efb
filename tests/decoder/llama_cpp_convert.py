"""llama.cpp's converter on folders of tiny models, with one vocabulary for all: python llama_cpp_convert.py SOURCES.

Reads lines of "folder<tab>file<tab>options" and answers each with "ok" or an error.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    sources = sys.argv[1]
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    converter = importlib.import_module("convert_hf_to_gguf")
    conversion = importlib.import_module("conversion")
    conversion.load_all_models()
    text = conversion.TextModel
    text.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    for one in conversion.ModelBase._model_classes[conversion.ModelType.TEXT].values():
        one.set_vocab = text._set_vocab_gpt2
    read = conversion.ModelBase.load_hparams

    def with_what_transformers_drops(folder: Path, is_mistral_format: bool) -> dict[str, Any]:
        return {**json.loads((folder / "config.json").read_text()), **read(folder, is_mistral_format)}

    conversion.ModelBase.load_hparams = staticmethod(with_what_transformers_drops)
    for line in sys.stdin:
        folder, file, *options = line.rstrip("\n").split("\t")
        sys.argv[1:] = [folder, "--outfile", file, *(options or ["--outtype", "f32"])]
        try:
            converter.main()
            print("ok", flush=True)
        except (Exception, SystemExit):
            print(traceback.format_exc().replace("\n", " | "), flush=True)


if __name__ == "__main__":
    main()
