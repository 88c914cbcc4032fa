"""Specification of tree_mask: bit j of row i is set iff j is i or an ancestor of i."""

from __future__ import annotations

import torch

from ...tree import check_parents, pack_mask


def tree_mask(parents: torch.Tensor, num_nodes: torch.Tensor | None = None) -> torch.Tensor:
    """Walk up from every node. parents int32 [B, N], num_nodes int32 [B] or None -> int32 [B, N, W]."""
    batch, nodes = parents.shape
    check_parents("tree_mask", parents, num_nodes)
    visible = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    for b, row in enumerate(parents.tolist()):
        count = nodes if num_nodes is None else int(num_nodes[b])
        for node in range(count):
            ancestor = node
            while ancestor >= 0:
                visible[b, node, ancestor] = True
                ancestor = row[ancestor]
    return pack_mask(visible).to(parents.device)
