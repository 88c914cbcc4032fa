"""Specification of grow_tree: take the best node that may come next, until the tree is full.

A node is a rank of head d below any node of depth d, its score the sum of log-probabilities on its path. As every
candidate of a head may follow every candidate of the head before, the best tree of n nodes is the n best paths.
"""

from __future__ import annotations

import heapq
import math

import torch

from ..._checks import refuse

_OP = "grow_tree"


def grow_tree(
    log_probs: torch.Tensor,
    budget: int,
    tokens: torch.Tensor | None = None,
    roots: torch.Tensor | None = None,
    costs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """log_probs fp32 [B, K, k] -> parents [B, N], slots [B, N, 2], score [B, N], num_nodes [B], draft tokens [B, N].

    Order: greater score, then the shallower node, the earlier parent, the better rank. The tokens are [B, 0] without
    ``tokens``.
    """
    _check_values(log_probs, costs)
    batch, heads, _ = log_probs.shape
    parents = torch.full((batch, budget), -1, dtype=torch.int32)
    slots = torch.full((batch, budget, 2), -1, dtype=torch.int32)
    score = torch.full((batch, budget), -math.inf)
    num_nodes = torch.ones(batch, dtype=torch.int32)
    drafts = torch.full((batch, budget if tokens is not None else 0), -1, dtype=torch.int32)
    steps = log_probs.cpu().clamp(max=0)
    ends = [[_first_end(row) for row in rows] for rows in log_probs.tolist()]  # candidates that a head has
    for b in range(batch):
        score[b, 0] = 0
        frontier: list[tuple[float, int, int, int]] = []  # -score, depth, parent, rank
        count = 1

        def offer(node: int, depth: int, b: int = b, frontier: list = frontier) -> None:
            if depth < heads:
                below = score[b, node] + steps[b, depth, : ends[b][depth]]  # added in fp32
                for rank, value in enumerate(below.tolist()):
                    heapq.heappush(frontier, (-value, depth + 1, node, rank))

        offer(0, 0)
        while count < budget and frontier:
            value, depth, parent, rank = heapq.heappop(frontier)
            parents[b, count], score[b, count] = parent, -value
            slots[b, count] = torch.tensor([depth - 1, rank])
            offer(count, depth)
            count += 1
        if tokens is not None and roots is not None:
            drafts[b, 0] = roots[b]
            for node in range(1, count):
                head, rank = slots[b, node].tolist()
                drafts[b, node] = tokens[b, head, rank]
        num_nodes[b] = count if costs is None else _best_size(score[b, :count], costs)
    device = log_probs.device
    return parents.to(device), slots.to(device), score.to(device), num_nodes.to(device), drafts.to(device)


def _best_size(score: torch.Tensor, costs: torch.Tensor) -> int:
    """Nodes with the most expected tokens per cost; argmax gives the first of several."""
    tokens = score.double().exp().cumsum(0)  # the root's score of 0 is the token that every step gives
    return int((tokens / costs[: len(score)].double().cpu()).argmax()) + 1


def _first_end(row: list[float]) -> int:
    return next((rank for rank, value in enumerate(row) if not value > -math.inf), len(row))


def _check_values(log_probs: torch.Tensor, costs: torch.Tensor | None) -> None:
    for b, rows in enumerate(log_probs.tolist()):
        for head, row in enumerate(rows):
            for rank in range(1, len(row)):
                if row[rank] > row[rank - 1]:
                    got = f"{row[rank]} behind {row[rank - 1]} in row {b}, head {head}"
                    refuse(_OP, "log_probs", "sorted, best first", got)
    for node, cost in enumerate(costs.tolist() if costs is not None else ()):
        if not cost > 0:
            refuse(_OP, "costs", "above 0", f"{cost} for {node + 1} nodes")
