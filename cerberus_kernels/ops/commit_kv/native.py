"""commit_kv through the native library."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._native import function


def commit_kv(
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as the reference's."""
    new_lens = torch.empty_like(prefix_lens, memory_format=torch.contiguous_format)
    function("commit_kv")(k_caches, v_caches, path, num_accepted, prefix_lens, block_table, new_lens)
    return new_lens
