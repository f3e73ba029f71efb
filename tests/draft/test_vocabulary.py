"""A draft with other ids than the target: it drafts what both have, and no token of the text depends on it."""

from __future__ import annotations

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError, PairingError
from paceline.draft.vocab_map import IntersectionVocabMap, VocabMap
from tests.decoder.tiny import Workshop
from tests.fakes import TableDecoder, near, table

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
    with pytest.raises(ConfigurationError, match="'same', 'intersection', 'retokenize'"):
        SpeculativeGenerator(draft, target, vocabulary="union")


def test_equal_vocabularies_share_all_tokens(workshop: Workshop) -> None:
    """Real decoders, eager: an intersection that is the identity drafts what no intersection drafts."""
    draft, target = workshop.pair()
    plain = SpeculativeGenerator(draft, target, k=3)
    wanted = plain.sample(PROMPTS, max_new_tokens=20)
    size = target.config.vocab_size
    words = {str(i): i for i in range(size)}
    plain.drafter.vocabulary = IntersectionVocabMap(words, words, sizes=(size, size))  # type: ignore[union-attr]
    assert torch.equal(plain.sample(PROMPTS, max_new_tokens=20), wanted)
    assert plain.statistics.num_accepted_tokens > 0
