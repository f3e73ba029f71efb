"""What the benchmark runs beside our own modes works on the same checkpoints; no time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

from paceline import bench
from tests.decoder.tiny import fresh, save_pair


def test_hugging_face_takes_a_checkpoint_whose_list_of_end_ids_is_empty(tmp_path: Path) -> None:
    save_pair(tmp_path)
    for path in tmp_path.glob("*/*config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": []}))
    modes = bench._hugging_face(str(tmp_path / "target"), str(tmp_path / "draft"), 6)
    texts = {mode.name: mode.run([5, 9, 5]).tokens for mode in modes}
    ours = fresh(tmp_path / "target").sample([[5, 9, 5]], max_new_tokens=6)
    assert texts["transformers generate f32"] == texts["transformers assisted f32"] == ours[0, 3:].tolist()  # type: ignore[union-attr]
    assert all(len(text) == 6 for text in texts.values())
