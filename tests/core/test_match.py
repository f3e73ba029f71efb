"""`Match`: what stands is the path of agreement from the root, and nothing else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import tree
from paceline.core.acceptance.base import committed
from paceline.core.types import PAD, Proposal
from tests.core.deciding import matched


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


@st.composite
def token_trees(draw: st.DrawFn) -> tuple[tuple[int, ...] | None, list[list[int]], list[list[int]]]:
    """Parents, or None for a chain, which may be empty; drafts, and the target's choices."""
    slots, chain = draw(st.integers(1, 3)), draw(st.booleans())
    size = draw(st.integers(0, 5) if chain else st.integers(1, 9))
    parents = None if chain else tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    drafts = [draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size)) for _ in range(slots)]
    choices = [draw(st.lists(st.integers(0, 2), min_size=size + 1, max_size=size + 1)) for _ in range(slots)]
    return parents, drafts, choices


@given(token_trees())
def test_a_chain_or_tree_without_equal_siblings_is_walked_from_the_root(
    case: tuple[tuple[int, ...] | None, list[list[int]], list[list[int]]],
) -> None:
    given, drafts, choices = case
    size = len(drafts[0])
    parents = tree.chain(size) if given is None else given
    for line in drafts:  # twins have a test of their own
        met: set[tuple[int, int]] = set()
        for node, token in enumerate(line):
            if (parents[node], token) in met:
                line[node] = PAD
            met.add((parents[node], token))
    proposal = Proposal(ints(*drafts).view(len(drafts), size), given)
    verdict = matched(proposal, ints(*choices))
    out = committed(proposal, verdict)
    for slot, line in enumerate(drafts):
        rows, token = walk(line, parents, choices[slot])
        assert verdict.path[slot].tolist() == rows + [PAD] * (verdict.path.shape[1] - len(rows))
        assert (int(verdict.count[slot]), int(verdict.token[slot])) == (len(rows), token)
        whole = [*(line[row - 1] for row in rows), token]
        assert out[slot].tolist() == whole + [PAD] * (out.shape[1] - len(whole))


@given(token_trees().filter(lambda case: case[0] is not None))
def test_equal_siblings_commit_the_targets_tokens_along_one_path(
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
    verdict = matched(proposal, ints(*choices))
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
    verdict = matched(Proposal(ints([PAD, PAD], [0, PAD])), ints([0, 0, 0], [0, 0, 0]))
    assert verdict.count.tolist() == [0, 1]
    assert verdict.token.tolist() == [0, 0]
    assert matched(Proposal(ints([PAD])), ints([PAD, 5])).count.tolist() == [0]
    assert matched(Proposal(ints([PAD, 3]), (-1, 0)), ints([PAD, 3, 4])).count.tolist() == [0]
