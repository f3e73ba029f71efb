"""The part of the demo pair's recipe that makes tasks of copying: what is asked for, and what follows."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

PYCODE = Path(__file__).parents[2] / "examples" / "pycode"
TEXT = 'def area(width, height):\n    """Width, times height."""\n    return width * height\n'


def test_a_name_is_changed_where_it_is_a_whole_word() -> None:
    from recipe.copying import renamed

    assert renamed(TEXT, "width", "width_2") == TEXT.replace("(width", "(width_2").replace("n width", "n width_2")
    assert renamed("a.b ab a", "a", r"\1") == r"\1.b ab \1"


def test_a_task_is_a_text_a_request_and_the_text_with_the_edit() -> None:
    from recipe.copying import NAMES, renamed, request, task

    seen = set()
    for seed in range(200):
        made = task(TEXT, random.Random(seed))
        assert made is not None and made.startswith(TEXT)
        asked = next(line for line in made.splitlines() if line.startswith("# The same"))
        old, new = asked.split("`")[1::2]
        assert old in NAMES.findall(TEXT) and old not in ("def", "return") and old != new
        assert made == TEXT + request(old, new) + renamed(TEXT, old, new)
        seen.add((old, new))
    assert len(seen) > 20
    assert task("x = 1\n", random.Random(0)) is None


def test_rows_are_full_and_their_tasks_come_from_one_file() -> None:
    from recipe.copying import LONGEST, ROW, Copies
    from recipe.modelling import END_ID

    tokenizer = AutoTokenizer.from_pretrained(PYCODE / "target")
    files = [f"class Thing{i}:\n    name = {i}\n\n" + TEXT * 12 for i in range(5)]
    ids = [i for file in files for i in [*tokenizer(file).input_ids, END_ID]]
    copies = Copies(np.asarray(ids, dtype=np.uint16), tokenizer, 0)
    pieces = [copies.piece() for _ in range(50)]
    assert max(len(tokenizer(piece).input_ids) for piece in pieces) <= LONGEST
    assert all(piece.count("class Thing") <= 1 and "endoftext" not in piece for piece in pieces)
    row = copies.row()
    assert len(row) == ROW and END_ID in row and "# The same with `" in tokenizer.decode(row)
