"""grow_tree through the native library."""

from __future__ import annotations

import torch

from ..._native import function


def grow_tree(
    log_probs: torch.Tensor,
    budget: int,
    tokens: torch.Tensor | None = None,
    roots: torch.Tensor | None = None,
    costs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference."""
    batch = log_probs.shape[0]
    score = log_probs.new_empty(batch, budget)
    parents = torch.empty_like(score, dtype=torch.int32)
    slots = parents.new_empty(batch, budget, 2)
    num_nodes = parents.new_empty(batch)
    drafts = parents.new_empty(batch, 0 if tokens is None else budget)
    function("grow_tree")(log_probs, tokens, roots, costs, parents, slots, score, num_nodes, drafts)
    return parents, slots, score, num_nodes, drafts
