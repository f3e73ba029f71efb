"""Trees that several tests of Medusa use; no tests."""

from __future__ import annotations

from hypothesis import strategies as st

# The trees of github.com/FasterDecoding/Medusa (Apache-2.0), each as its inner nodes and how many children they have:
# "01:3" is the node [0, 1] with the children [0, 1, 0] to [0, 1, 2]; "-" is the root.
_INNER = """
mc_sim_7b_63 -:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1
    000:2
vicuna_7b_stage2 -:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:4 001:1
    002:1 010:1
vicuna_7b_stage1_ablation -:10 0:10 1:4 2:2 3:2 4:1 5:1 6:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1
    000:4 001:1 002:1 010:1
vicuna_7b_stage1 -:10 0:10 1:7 2:4 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 05:1 10:2 20:1 000:1
vicuna_13b_stage2 -:10 0:10 1:4 2:2 3:1 4:1 5:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:2
    002:1 010:1 100:1
vicuna_13b_stage1 -:10 0:10 1:7 2:4 3:2 4:2 5:1 6:1 7:1 8:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:1
vicuna_33b_stage2 -:10 0:10 1:5 2:3 3:2 4:1 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:3
    001:1 010:1
vicuna_33b_stage1 -:10 0:10 1:8 2:5 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 10:2 20:1
zephyr_stage2 -:10 0:10 1:6 2:4 3:2 4:2 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:2 001:1
"""


def _published() -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for entry in _INNER.split():
        if ":" not in entry:
            found[entry] = paths = []
            continue
        node, count = entry.split(":")
        above = [] if node == "-" else [int(rank) for rank in node]
        paths += [[*above, rank] for rank in range(int(count))]
    return found


PUBLISHED = _published()
MC_SIM_7B_63 = PUBLISHED["mc_sim_7b_63"]


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
