"""The list of transformers' tests as names, and as the tables of README.md; no tests in here.

``python -m tests.huggingface.list_of_tests`` prints the tables.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.huggingface.transformers_tests import LEFT_OUT, RUN


def run_here() -> list[str]:
    """``Class.test_name`` of each."""
    return list(_names(RUN))


def left_out() -> dict[str, str]:
    """``Class.test_name`` -> why."""
    return {name: reason for reason, tests in LEFT_OUT.items() for name in _names(tests)}


def _names(tests: dict[str, str]) -> Iterator[str]:
    for kind, words in tests.items():
        yield from (f"{kind}.test_{word}" for word in words.split())


def tables() -> str:
    """What README.md says of them. A class of which nothing runs for one reason stands there as a whole."""
    rows = ["| class | tests that run (`test_...`) |", "|---|---|"]
    rows += [f"| `{kind}` | {', '.join(f'`{word}`' for word in words.split())} |" for kind, words in RUN.items()]
    rows += ["", "| left out | because |", "|---|---|"]
    classes = [kind for part in (RUN, *LEFT_OUT.values()) for kind in part]
    for reason, tests in LEFT_OUT.items():
        shown = [
            f"all {len(words.split())} of `{kind}`"
            if classes.count(kind) == 1
            else ", ".join(f"`{word}`" for word in words.split())
            for kind, words in tests.items()
        ]
        rows.append(f"| {', '.join(shown)} | {reason} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(tables())
