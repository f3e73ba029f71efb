"""How the inputs and outputs of a graph of flat lists are laid out: in their order."""

from __future__ import annotations


class Flattener:
    def __init__(self, layout, exclude=None) -> None:
        self.layout, self.exclude = layout, exclude

    def __call__(self, inputs):
        excluded = set(self.exclude or ())
        return [inputs[place] for place in self.layout if place not in excluded]


class Packer:
    def __init__(self, layout, identifiers=None, constants=None) -> None:
        self.layout, self.identifiers, self.constants = layout, identifiers, constants

    def __call__(self, outputs):
        return tuple(outputs)
