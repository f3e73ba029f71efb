"""Cases of which every two values of two columns meet in at least one, chosen by a fixed rule; no tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Case = dict[str, str]
Pair = frozenset[tuple[str, str]]
Excluded = Callable[[Mapping[str, str]], bool]


def pairs(columns: Mapping[str, Sequence[str]], excluded: Excluded) -> list[Pair]:
    """Every two values of two columns that may meet. ``excluded`` says of two values that they must not."""
    return [
        frozenset(((one, a), (other, b)))
        for one, other in combinations(columns, 2)
        for a in columns[one]
        for b in columns[other]
        if not excluded({one: a, other: b})
    ]


def cases(columns: Mapping[str, Sequence[str]], excluded: Excluded) -> list[Case]:
    """Begin a case with the first two values that have not met, and give each other column the value that meets most.

    In a tie, what goes with few others comes first, and where nothing is left to meet the first value of the column.
    """
    allowed = pairs(columns, excluded)
    known, left, made = set(allowed), dict.fromkeys(allowed), list[Case]()
    partners = Counter(value for pair in allowed for value in pair)
    while left:
        case = dict(sorted(next(iter(left)), key=lambda item: list(columns).index(item[0])))
        for column in columns:
            if column in case:
                continue
            best, chosen = (-1, 0), None
            for value in columns[column]:
                met = [frozenset(((column, value), own)) for own in case.items()]
                if not known.issuperset(met):
                    continue
                gain = sum(pair in left for pair in met)
                rank = (gain, -partners[column, value] if gain else 0)
                if rank > best:
                    best, chosen = rank, value
            assert chosen is not None, f"no value of {column!r} goes with {case}"
            case[column] = chosen
        case = {column: case[column] for column in columns}
        for two in combinations(case.items(), 2):
            left.pop(frozenset(two), None)
        made.append(case)
    return made
