"""Suffix automaton against brute force, a text followed over the tokens that it changes, and the drafters on top."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import FunctionDrafter, SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits, SamplingTensors
from paceline.decoder.token_files import write_tokens
from paceline.draft.choice import FallbackDrafter
from paceline.draft.suffix import CopyTracker, OutputCorpus, SuffixAutomaton, SuffixDrafter
from tests.decoder.tiny import Workshop
from tests.fakes import TableDecoder, table

texts = st.lists(st.integers(0, 3), max_size=40)


def grown(tokens: list[int]) -> SuffixAutomaton:
    made = SuffixAutomaton()
    for token in tokens:
        made.append(token)
    return made


def longest_repeat(tokens: list[int]) -> int:
    """Length of the longest end that also ends earlier."""
    for length in range(len(tokens) - 1, 0, -1):
        end = tokens[-length:]
        if any(tokens[at : at + length] == end for at in range(len(tokens) - length)):
            return length
    return 0


@given(texts)
def test_the_longest_repetition_and_one_of_its_positions_are_found(tokens: list[int]) -> None:
    automaton = grown(tokens)
    length, at = automaton.repeated()
    assert length == longest_repeat(tokens)
    if length:
        assert at < len(tokens)
        assert tokens[at - length : at] == tokens[-length:]


@given(texts, texts)
def test_a_text_is_matched_by_its_longest_known_suffix(known: list[int], other: list[int]) -> None:
    automaton = grown(known)
    state = length = 0
    for count, token in enumerate(other, start=1):
        state, length = automaton.follow(state, length, token)
        ends = [
            n for n in range(count + 1) if any(known[i : i + n] == other[count - n : count] for i in range(len(known)))
        ]
        assert length == max(ends, default=0)
        if length:
            at = automaton.end_of(state)
            assert known[at - length : at] == other[count - length : count]


def test_the_latest_repetition_wins() -> None:
    automaton = grown([1, 2, 7, 1, 2, 8, 1, 2])
    assert automaton.repeated() == (2, 5)


def commit(tokens: list[int], start: int) -> Commit:
    row = torch.tensor([tokens], dtype=torch.int32)
    return Commit(row, torch.tensor([len(tokens)], dtype=torch.int32), torch.tensor([start], dtype=torch.int32))


def proposed(drafter: SuffixDrafter, slot: int = 0) -> list[int]:
    slots = slot + 1
    empty = Commit(torch.zeros(slots, 1).int(), torch.ones(slots).int(), torch.zeros(slots).int())
    params = SamplingTensors(torch.zeros(slots, 4), torch.zeros(slots, 4).int())
    row = drafter.propose(empty, params, RoundLimits([9] * slots, 1)).tokens[slot].tolist()
    return [token for token in row if token != PAD]


def test_short_repetitions_propose_nothing() -> None:
    drafter = SuffixDrafter(4, min_match=3)
    drafter.add_request(0, [1, 2, 3, 9, 2, 3])
    assert proposed(drafter) == []
    drafter.update(commit([9, 2, 3], 6))
    assert proposed(drafter) == [9, 2, 3]


def test_a_repetition_of_few_tokens_proposes_few() -> None:
    drafter = SuffixDrafter(8)
    drafter.add_request(0, [1, 2, 9, 8, 7, 6, 5, 4, 3, 0, 1, 2])
    assert drafter.draft_lengths == (4, 8) and proposed(drafter) == [9, 8, 7, 6], "twice as many"
    drafter.update(commit([9, 8, 7], 12))
    assert proposed(drafter) == [6, 5, 4, 3, 0, 1, 2, 9]
    wide = SuffixDrafter(8, max_spec_factor=0.5)
    wide.add_request(0, [1, 2, 9, 8, 1, 2])
    assert proposed(wide) == [9] and wide.shortened(2).draft_lengths == (2,)
    with pytest.raises(ConfigurationError, match="max_spec_factor: expected at least 1 draft token after a"):
        SuffixDrafter(8, max_spec_factor=0.4)


def test_earlier_outputs_are_shared_and_prompts_are_not() -> None:
    drafter = SuffixDrafter(3, max_cached_tokens=100)
    drafter.add_request(0, [7, 7, 7])
    drafter.update(commit([1, 2, 3, 4, 5], 3))
    drafter.add_request(1, [9])  # while the first is under way
    drafter.finish_request(0)
    drafter.update(Commit(torch.tensor([[0, 0], [2, 3]]).int(), torch.tensor([1, 2]).int(), torch.tensor([0, 1]).int()))
    assert proposed(drafter, 1) == [4, 5]
    drafter.finish_request(1)
    drafter.add_request(0, [7, 7])
    assert proposed(drafter) == []


def test_a_corpus_keeps_its_size_and_the_newest_texts() -> None:
    corpus = OutputCorpus(20)
    for at in range(30):
        corpus.add([at, at + 1, at + 2])
        assert len(corpus.automaton.tokens) <= 24
    assert 31 in corpus.automaton.tokens and 3 not in corpus.automaton.tokens
    least = OutputCorpus(1)
    for _ in range(9):
        least.add([1, 2, 3])
    assert len(least.automaton.tokens) <= 1
    with pytest.raises(ConfigurationError, match="max_cached_tokens: expected at least 1, got"):
        OutputCorpus(0)


SOURCE = list(range(100, 160))


def aligned(run: int = 32) -> CopyTracker:
    made = CopyTracker()
    made.begin(SOURCE, 0, run)
    return made


@given(st.integers(1, 50), st.integers(0, 59), st.integers(0, 9))
def test_a_repetition_is_followed(run: int, count: int, ahead: int) -> None:
    text = aligned(run)
    text.follow(SOURCE[:count])
    assert text.run == run + count and text.ahead(ahead) == SOURCE[count : count + ahead]


def test_a_changed_token_is_substituted_from_then_on() -> None:
    text = CopyTracker()
    text.begin([1, 5, 2, 5, 3, 5, 4], 0, 32)
    text.follow([1, 9])
    assert text.run == 33 // 8 and text.ahead(4) == [2, 5, 3, 5], "it may be a change or the end"
    text.follow([2])
    assert text.ahead(4) == [9, 3, 9, 4], "it was a change"
    text.follow([9, 3])
    assert text.run == 33 // 8 + 3
    text.follow([5])
    assert text.ahead(1) == [4] and text.run == 33 // 8 + 4, "as in the source, which is no change"
    text.begin([5, 5], 0, 8)
    assert text.ahead(2) == [5, 5], "it is not changed everywhere"


def test_two_consecutive_mismatches_end_a_repetition() -> None:
    text = aligned()
    text.follow([100, 7, 8, 103, 104])
    assert text.run == 0
    text.begin(SOURCE, 0, 3)
    text.follow([7])
    assert text.run == 1, "so short a one proposes nothing, and may grow again"
    text.follow(SOURCE[1:])
    assert text.run == 60
    text.follow([1])
    assert text.run == 0, "behind the end of the source there is nothing"


def test_a_separator_ends_a_repetition() -> None:
    """A separator, such as between two outputs in a corpus."""
    text = CopyTracker()
    text.begin([*SOURCE, -2, 1, 2, 3], 0, 32)
    text.follow([*SOURCE, 9, 1])
    assert text.run == 0


def test_a_text_without_repetition_is_not_followed() -> None:
    text = CopyTracker()
    text.follow([1, 2, 3])
    assert text.run == 0 and text.ahead(3) == []


def test_a_copy_with_another_name_takes_few_rounds() -> None:
    """The name stands at every seventh place: where a token that differs is an end, no round gets past it."""
    name, other = 0, 1
    file = [token for line in range(6) for token in (*range(2 + 6 * line, 8 + 6 * line), name)]
    whole = [*file, *(other if token == name else token for token in file)]
    drafter, at = SuffixDrafter(8), len(file) + 12  # in the second line of the copy
    drafter.add_request(0, whole[:at])
    gained: list[int] = []
    while at < len(whole):
        (drafts,) = drafter.chains(commit([PAD], at), sampling_tensors([Sampling()]), RoundLimits([8], at))
        stand = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, whole[at:], strict=False)))
        tokens = whole[at : at + stand + 1]
        gained.append(len(tokens))
        drafter.update(commit(tokens, at))
        at += len(tokens)
    # To the name; one token, for it may have been the end; twice as many as are repeated by then; and then all.
    assert gained == [2, 1, 5, 9, 9, 4]


V = 12
TARGET = table(V, seed=0, spread=2.5)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6], [7, 8], [1, 2, 3]]


def test_the_model_is_skipped_during_repetitions_and_catches_up() -> None:
    """The target as draft after a function that is right now and then: everything the model proposes is accepted."""
    one, other = TableDecoder(TARGET), TableDecoder(TARGET, kv_buckets=(48,))  # it cannot follow to the end
    text = TableDecoder(TARGET).sample([PROMPTS[0]], max_new_tokens=50)[0].tolist()

    def sometimes(seen: list[int]) -> list[int]:
        return text[len(seen) : len(seen) + 2] if len(seen) % 3 else []

    maker = SpeculativeGenerator([sometimes, other], one, k=3)
    assert maker.sample([PROMPTS[0]], max_new_tokens=50)[0].tolist() == text
    assert maker.statistics.num_accepted_tokens == maker.statistics.num_draft_tokens
    assert other.body.forwards < one.body.forwards * 3


def test_drafters_in_a_list_may_have_separate_depths() -> None:
    """The function drafts k tokens, the model two, and neither changes a token."""
    text = TableDecoder(TARGET).sample([PROMPTS[0]], max_new_tokens=50)[0].tolist()

    def sometimes(seen: list[int]) -> list[int]:
        return text[len(seen) : len(seen) + 9] if len(seen) % 2 else []

    maker = SpeculativeGenerator([sometimes, (TableDecoder(TARGET), 2)], TableDecoder(TARGET), k=6)
    assert maker.sample([PROMPTS[0]], max_new_tokens=50)[0].tolist() == text
    counts = maker.statistics.num_accepted_tokens_per_pos
    assert maker.statistics.num_accepted_tokens == maker.statistics.num_draft_tokens and len(counts) == 6
    assert counts[1] > counts[2] >= counts[5] > 0


REPEATS = [[3, 4, 5, 3, 4, 5, 3, 4]]


def test_short_proposals_of_a_list_have_a_separate_graph_built_ahead(workshop: Workshop) -> None:
    """A model's two tokens are not verified in a window for six; and nothing is compiled while a user waits."""
    draft, target = workshop.pair(backend="eager")
    target = target.sibling()  # with graphs of its own
    plain = target.sample(REPEATS, max_new_tokens=60)
    maker = SpeculativeGenerator(["suffix", (draft, 2)], target, k=6, exact=False)
    maker.compile()
    made = {key for key, _ in target._steps}
    for rows in (1, 3, 7):
        assert any((key.kind, key.rows) == ("verify", rows) for key in made), made
    assert torch.equal(maker.sample(REPEATS, max_new_tokens=60), plain)
    assert maker.statistics.num_draft_tokens and {key for key, _ in target._steps} == made


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("draft", ["ngram", "suffix", FunctionDrafter(lambda text: text[:3], 4)])
def test_drafters_without_a_proposal_for_the_warmup_have_their_graphs_built(
    workshop: Workshop, draft: object, exact: bool
) -> None:
    target = workshop.pair(backend="eager")[1].sibling()
    maker = SpeculativeGenerator(draft, target, k=4, exact=exact)  # type: ignore[arg-type]
    maker.compile()
    made = set(target._steps)
    maker.sample(REPEATS, max_new_tokens=40)
    assert maker.statistics.num_draft_tokens and set(target._steps) == made


@pytest.mark.parametrize(
    "names", [["none", "ngram"], [None, "ngram"], ["ngram", "none"], ["none"], [FunctionDrafter(list, 0)]]
)
@pytest.mark.parametrize("k", [3, (0, 2)])
def test_a_list_may_hold_a_drafter_that_proposes_nothing(names: list[object], k: int | tuple[int, ...]) -> None:
    if isinstance(k, tuple) and "ngram" not in names:
        pytest.skip("a lengths needs a drafter that deep")
    plain = TableDecoder(TARGET).sample([PROMPTS[0]], max_new_tokens=20)
    maker = SpeculativeGenerator(names, TableDecoder(TARGET), k=k)  # type: ignore[arg-type]
    assert torch.equal(maker.sample([PROMPTS[0]], max_new_tokens=20), plain)
    assert (maker.statistics.num_draft_tokens > 0) == ("ngram" in names)


def test_a_corpus_in_a_file_is_drafted_from_and_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "corpus.bin"
    write_tokens(path, [[7, 8, 9, 10, 11], [8, 12, 13]], vocab_size=16)
    drafter = SuffixDrafter(3, min_match=2, corpus=str(path))
    text = drafter.new_text([1, 2, 8, 9])
    assert drafter.propose_text(text, 3) == [10, 11, 8]
    plain = SuffixDrafter(3, min_match=2)
    assert plain.propose_text(plain.new_text([1, 2, 8, 9]), 3) == []
    drafter.extend(text, [3, 4, 5])
    drafter.finish(text)
    assert drafter.propose_text(drafter.new_text([0, 3, 4]), 3) == []


def test_an_unusable_corpus_and_an_empty_list_are_rejected(tmp_path: Path) -> None:
    empty, bare = tmp_path / "empty.bin", tmp_path / "bare.bin"
    write_tokens(empty, [], vocab_size=16)
    bare.write_bytes(b"12345678")
    for wrong, message in (
        (tmp_path / "none.bin", "does not exist"),
        (empty, "corpus: expected at least one token, got an empty file"),
        (bare, "expected a header"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            SuffixDrafter(3, corpus=wrong)
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        SuffixDrafter(3, corpus=empty, max_cached_tokens=10)
    with pytest.raises(ConfigurationError, match="at least one"):
        FallbackDrafter([])
