"""Fused operators for tree-based parallel decoding of language models.

Every operator takes plain tensors and belongs to no engine. ``backend="auto"`` picks the fastest implementation for
the tensors' device; see docs/design.md for how, and ``cerberus info`` for what this machine has.
"""

from ._dispatch import BackendUnavailable
from .ops.tree_mask import tree_mask, unpack_mask
from .tree import Tree
from .version import __version__

__all__ = [
    "BackendUnavailable",
    "Tree",
    "__version__",
    "tree_mask",
    "unpack_mask",
]
