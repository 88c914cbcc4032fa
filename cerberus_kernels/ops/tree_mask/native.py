"""tree_mask through the native library."""

from __future__ import annotations

import torch

from ..._native import function
from ...tree import mask_words


def tree_mask(parents: torch.Tensor, num_nodes: torch.Tensor | None = None) -> torch.Tensor:
    """parents int32 [B, N] or [N], num_nodes int32 [B] or None -> int32 [B, N, W] or [N, W]."""
    mask = parents.new_empty(*parents.shape, mask_words(parents.shape[-1]))
    function("tree_mask")(parents, num_nodes, mask)
    return mask
