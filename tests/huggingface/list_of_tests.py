"""The list of transformers' tests as names, and as the tables of README.md; no tests.

``python -m tests.huggingface.list_of_tests`` prints the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.huggingface.transformers_tests import LEFT_OUT, RUN


def run_here() -> list[str]:
    """``Class.test_name`` of each."""
    return list(_names(RUN))


def left_out() -> set[str]:
    """``Class.test_name`` of each, without those of whole classes."""
    return {name for tests in LEFT_OUT.values() for name in _names(tests)}


def whole_classes() -> dict[str, int]:
    """Classes of which nothing runs, with the number of their tests."""
    return {kind: words for tests in LEFT_OUT.values() for kind, words in tests.items() if isinstance(words, int)}


def _names(tests: Mapping[str, str | int]) -> Iterator[str]:
    for kind, words in tests.items():
        yield from (f"{kind}.test_{word}" for word in (words.split() if isinstance(words, str) else ()))


def tables() -> str:
    """Rows of README.md for them. A class of which nothing runs for one reason is one row."""
    rows = ["| class | tests that run (`test_...`) |", "|---|---|"]
    rows += [f"| `{kind}` | {', '.join(f'`{word}`' for word in words.split())} |" for kind, words in RUN.items()]
    rows += ["", "| left out | because |", "|---|---|"]
    for reason, tests in LEFT_OUT.items():
        shown = [
            f"all {words} of `{kind}`" if isinstance(words, int) else ", ".join(f"`{word}`" for word in words.split())
            for kind, words in tests.items()
        ]
        rows.append(f"| {', '.join(shown)} | {reason} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(tables())
