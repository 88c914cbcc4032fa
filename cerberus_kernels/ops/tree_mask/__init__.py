"""Packed ancestor bits of draft trees."""

from .api import tree_mask, unpack_mask

__all__ = ["tree_mask", "unpack_mask"]
