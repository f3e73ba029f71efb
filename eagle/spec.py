"""How growth is written on a command line: ``chain``, ``tree:-1,-1,0`` or ``dynamic:16,4,4``. Words to a value only."""

from __future__ import annotations

from paceline.core.errors import ConfigurationError
from paceline.eagle.tree import Chain, DraftTree, DynamicTree, StaticTree

_FORMS = (
    "'chain' (of k tokens), 'tree:PARENTS', e.g. tree:-1,-1,0,0, or 'dynamic:NODES,DEPTH,WIDTH', e.g. dynamic:16,4,4"
)


def growth(text: str, *, k: int, drawn: bool = False) -> DraftTree:
    """The growth that ``text`` says; ``k`` tokens for a chain. ``drawn``: from the head's law, for acceptor="reject".

    Raises:
        ConfigurationError: it says nothing known, the sizes do not fit, or a tree is to be drawn.
    """
    kind, _, rest = text.partition(":")
    if kind == "chain" and not rest:
        return Chain(k, drawn=drawn)
    if drawn:
        raise ConfigurationError(
            "only chains can be drawn from the head's law (acceptor='reject'): use growth 'chain', or "
            "acceptor='match', which is exact for trees too"
        )
    try:
        numbers = tuple(int(part) for part in rest.split(","))
    except ValueError:
        numbers = ()
    if kind == "tree" and numbers:
        return StaticTree(numbers)
    if kind == "dynamic" and len(numbers) == 3:
        return DynamicTree(numbers[0], depth=numbers[1], width=numbers[2])
    raise ConfigurationError(f"growth {text!r} is none; give {_FORMS}")
