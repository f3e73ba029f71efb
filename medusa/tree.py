"""Static token trees as Medusa writes them: a list of choices, each the path of ranks from the root to a node.

`[0, 2]` is the third best token of the second head after the best of the first. A tree is valid when every prefix of a
choice is one too, no choice is longer than there are heads, and every rank is below the number of tokens examined.
Nodes are numbered in Medusa's order: shorter choices first, then by ranks; node 0 is the root, the last committed
token. `paceline.medusa.search` finds good trees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core import tree
from paceline.core.errors import ConfigurationError
from paceline.core.types import DraftShape
from paceline.decoder.models.config import ModelConfig
from paceline.heads.layouts import write_json
from paceline.heads.options import Wanted

TREE = "tree.json"
"""Name of a tree's file, in the folder of its heads."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choices:
    """A valid tree, its choices in node order."""

    paths: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigurationError("tree: expected at least one choice, got none; give at least [[0]]")
        paths = set(self.paths)
        if len(paths) < len(self.paths):
            twice = next(path for i, path in enumerate(self.paths) if path in self.paths[:i])
            raise ConfigurationError(f"tree: expected every choice once, got {list(twice)} twice; remove one of them")
        for path in self.paths:
            if not path or min(path) < 0:
                raise ConfigurationError(
                    f"tree: expected a list of one or more ranks from 0 on as a choice, got {list(path)}; correct it"
                )
            if len(path) > 1 and path[:-1] not in paths:
                raise ConfigurationError(f"tree: choice {list(path)} has no parent; add {list(path[:-1])} to the tree")
        assert self.paths == tuple(sorted(self.paths, key=_order)), "made by `of`, which sorts"

    @classmethod
    def of(cls, choices: Iterable[object]) -> Choices:
        """Create a tree from choices in any order, as lists of ranks."""
        paths = []
        for choice in choices:
            if not isinstance(choice, list | tuple):
                raise ConfigurationError(
                    f"tree: expected a list of ranks such as [0, 2] as a choice, got {choice!r}; correct it"
                )
            if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in choice):
                raise ConfigurationError(f"tree: expected whole numbers in a choice, got {list(choice)}; correct it")
            paths.append(tuple(choice))
        return cls(tuple(sorted(paths, key=_order)))

    @classmethod
    def chain(cls, length: int) -> Choices:
        """Return the chain of the best token of the first ``length`` heads."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @classmethod
    def read(cls, path: Path) -> Choices:
        """Read a tree from a JSON file: a list of choices, or an object with such a list under "choices"."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{path}: expected JSON such as [[0],[0,0],[1]], got {error}; correct the file"
            ) from error
        listed = value.get("choices") if isinstance(value, dict) else value
        if not isinstance(listed, list):
            raise ConfigurationError(
                f'{path}: expected a list of choices, got none; give [[0],[0,0],[1]] or {{"choices": [...]}}'
            )
        return cls.of(listed)

    def write(self, path: Path) -> None:
        write_json(path, [list(choice) for choice in self.paths])

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Length of the longest choice: number of used heads."""
        return len(self.paths[-1])

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of examined tokens for every used head."""
        return tuple(1 + max(path[level] for path in self.paths if len(path) > level) for level in range(self.depth))

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node, in the numbering of `paceline.core.tree`: 0 is the first choice, -1 the root."""
        place = {path: index for index, path in enumerate(self.paths)}
        return tuple(place[path[:-1]] if len(path) > 1 else -1 for path in self.paths)

    def check(self, *, heads: int, top: int) -> None:
        if self.depth > heads:
            raise ConfigurationError(
                f"tree: expected a depth of at most {heads}, the number of heads, got {self.depth}, such as "
                f"{list(self.paths[-1])}; use a tree for fewer heads (`paceline medusa-tree` makes one), or more "
                "heads"
            )
        if max(self.widths) > top:
            raise ConfigurationError(
                f"tree: expected ranks below {top} (a head's best tokens that are kept), got "
                f"{max(self.widths) - 1}; use a narrower tree"
            )


TreeLike = Choices | str | Path | Iterable[Sequence[int]]


def parse_choices(tree: object) -> Choices:
    if isinstance(tree, Choices):
        return tree
    if isinstance(tree, str | Path):
        return Choices.read(Path(tree))
    if not isinstance(tree, Iterable):
        raise ConfigurationError(
            f"tree: expected choices such as [[0], [0, 0], [1]] or a file of them, got {tree!r}; correct it"
        )
    return Choices.of(tree)


def shipped_choices(folder: Path) -> Choices | None:
    return Choices.read(folder / TREE) if (folder / TREE).is_file() else None


def draft_shape(_target: ModelConfig, _wanted: Wanted, folder: Path, *, draft_tree: object = None) -> DraftShape | None:
    """Check the option of a draft; return the shape of the heads' drafts. None: all their first choices, and tensors
    say how many heads there are.
    """
    choices = shipped_choices(folder) if draft_tree is None else parse_choices(draft_tree)
    return None if choices is None else tree.draft_shape(choices.parents)


def _order(path: Ranks) -> tuple[int, Ranks]:
    return len(path), path
