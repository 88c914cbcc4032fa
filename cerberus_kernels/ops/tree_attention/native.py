"""tree_attention through the native library."""

from __future__ import annotations

from typing import Any

import torch

from ..._native import function


def run(*arguments: Any) -> None:
    """The native function with its arguments in order; its last one, lse, may be None."""
    function("tree_attention")(*arguments)


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_table: torch.Tensor | None = None,
    num_nodes: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    window: int = 0,
) -> None:
    """Write out [B, N, Hq, Dh] and lse fp32 [B, N, Hq]; arguments as the reference takes them."""
    run(q, k_cache, v_cache, mask, prefix_lens, block_table, num_nodes, scale, softcap, window, out, lse)
