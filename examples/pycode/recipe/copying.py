"""Rows in which a piece of a file is asked for a second time, with a name changed, and follows.

    python -m recipe.copying --work W --tokenizer T

Writes ``copies.bin`` from ``train.bin`` and ``copies_held_out.bin`` from ``held_out.bin``: rows of `ROW` ids. A model
that saw such rows goes on with a copy where the line of `request` asks for one, and need not do so anywhere else.
"""

import argparse
import keyword
import random
import re
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipe.modelling import CONTEXT, END_ID

ROW = CONTEXT // 2
LONGEST, SHORTEST = 230, 40  # tokens of the piece
NAMES = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{2,}\b")
FORMS = ("{}_2", "{}s", "new_{}", "my_{}", "{}_other", "_{}")
OTHER = 0.3  # how often the new name is one that the piece has already


def request(old: str, new: str) -> str:
    """What stands between a text and its copy."""
    return f"\n\n# The same with `{old}` renamed to `{new}`:\n\n"


def renamed(text: str, old: str, new: str) -> str:
    """The text with one whole word in place of another."""
    return re.sub(rf"\b{re.escape(old)}\b", new.replace("\\", r"\\"), text)


def task(piece: str, draw: random.Random) -> str | None:
    """A piece of a file, the request, and the piece as it is wanted. None: there is no name in it."""
    names = [name for name in NAMES.findall(piece) if not keyword.iskeyword(name)]
    if not names:
        return None
    old = draw.choice(names)  # those that stand often are drawn often
    others = [name for name in names if name != old] if draw.random() < OTHER else []
    new = draw.choice(others or [form.format(old) for form in FORMS])
    return piece + request(old, new) + renamed(piece, old, new)


class Copies:
    """Tasks out of a stream of ids."""

    def __init__(self, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.ids, self.tokenizer, self.draw = ids, tokenizer, random.Random(seed)

    def piece(self) -> str:
        """Whole lines of one file."""
        length = self.draw.randint(SHORTEST, LONGEST)
        at = self.draw.randrange(len(self.ids) - length)
        file = self.ids[at : at + length].tolist()
        if END_ID in file:
            file = file[file.index(END_ID) + 1 :]
        return self.tokenizer.decode(file).partition("\n")[2].rpartition("\n")[0].strip("\n")

    def row(self) -> list[int]:
        """Tasks until a row is full; the last is cut."""
        row: list[int] = []
        while len(row) < ROW:
            text = task(self.piece(), self.draw)
            if text is not None:
                row += [*self.tokenizer(text).input_ids, END_ID]
        return row[:ROW]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder with the corpus; rows go there")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--held-out-rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for source, result, rows in (
        ("train.bin", "copies.bin", args.rows),
        ("held_out.bin", "copies_held_out.bin", args.held_out_rows),
    ):
        made = Copies(np.fromfile(args.work / source, dtype=np.uint16), tokenizer, args.seed)
        # `Chunks` wants an id behind the last row.
        stream = [i for _ in range(rows) for i in made.row()] + [END_ID]
        np.asarray(stream, dtype=np.uint16).tofile(args.work / result)


if __name__ == "__main__":
    main()
