"""A linear layer over few rows, with its weight packed once."""

from .api import PackedWeight, pack_linear, packed_linear, unpack_linear

__all__ = ["PackedWeight", "pack_linear", "packed_linear", "unpack_linear"]
