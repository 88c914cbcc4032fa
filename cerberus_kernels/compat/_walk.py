"""The walk down accepted nodes and the draw by a given coin, which several engines' calls share."""

from __future__ import annotations

import torch

from .links import SiblingLists


def accepted_path(lists: SiblingLists, accepts: torch.Tensor, length: int) -> torch.Tensor:
    """Step from the root to the first accepted child, again and again.

    Args:
        lists: the tree; a malformed one has no step.
        accepts: bool ``[B, N]``, whether a node is accepted once its parent is.
        length: nodes of the longest path, the root included.

    Returns:
        int64 ``[B, length]``, node numbers from the root, then -1.
    """
    batch, nodes = accepts.shape
    own = torch.arange(nodes, device=accepts.device)
    accepts = accepts & (lists.parents >= 0) & ~lists.malformed.unsqueeze(1)
    target = torch.where(accepts, lists.parents, nodes)
    order = lists.ranks * nodes + own  # the first of the list is the least; the node is the remainder
    best = order.new_full((batch, nodes + 1), nodes * nodes).scatter_reduce_(1, target, order, "amin")
    step = torch.where(best < nodes * nodes, best % max(nodes, 1), -1)
    step[:, nodes] = -1  # where a finished walk stays
    path = [torch.zeros(batch, dtype=torch.int64, device=accepts.device)]
    for _ in range(length - 1):
        here = torch.where(path[-1] < 0, nodes, path[-1])
        path.append(step.gather(1, here.unsqueeze(1)).squeeze(1))
    return torch.stack(path, dim=1)


def draw(weights: torch.Tensor, coins: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum first exceeds coin times the total.

    A token of weight zero is never drawn: the running sum does not rise there.

    Args:
        weights: float64 ``[B, V]``, finite and >= 0, of any total.
        coins: float64 ``[B]`` in [0, 1).
        fallback: int64 ``[B]``, the result where all weights are zero.

    Returns:
        int64 ``[B]``.
    """
    vocab_size = weights.shape[1]
    # a running sum need not rise monotonically on every device's parallel scan, so weight decides as well
    tokens = torch.arange(vocab_size, device=weights.device)
    has_weight = weights > 0
    total = weights.cumsum(1)
    passed = has_weight & (total > (coins * total[:, -1]).unsqueeze(1))
    first = torch.where(passed, tokens, vocab_size).amin(1)
    last = torch.where(has_weight, tokens, -1).amax(1)  # coin * total rounded up to the total, or the coin is no number
    return torch.where(last < 0, fallback, torch.where(first < vocab_size, first, last))


def greatest_entry(rows: torch.Tensor) -> torch.Tensor:
    """Column of each row's greatest entry that is not NaN, the lowest of equals; 0 where there is none."""
    return torch.where(rows.isnan(), -torch.inf, rows).argmax(1)
