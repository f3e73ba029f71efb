"""`Match`: what stands is the path of agreement from the root, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import tree
from paceline.core.accept import Match, committed
from paceline.core.types import PAD, Proposal, Verdict


def ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def walk(drafts: list[int], parents: tuple[int, ...], choices: list[int]) -> tuple[list[int], int]:
    """Rows of the accepted path and the token after it, by walking down from the root."""
    node, rows = tree.ROOT, []
    while True:
        wanted = choices[node + 1]
        children = [n for n, parent in enumerate(parents) if parent == node and drafts[n] == wanted != PAD]
        if not children:
            return rows, wanted
        node = children[0]
        rows.append(node + 1)


def kept(verdict: Verdict, slot: int) -> list[int]:
    path, count = verdict.path[slot].tolist(), int(verdict.count[slot])
    assert path[count:] == [PAD] * (len(path) - count)
    return path[:count]


tokens = st.integers(-1, 3)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    slots, size = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    drafts = [draw(st.lists(tokens, min_size=size, max_size=size)) for _ in range(slots)]
    choices = [draw(st.lists(st.integers(0, 3), min_size=size + 1, max_size=size + 1)) for _ in range(slots)]
    return drafts, choices


@given(chains())
def test_a_chain_stands_up_to_the_first_disagreement(case: tuple[list[list[int]], list[list[int]]]) -> None:
    drafts, choices = case
    size = len(drafts[0])
    proposal = Proposal(ints(*drafts).view(len(drafts), size))
    verdict = Match()(proposal, ints(*choices))
    out = committed(proposal, verdict)
    for slot, line in enumerate(drafts):
        rows, token = walk(line, tree.chain(size), choices[slot])
        assert (kept(verdict, slot), int(verdict.token[slot])) == (rows, token)
        assert out[slot].tolist() == [line[row - 1] for row in rows] + [token] + [PAD] * (size - len(rows))


@st.composite
def token_trees(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], list[list[int]]]:
    size, slots = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    drafts = [draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size)) for _ in range(slots)]
    choices = [draw(st.lists(st.integers(0, 2), min_size=size + 1, max_size=size + 1)) for _ in range(slots)]
    return parents, drafts, choices


@given(token_trees())
def test_a_tree_without_twins_is_walked_from_the_root(
    case: tuple[tuple[int, ...], list[list[int]], list[list[int]]],
) -> None:
    parents, drafts, choices = case
    for line in drafts:  # twins have a test of their own
        met: set[tuple[int, int]] = set()
        for node, token in enumerate(line):
            if (parents[node], token) in met:
                line[node] = PAD
            met.add((parents[node], token))
    proposal = Proposal(ints(*drafts), parents)
    verdict = Match()(proposal, ints(*choices))
    out = committed(proposal, verdict)
    for slot, line in enumerate(drafts):
        rows, token = walk(line, parents, choices[slot])
        assert (kept(verdict, slot), int(verdict.token[slot])) == (rows, token)
        assert out[slot].tolist()[: len(rows) + 1] == [line[row - 1] for row in rows] + [token]


@given(token_trees())
def test_twins_commit_what_the_target_chose_along_one_path(
    case: tuple[tuple[int, ...], list[list[int]], list[list[int]]],
) -> None:
    parents, drafts, choices = case
    for line, chosen in zip(drafts, choices, strict=True):  # twins see the same text, so their choices are the same
        same: dict[tuple[int, int], int] = {}
        ways: list[int] = []
        for node, token in enumerate(line):
            up = -1 if parents[node] < 0 else ways[parents[node]]
            first = same.setdefault((up, token), node)
            ways.append(first)
            chosen[node + 1] = chosen[first + 1]
    proposal = Proposal(ints(*drafts), parents)
    verdict = Match()(proposal, ints(*choices))
    out = committed(proposal, verdict)
    for slot, line in enumerate(drafts):
        merged = tuple(-1 if p < 0 else _first(parents, line, p) for p in parents)
        rows, token = walk(line, merged, choices[slot])
        count = int(verdict.count[slot])
        assert out[slot, : count + 1].tolist() == [line[row - 1] for row in rows] + [token]


def _first(parents: tuple[int, ...], line: list[int], node: int) -> int:
    """The lowest node with the same tokens on its way from the root."""

    def spelled(n: int) -> list[int]:
        return [] if n < 0 else [*spelled(parents[n]), line[n]]

    return next(n for n in range(len(parents)) if spelled(n) == spelled(node))


def test_padding_is_never_accepted_and_id_zero_is() -> None:
    """A target that chooses id 0 (or, by accident, -1) must not find it in the padding of a short proposal."""
    verdict = Match()(Proposal(ints([PAD, PAD], [0, PAD])), ints([0, 0, 0], [0, 0, 0]))
    assert verdict.count.tolist() == [0, 1]
    assert verdict.token.tolist() == [0, 0]
    assert Match()(Proposal(ints([PAD])), ints([PAD, 5])).count.tolist() == [0]
    assert Match()(Proposal(ints([PAD, 3]), (-1, 0)), ints([PAD, 3, 4])).count.tolist() == [0]


def test_accepted_ids_that_are_zero_are_counted() -> None:
    verdict = Match()(Proposal(ints([0, 2, 3])), ints([0, 2, 3, 9]))
    assert verdict.count.tolist() == [3]
    assert verdict.token.tolist() == [9]


def test_nothing_proposed_commits_the_target_s_own_token() -> None:
    proposal = Proposal(torch.empty(2, 0, dtype=torch.int32))
    verdict = Match()(proposal, ints([4], [0]))
    assert verdict.count.tolist() == [0, 0]
    assert committed(proposal, verdict).tolist() == [[4], [0]]


TRT_PATHS = [[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [0, 0, 0], [0, 1, 1], [1, 0, 0]]


def parents_of(paths: list[list[int]]) -> tuple[int, ...]:
    """Parents of a tree given by its paths; TensorRT-LLM numbers [0, 1, 1] without a [0, 1, 0] before it."""
    return tuple(paths.index(path[:-1]) if path[:-1] else tree.ROOT for path in paths)


@pytest.mark.parametrize(
    ("agreed", "out"),
    [((), [31]), ((0, 4), [11, 15, 105]), ((0, 3, 9), [11, 14, 20, 110])],
    ids=["none", "two", "three"],
)
def test_the_static_tree_cases_of_tensorrt_llm(agreed: tuple[int, ...], out: list[int]) -> None:
    parents, drafts = parents_of(TRT_PATHS), list(range(11, 23))
    choices = [31, *range(101, 113)]
    for node in agreed:
        choices[parents[node] + 1] = drafts[node]
    proposal = Proposal(ints(drafts), parents)
    found = committed(proposal, Match()(proposal, ints(choices)))[0].tolist()
    assert found[: len(out)] == out
    assert set(found[len(out) :]) <= {PAD}


def test_the_two_trees_of_sglang() -> None:
    """Candidates 0..5 and 6..11; the target says 3 -> 4 -> 5 in the first and 11 -> 12 in the second, else 18.

    A node's children are its next_token and the chain of next_sibling behind that.
    """
    first = (tree.ROOT, tree.ROOT, tree.ROOT, 2, 3)  # nodes 1 2 3 under the root, 4 under 3, 5 under 4
    second = (tree.ROOT, 0, 0, 1, tree.ROOT)  # nodes 7 and 11 under the root, 8 and 9 under 7, 10 under 8
    cases = [
        (first, [1, 2, 3, 4, 5], [3, 18, 18, 4, 5, 18], [3, 4, 5, 18], [3, 4, 5]),
        (second, [7, 8, 9, 10, 11], [11, 18, 18, 18, 18, 12], [11, 12], [5]),
    ]
    for parents, drafts, choices, out, rows in cases:
        proposal = Proposal(ints(drafts), parents)
        verdict = Match()(proposal, ints(choices))
        assert kept(verdict, 0) == rows
        assert committed(proposal, verdict)[0].tolist()[: len(out)] == out
