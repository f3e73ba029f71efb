"""Perplexity of a model by format of weights and cache, on a text that it was not trained on. JSON on the last line.

    python benchmarks/perplexity.py                                        the demo's target, on sources of this package
    python benchmarks/perplexity.py --model smollm2 --text some/text.txt   a fetched model, on a text of one's own

The text is cut into pieces of ``--length`` tokens, each read from its beginning; the first token of a piece is not
counted. A format that the backend or the shape of the model has no products for is named with the reason.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from time import perf_counter

import torch
from common import PAIR, ROOT, publish

from paceline import AutoDecoder, PacelineError
from paceline.decoder.weights.hub import checkpoint_path
from paceline.huggingface.cache import SlotCache
from paceline.text.tokenizer import load_tokenizer

FORMATS = ("f32", "bf16", "int8", "fp8_e4m3", "q8_0", "q4_0", "q4_1")
CACHED = ("cache:int8", "cache:fp8_e4m3")  # keys and values alone, f32 weights


def pieces(model: str, text: str, *, length: int, count: int) -> torch.Tensor:
    """The first pieces of a text. [count, length] int64"""
    ids = load_tokenizer(checkpoint_path(model)).encode(text)
    count = min(count, len(ids) // length)
    if not count:
        raise SystemExit(f"the text has {len(ids)} tokens, less than one piece of {length}; give a longer one")
    return torch.tensor(ids[: count * length]).view(count, length)


def perplexity(model: str, form: str, rows: torch.Tensor, *, backend: str) -> dict[str, object]:
    """Perplexity of the rows without the first token of each. ``form``: of the weights, or "cache:" and that of the
    cache.
    """
    begin, cache = perf_counter(), form.removeprefix("cache:") if form.startswith("cache:") else None
    weights = "f32" if cache else form
    try:
        decoder = AutoDecoder.from_pretrained(
            model,
            n_positions=[rows.shape[1]],
            amp=weights if weights in ("f32", "bf16") else "f32",
            backend=backend,
            quantization=None if weights in ("f32", "bf16") else weights,
            kv_cache_dtype=cache,
        )
    except PacelineError as error:
        return {"format": form, "refused": str(error)}
    total = 0.0
    for row in rows:
        ids = row.unsqueeze(0)
        logits = SlotCache(decoder).read(ids, torch.ones_like(ids, dtype=torch.bool), ids.shape[1])[0]
        total += float(torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum").double())
    tokens = rows.shape[0] * (rows.shape[1] - 1)
    size = sum(weight.nbytes for weight in decoder.body.parameters())
    return {
        "format": form,
        "perplexity": round(math.exp(total / tokens), 4),
        "tokens": tokens,
        "weights_mb": round(size / 1e6, 1),
        "seconds": round(perf_counter() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(PAIR / "target"), help="folder, or name of a fetched model")
    parser.add_argument("--text", type=Path, help="file of text; default: sources of this package")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--formats", nargs="+", default=[*FORMATS, *CACHED], choices=[*FORMATS, *CACHED])
    parser.add_argument("--backend", default="native")
    options = parser.parse_args()
    files = [options.text] if options.text else sorted((ROOT / "core").glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    rows = pieces(options.model, text, length=options.length, count=options.count)
    found = []
    for form in options.formats:
        found.append(perplexity(options.model, form, rows, backend=options.backend))
        print(found[-1], flush=True)
    publish({"perplexity": found, "backend": options.backend})


if __name__ == "__main__":
    main()
