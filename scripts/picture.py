"""The picture of the README: an answer of the demo pair as `paceline generate` shows it on a terminal.

python scripts/picture.py [--prompt N] [--tokens N]     writes docs/images/tokens.svg
"""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.cli.console import TextView
from paceline.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAIR = ROOT / "examples" / "pycode"
OUT = ROOT / "docs" / "images" / "tokens.svg"
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # nothing is fetched
K = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=52, help="which of the demo prompts")
    parser.add_argument("--tokens", type=int, default=43, help="how many new tokens")
    options = parser.parse_args()
    prompt = json.loads((PAIR / "prompts.jsonl").read_text().splitlines()[options.prompt])["prompt"]
    target, draft = (AutoDecoder.from_pretrained(PAIR / name, n_positions=512) for name in ("target", "draft"))
    generator, tokenizer = SpeculativeGenerator(draft, target, k=K), load_tokenizer(PAIR / "target")
    ids = tokenizer.encode(prompt)
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", record=True, width=100, highlight=False
    )
    view = TextView(console, tokenizer, ids)
    console.print(view.legend() + "\n")
    view.prompt(prompt)
    text = list(ids)
    for output in generator.stream([ids], max_new_tokens=options.tokens):
        view.show(output)
        text += output.tokens
    plain = SpeculativeGenerator(None, target, k=0).sample([ids], max_new_tokens=options.tokens)
    assert plain[0].tolist() == text, "the draft changed the text"
    done = generator.statistics
    console.print(f"\n\n{done.new_tokens} tokens in {done.num_rounds} rounds (k = {K}); plain decoding gives the same.")
    OUT.write_text(console.export_svg(title="paceline generate", code_format=FORMAT, unique_id="paceline") + "\n")


if __name__ == "__main__":
    main()
