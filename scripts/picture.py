"""The picture of the README: a text in colours, from a real generation of the demo pair.

    python scripts/picture.py [--prompt N] [--tokens N]     writes docs/images/tokens.svg

A token was drafted and accepted, or it is the target's: in place of a draft that it rejected (corrected), or after a
round whose drafts were all accepted (bonus). The picture follows the colour scheme of the page that shows it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from transformers import AutoTokenizer

from paceline import AutoDecoder, SpeculativeGenerator

ROOT = Path(__file__).resolve().parents[1]
PAIR = ROOT / "examples" / "pycode"
OUT = ROOT / "docs" / "images" / "tokens.svg"
K = 4

ADVANCE, LINE, MARGIN, COLUMNS = 7.8, 21, 12, 100
LEGEND = {
    "prompt": "prompt",
    "accepted": "drafted, accepted by the target",
    "corrected": "the target's token in place of a rejected draft",
    "bonus": "the target's token after an accepted draft",
}
STYLE = """
    text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }
    .prompt { fill: #6e7781 } .note { font-size: 12px; fill: #6e7781 }
    rect.accepted { fill: #aceebb } rect.corrected { fill: #ffd8b5 } rect.bonus { fill: #b6e3ff }
    rect.prompt { fill: none }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .prompt, .note { fill: #8b949e }
      rect.accepted { fill: #1c6b34 } rect.corrected { fill: #8a4600 } rect.bonus { fill: #0a4f8f }
    }"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text and what it is: a key of LEGEND."""

    text: str
    kind: str


def generation(prompt: str, tokens: int) -> tuple[list[Piece], int]:
    """The pieces of a greedy text of the demo pair, and the number of its rounds."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target, draft = (AutoDecoder.from_pretrained(PAIR / name, n_positions=512) for name in ("target", "draft"))
    generator = SpeculativeGenerator(draft, target, k=K)
    ids = tokenizer(prompt).input_ids
    kinds = []
    for output in generator.stream([ids], max_new_tokens=tokens):
        own = "corrected" if kinds and output.accepted < K else "bonus"  # the first token comes with the prompt
        kinds += ["accepted"] * output.accepted + [own] * (len(output.tokens) - output.accepted)
        ids = [*ids, *output.tokens]
    start = len(ids) - len(kinds)
    assert target.sample([ids[:start]], max_new_tokens=tokens)[0].tolist() == ids, "the draft changed the text"
    shown = [tokenizer.decode(ids[: start + count]) for count in range(len(kinds) + 1)]
    pieces = [Piece(shown[0], "prompt")]
    pieces += [Piece(after[len(before) :], kind) for before, after, kind in zip(shown, shown[1:], kinds, strict=False)]
    return pieces, generator.statistics.rounds


def placed(pieces: list[Piece]) -> Iterator[tuple[int, int, Piece]]:
    """(row, column, piece) of everything that is drawn: pieces are cut at line ends and at the right margin."""
    row = column = 0
    for piece in pieces:
        for number, line in enumerate(piece.text.split("\n")):
            if number:
                row, column = row + 1, 0
            while line:
                if column >= COLUMNS:
                    row, column = row + 1, 0
                part, line = line[: COLUMNS - column], line[COLUMNS - column :]
                yield row, column, Piece(part, piece.kind)
                column += len(part)


def box(row: float, column: float, piece: Piece, classes: str = "") -> str:
    """A piece of text on its colour; ``textLength`` keeps it in its columns whatever the font."""
    x, y, width = MARGIN + column * ADVANCE, MARGIN + row * LINE, len(piece.text) * ADVANCE
    drawn = f'<rect class="{piece.kind}" x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{LINE - 3}" rx="3"/>'
    if piece.text.strip():
        text = f'<text class="{piece.kind} {classes}" x="{x:.1f}" y="{y + 13.5:.1f}" textLength="{width:.1f}"'
        drawn += f'{text} xml:space="preserve">{escape(piece.text)}</text>'
    return drawn


def svg(pieces: list[Piece], rounds: int) -> str:
    """The picture."""
    boxes = list(placed(pieces))
    counts = Counter(piece.kind for piece in pieces)
    below = boxes[-1][0] + 2
    parts = [box(row, column, piece) for row, column, piece in boxes]
    total = sum(counts[kind] for kind in LEGEND if kind != "prompt")
    legend = {kind: f"{LEGEND[kind]} ({counts[kind]})" for kind in LEGEND if kind != "prompt"}
    for number, (kind, words) in enumerate(legend.items()):
        parts.append(box(below + number, 0, Piece("  ", kind)))
        place = f'x="{MARGIN + 3 * ADVANCE:.1f}" y="{MARGIN + (below + number) * LINE + 13.5:.1f}"'
        parts.append(f'<text class="note" {place}>{escape(words)}</text>')
    words = f"{total} tokens in {rounds} rounds (k = {K}); plain decoding gives the same tokens one by one"
    last = below + len(legend)
    parts.append(f'<text class="note" x="{MARGIN}" y="{MARGIN + last * LINE + 13.5:.1f}">{words}</text>')
    width, height = 2 * MARGIN + COLUMNS * ADVANCE, 2 * MARGIN + (last + 1) * LINE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img">'
    title = "<title>A text of the demo pair; each token coloured by who wrote it</title>"
    return "\n".join([head, title, f"<style>{STYLE}\n</style>", *parts, "</svg>", ""])


def main() -> None:
    """Generate and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=52, help="which of the demo prompts")
    parser.add_argument("--tokens", type=int, default=43, help="how many new tokens")
    options = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    OUT.write_text(svg(*generation(prompts[options.prompt], options.tokens)))


if __name__ == "__main__":
    main()
