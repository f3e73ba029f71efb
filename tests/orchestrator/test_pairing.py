"""Draft and target must mean the same by their ids; their vocabularies may be padded to different sizes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.errors import PairingError
from paceline.outputs import GenerationResult
from tests.fakes import Checked, TableDecoder, near, table
from tests.fakes_models import load, network, saved

WORDS = {f"w{i}": i for i in range(40)}


def pair(tmp_path: Path, sizes: tuple[int, int], words: tuple[dict[str, int] | None, dict[str, int] | None]) -> None:
    paths = [
        saved(network(layers=1, vocab_size=size), tmp_path / name, words=own)
        for name, size, own in zip(("draft", "target"), sizes, words, strict=True)
    ]
    SpeculativeGenerator(*[load(path) for path in paths])


@pytest.mark.parametrize("sizes", [(40, 40), (40, 48), (48, 40)])
def test_equal_tokenizers_pair_whatever_the_padding(tmp_path: Path, sizes: tuple[int, int]) -> None:
    pair(tmp_path, sizes, (WORDS, dict(WORDS)))


def test_equal_sizes_without_tokenizers_pair(tmp_path: Path) -> None:
    pair(tmp_path, (40, 40), (None, None))


def test_more_added_tokens_than_the_smaller_model_has_ids_pair(tmp_path: Path) -> None:
    pair(tmp_path, (40, 48), (WORDS, WORDS | {"extra": 44}))


def test_sizes_that_differ_need_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(PairingError, match=r"40 and 48 ids, got none"):
        pair(tmp_path, (40, 48), (WORDS, None))


def test_tokens_with_other_ids_are_named(tmp_path: Path) -> None:
    swapped = WORDS | {"w3": 4, "w4": 3}
    with pytest.raises(PairingError, match=r"2 other ids, such as 'w3' \(3 and 4\)"):
        pair(tmp_path, (40, 40), (WORDS, swapped))


@pytest.mark.parametrize("says_so", [True, False])
def test_a_padding_token_may_have_another_name(tmp_path: Path, says_so: bool) -> None:
    """Padding may have the same id: no text holds it. Any other token must have its name."""
    pads = {"draft": "<end>", "target": "w9"}
    for name, pad in pads.items():
        words = {(pad if number == 9 else word): number for word, number in WORDS.items()}
        folder = saved(network(layers=1), tmp_path / name, words=words)
        (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad} if says_so else {}))
    with nullcontext() if says_so else pytest.raises(PairingError, match="2 other ids, such as '<end>'"):
        SpeculativeGenerator(*[load(tmp_path / name) for name in pads])


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = saved(network(layers=1), tmp_path / "one", words=WORDS)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(PairingError, match=r"tokenizer.json: the tokenizer cannot be read"):
        SpeculativeGenerator(load(folder), load(folder))


@pytest.mark.parametrize("acceptor", ["match", "reject"])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("sizes", [(12, 16), (16, 12)])
@pytest.mark.parametrize("asked", [{}, {"do_sample": True, "seed": 4}], ids=["greedy", "sampled"])
def test_vocabularies_of_two_sizes_work_together(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], asked: dict[str, object], acceptor: str, scores: bool
) -> None:
    monkeypatch.setattr("paceline.vocab_compat.check_same_tokenizer", lambda *_: None)  # tables have no tokenizer
    big = table(16, seed=8, spread=2.0)
    draft, target = (
        TableDecoder((near(big, seed=9, spread=0.3) if i == 0 else big)[:size, :size, :size].contiguous())
        for i, size in enumerate(sizes)
    )
    one = Checked(draft, target, acceptor=acceptor)
    got = one.sample([[1, 2, 3]], return_dict=True, output_scores=scores, **asked)  # type: ignore[arg-type]
    assert isinstance(got, GenerationResult)
    assert int(got.sequences.max()) < sizes[1]
    assert got.statistics.num_accepted_tokens > 0
    if acceptor == "match":
        plain = SpeculativeGenerator(None, target).sample([[1, 2, 3]], **asked)  # type: ignore[arg-type]
        assert torch.equal(got.sequences, plain)  # type: ignore[arg-type]
