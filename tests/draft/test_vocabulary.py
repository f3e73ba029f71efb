"""Draft and target mean the same by their ids, or it drafts what both have; their vocabularies may differ in size."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.errors import PairingError
from paceline.draft.vocab_map import IntersectionVocabMap, VocabMap
from tests.fakes import Checked, TableDecoder, near, table
from tests.fakes_models import load, network, saved
from tests.sampled import run, texts

V = 12
TARGET = table(V, seed=0, spread=2.0)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6], [7, 8]]
WORDS = {f"w{i}": i for i in range(V)}


def test_ids_and_logits_are_mapped_by_the_shared_tokens() -> None:
    made = IntersectionVocabMap({"a": 0, "b": 1, "c": 2}, {"c": 0, "x": 1, "a": 3}, sizes=(4, 5), unknown=1)
    assert made.shared == 2
    assert made.ids([0, 1, 2, 3]) == [3, 1, 0, 1]
    assert made.known(torch.tensor([0, 1, 2, -1], dtype=torch.int32)).tolist() == [3, 1, 0, 3]
    spread = made.logits(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]))
    assert spread[[0, 2]].tolist() == [3.0, 0.0]
    assert bool((spread[[1, 3]] < -1e29).all())


def test_equal_ids_are_cut_to_the_smaller_vocabulary() -> None:
    made = VocabMap(6, 4)
    assert made.ids([0, 5]) == [0, 3]
    assert made.logits(torch.zeros(2, 4)).shape == (2, 4)
    assert VocabMap(3, 4).logits(torch.zeros(4)).shape == (3,)


def shuffled(seed: int, kept: int) -> tuple[torch.Tensor, dict[str, int]]:
    """The target's table under other ids, the last words replaced, and the vocabulary that says which."""
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    names = {(f"w{i}" if i < kept else f"other{i}"): int((order == i).nonzero()) for i in range(V)}
    return TARGET[order][:, order][:, :, order].contiguous(), names


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("heat", [{}, {"do_sample": True, "seed": 4}, {"do_sample": True, "seed": 4, "top_k": 3}])
@pytest.mark.parametrize("kept", [V, 8])
def test_a_draft_with_other_ids_is_coupled_and_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, kept: int, heat: dict, fused: bool | None
) -> None:
    logits, names = shuffled(3, kept)
    plain = TableDecoder(TARGET, slots=2).sample(PROMPTS, max_new_tokens=40, **heat)
    draft, target = TableDecoder(logits, slots=2), TableDecoder(TARGET, slots=2)
    draft.folder, target.folder = "draft", "target"  # type: ignore[assignment]
    monkeypatch.setattr("paceline.vocab_compat._vocabulary", lambda folder: names if folder == "draft" else WORDS)
    # Its cache holds its own ids, so it is not checked against the text; the target's is.
    maker = SpeculativeGenerator(draft, target, k=3, vocabulary="intersection", fused=fused)
    made = maker.sample(PROMPTS, max_new_tokens=40, return_dict=True, **heat)
    assert torch.equal(made.sequences, plain)
    if kept == V:
        assert made.statistics.acceptance_rate == 1.0  # the same distribution under other ids, and the same noise
    else:
        assert 0.1 < made.statistics.acceptance_rate < 1.0


def test_vocabularies_with_too_few_shared_tokens_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, target = TableDecoder(near(TARGET, seed=1, spread=1.0)), TableDecoder(TARGET)
    with pytest.raises(PairingError, match=r"expected a tokenizer\.json"):
        SpeculativeGenerator(draft, target, vocabulary="intersection")
    draft.folder, target.folder = "draft", "target"  # type: ignore[assignment]
    monkeypatch.setattr("paceline.vocab_compat._vocabulary", lambda folder: {"x": 0} if folder == "draft" else WORDS)
    with pytest.raises(PairingError, match="one with 0 of its 12 tokens"):
        SpeculativeGenerator(draft, target, vocabulary="intersection")


FORTY = {f"w{i}": i for i in range(40)}


@pytest.mark.parametrize(
    ("sizes", "words", "said"),
    [
        *((sizes, (FORTY, dict(FORTY)), None) for sizes in ((40, 40), (40, 48), (48, 40))),
        ((40, 40), (None, None), None),
        ((40, 48), (FORTY, FORTY | {"extra": 44}), None),  # more added tokens than the smaller model has ids
        ((40, 48), (FORTY, None), r"40 and 48 ids, got none"),
        ((40, 40), (FORTY, FORTY | {"w3": 4, "w4": 3}), r"2 other ids, such as 'w3' \(3 and 4\)"),
    ],
)
def test_models_pair_whose_tokenizers_give_the_same_ids(
    tmp_path: Path, sizes: tuple[int, int], words: tuple[dict[str, int] | None, ...], said: str | None
) -> None:
    """Whatever the sizes to which their tables are padded."""
    paths = [
        saved(network(layers=1, vocab_size=size), tmp_path / name, words=own)
        for name, size, own in zip(("draft", "target"), sizes, words, strict=True)
    ]
    with pytest.raises(PairingError, match=said) if said else nullcontext():
        SpeculativeGenerator(*[load(path) for path in paths])


@pytest.mark.parametrize("says_so", [True, False])
def test_a_padding_token_may_have_another_name(tmp_path: Path, says_so: bool) -> None:
    """Padding may have the same id: no text holds it. Any other token must have its name."""
    pads = {"draft": "<end>", "target": "w9"}
    for name, pad in pads.items():
        words = {(pad if number == 9 else word): number for word, number in FORTY.items()}
        folder = saved(network(layers=1), tmp_path / name, words=words)
        (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad} if says_so else {}))
    with nullcontext() if says_so else pytest.raises(PairingError, match="2 other ids, such as '<end>'"):
        SpeculativeGenerator(*[load(tmp_path / name) for name in pads])


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = saved(network(layers=1), tmp_path / "one", words=FORTY)
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
    got = run(Checked(draft, target, acceptor=acceptor), [[1, 2, 3]], output_scores=scores, **asked)
    assert int(got.sequences.max()) < sizes[1]
    assert got.statistics.num_accepted_tokens > 0
    if acceptor == "match":
        assert texts(got) == texts(run(SpeculativeGenerator(None, target), [[1, 2, 3]], **asked))
