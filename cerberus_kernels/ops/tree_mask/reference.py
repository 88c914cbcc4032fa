"""Specification of tree_mask: bit j of row i is set iff j is i or an ancestor of i."""

from __future__ import annotations

import torch

from ...tree import check_parents

WORD_BITS = 32


def mask_words(num_nodes: int) -> int:
    """Words of a row: ceil(N / 32)."""
    return (num_nodes + WORD_BITS - 1) // WORD_BITS


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


def pack_mask(visible: torch.Tensor) -> torch.Tensor:
    """Bool [.., N, N] -> int32 [.., N, W], bit j % 32 of word j // 32."""
    nodes = visible.shape[-1]
    padded = torch.nn.functional.pad(visible.to(torch.int64), (0, mask_words(nodes) * WORD_BITS - nodes))
    words = padded.unflatten(-1, (mask_words(nodes), WORD_BITS)) << torch.arange(WORD_BITS, device=visible.device)
    return words.sum(-1).to(torch.int32)


def unpack_mask(mask: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """int32 [.., N, W] -> bool [.., N, num_nodes]."""
    bits = mask.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32, device=mask.device)
    return (bits & 1).flatten(-2)[..., :num_nodes].to(torch.bool)
