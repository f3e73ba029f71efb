"""YAML as it is meant: what stands twice in a mapping is a slip, not a wish for the second one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yaml import Node


def read_yaml(file: Path) -> object:
    """The content of a file, plain values only.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        yaml.YAMLError: it is no YAML, or a mapping holds a key twice.
    """
    import yaml

    text = file.read_text(encoding="utf-8")
    _check_keys(yaml.compose(text, yaml.SafeLoader))
    return yaml.safe_load(text)


def _check_keys(root: Node | None) -> None:
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias: the same node again, perhaps inside itself
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                waiting.append(value)
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} stands there twice", problem_mark=key.start_mark
                    )
                keys.add(str(key.value))
