"""tree_mask through the native library."""

from __future__ import annotations

import torch

from ..._native import function
from ...tree import mask_words


def tree_mask(parents: torch.Tensor, num_nodes: torch.Tensor | None = None) -> torch.Tensor:
    """parents int32 [B, N], num_nodes int32 [B] or None -> int32 [B, N, W]."""
    batch, nodes = parents.shape
    mask = parents.new_empty(batch, nodes, mask_words(nodes))
    function("tree_mask")(parents, num_nodes, mask)
    return mask
