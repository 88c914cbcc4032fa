"""head_states through the native library."""

from __future__ import annotations

import torch

from ..._native import function
from . import reference

# Up to here one pass over the weights is bound by memory; beyond, a blocked matrix product is faster.
MAX_ROWS = 8


def head_states(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    root_embedding: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden [B, H], weight [L, K, H, 2H] or [L, K, H, H], bias [L, K, H], root_embedding [B, H] -> [B, K, H]."""
    batch, width = hidden.shape
    if batch > MAX_ROWS:
        return reference.head_states(hidden, weight, bias, root_embedding).contiguous()
    heads = weight.shape[1]
    scratch = torch.empty(2, batch, heads + 1, width)
    states = hidden.new_empty(batch, heads, width)
    function("head_states")(hidden, weight, bias, root_embedding, scratch, states)
    return states
