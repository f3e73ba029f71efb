"""Medusa: heads on the target that propose trees of tokens."""

from paceline.medusa.choices import Choices, TreeBuffers, tree_buffers
from paceline.medusa.drafter import MedusaDrafter

__all__ = ["Choices", "MedusaDrafter", "TreeBuffers", "tree_buffers"]
