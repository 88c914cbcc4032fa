"""Attention of a draft tree's nodes over the committed prefix and their own ancestors."""

from .api import tree_attention

__all__ = ["tree_attention"]
