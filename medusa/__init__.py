"""Medusa: heads on the target that propose trees of tokens."""

from paceline.medusa.drafter import MedusaDrafter
from paceline.medusa.tree import Choices, TreeBuffers, tree_buffers

__all__ = ["Choices", "MedusaDrafter", "TreeBuffers", "tree_buffers"]
