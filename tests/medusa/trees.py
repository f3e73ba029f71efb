"""Trees that several tests of Medusa use; no tests in here."""

from __future__ import annotations

from hypothesis import strategies as st

# `mc_sim_7b_63` of github.com/FasterDecoding/Medusa (Apache-2.0): the tree that its figures for Vicuna 7B are for.
# Written as its children: for every inner node the ranks below it.
_INNER: dict[tuple[int, ...], range] = {
    (): range(10),
    (0,): range(10), (1,): range(7), (2,): range(3), (3,): range(2),
    **{(rank,): range(1) for rank in range(4, 10)},
    (0, 0): range(10), (0, 1): range(3), (0, 2): range(2), **{(0, rank): range(1) for rank in range(3, 8)},
    (1, 0): range(2), (2, 0): range(1), (0, 0, 0): range(2),
}  # fmt: skip
MC_SIM_7B_63 = [[*path, rank] for path, ranks in _INNER.items() for rank in ranks]


@st.composite
def choice_trees(draw: st.DrawFn, *, depth: int = 4, size: int = 12) -> list[list[int]]:
    """Valid trees, siblings in any ranks."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, size))):
        above = draw(st.sampled_from([(), *(path for path in paths if len(path) < depth)]))
        path = (*above, draw(st.integers(0, 5)))
        if path not in paths:
            paths.append(path)
    return [list(path) for path in paths]
