"""The likeliest nodes of a draft tree, from the heads' own probabilities."""

from .api import GrownTree, grow_tree

__all__ = ["GrownTree", "grow_tree"]
