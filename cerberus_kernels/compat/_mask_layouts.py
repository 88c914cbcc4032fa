"""Where SGLang's three layouts put the bits of a tree mask."""

from __future__ import annotations

import enum

import torch

from .._checks import refuse
from .links import check

MOST_PACKED_NODES = 32


class TreeMaskMode(enum.IntEnum):
    """Layouts of the tree mask."""

    FULL_MASK = 0
    """Flat booleans, for request b ``N`` rows of ``verified_seq_len[b] + N``: the prefix, then the tree."""
    QLEN_ONLY = 1
    """Booleans ``[B, N, N]``: the tree alone."""
    QLEN_ONLY_BITPACKING = 2
    """Bits of a row of the tree in 1, 2 or 4 bytes, little-endian, for N up to 8, 16 and 32."""


def write_mask(
    op: str, tree_mask: torch.Tensor, visible: torch.Tensor, lengths: torch.Tensor, mode: TreeMaskMode
) -> None:
    """Write ``visible`` [B, N, N] behind prefixes of ``lengths`` [B] into the caller's mask, in SGLang's layout."""
    nodes = visible.shape[1]
    packed = mode == TreeMaskMode.QLEN_ONLY_BITPACKING
    check(op, "tree_mask", tree_mask, dtypes=None if packed else (torch.bool, torch.uint8), device=visible.device)
    if not tree_mask.is_contiguous():
        refuse(op, "tree_mask", "contiguous", f"strides {list(tree_mask.stride())}")
    flat = tree_mask.view(-1)
    if packed:
        if nodes > MOST_PACKED_NODES:
            refuse(op, "draft_token_num", f"at most {MOST_PACKED_NODES} with QLEN_ONLY_BITPACKING", nodes)
        num_bytes = 1 if nodes <= 8 else 2 if nodes <= 16 else 4
        bits = torch.nn.functional.pad(visible.long(), (0, 8 * num_bytes - nodes)).unflatten(2, (num_bytes, 8))
        values = (bits << torch.arange(8, device=bits.device)).sum(3).to(torch.uint8)
        flat = flat.view(torch.uint8)
    else:
        values = visible.to(flat.dtype)
    needed, unit = values.numel(), "bytes" if packed else "elements"
    if mode == TreeMaskMode.FULL_MASK:
        if lengths.device.type == "cpu":
            needed += nodes * int(lengths.sum())
        if flat.numel() < needed:
            refuse(op, "tree_mask", f"of at least {needed} {unit}", flat.numel())
        widths = (lengths + nodes).view(-1, 1, 1)  # [B, 1, 1]
        place = torch.arange(nodes, device=lengths.device)
        start = (widths.cumsum(0) - widths) * nodes
        flat.scatter_(0, (start + place.view(-1, 1) * widths + (widths - nodes) + place).flatten(), values.flatten())
        return
    if flat.numel() < needed:
        refuse(op, "tree_mask", f"of at least {needed} {unit}", flat.numel())
    flat[:needed].copy_(values.flatten())
