"""Medusa: heads on the target that propose trees of tokens."""

from typing import TYPE_CHECKING

from paceline.medusa.tree import Choices, TreeBuffers, tree_buffers

if TYPE_CHECKING:
    from paceline.medusa.drafter import MedusaDrafter

__all__ = ["Choices", "MedusaDrafter", "TreeBuffers", "tree_buffers"]


def __getattr__(name: str) -> object:
    if name != "MedusaDrafter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paceline.medusa.drafter import MedusaDrafter  # imports PyTorch

    return MedusaDrafter
