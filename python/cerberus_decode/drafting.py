"""One step's draft tree, put together from whatever has something to propose.

Heads propose candidates per position, a match in the text so far proposes a chain. Both come with the probability
that the model agrees, so they share one tree: nodes in order of the probability that the whole path to them is
accepted, as many as pay. Verification is exact whatever was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import cerberus_kernels as ck

MOST_CERTAIN = 0.98  # what a single node may promise at most


@dataclass(frozen=True)
class DraftTree:
    """The nodes of one forward pass.

    Attributes:
        tokens: int32 ``[1, N]``, the root's first.
        parents: int32 ``[N]``.
        mask: int32 ``[N, W]`` ancestor bits.
        depths: int64 ``[N]``.
        max_depth: D.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    mask: torch.Tensor
    depths: torch.Tensor
    max_depth: int

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return self.tokens.shape[1]


class Candidates:
    """Nodes below a root, each a token after another node, with the probability that the path to it is accepted.

    Example:
        >>> found = Candidates()
        >>> found.add_chain([7, 8], [0.6, 0.5])
        >>> found.add_chain([7, 9], [0.5, 0.4])
        >>> found.best_first()
        [0, 1, 2]
        >>> [round(found.probability[node], 2) for node in found.best_first()]
        [0.6, 0.3, 0.24]
    """

    def __init__(self) -> None:
        self.parent: list[int] = []  # of each node; -1 is the root
        self.token: list[int] = []
        self.depth: list[int] = []
        self.probability: list[float] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, probability: float) -> int:
        """Add a token below a node, or raise the probability of one that is there already; gives its number."""
        if parent >= 0:
            probability = min(probability, self.probability[parent])
        node = self._children.get((parent, token))
        if node is None:
            node = self._children[parent, token] = len(self.token)
            self.parent.append(parent)
            self.token.append(token)
            self.depth.append(1 if parent < 0 else self.depth[parent] + 1)
            self.probability.append(probability)
        elif probability > self.probability[node]:
            self.probability[node] = probability
        return node

    def add_chain(self, tokens: Sequence[int], conditional: Sequence[float]) -> None:
        """Add tokens one below the other, each with its probability given that the one before it was accepted."""
        node, probability = -1, 1.0
        for token, share in zip(tokens, conditional, strict=True):
            probability *= share
            node = self.add(node, token, probability)
            probability = self.probability[node]

    def best_first(self) -> list[int]:
        """All nodes, likeliest first and parents before children."""
        return sorted(range(len(self.token)), key=lambda node: (-self.probability[node], self.depth[node], node))

    def tree(self, root: int, chosen: Sequence[int], device: torch.device | str = "cpu") -> DraftTree:
        """The tree of some nodes in best-first order, a node's parent always among those before it."""
        place = {-1: 0}
        parents, tokens, depths = [-1], [root], [0]
        for node in chosen:
            place[node] = len(parents)
            parents.append(place[self.parent[node]])
            tokens.append(self.token[node])
            depths.append(self.depth[node])
        parent_row = torch.tensor(parents, dtype=torch.int32)
        return DraftTree(
            tokens=torch.tensor([tokens], dtype=torch.int32, device=device),
            parents=parent_row.to(device),
            mask=ck.tree_mask(parent_row).to(device),
            depths=torch.tensor(depths, device=device),
            max_depth=max(depths),
        )


def best_count(probabilities: Sequence[float], cost: Callable[[int], float]) -> int:
    """Drafts with the most expected tokens per second.

    Args:
        probabilities: that each draft's path is accepted, greatest first.
        cost: of a step by its number of drafts.

    Returns:
        The n that maximises (1 + sum of the first n) / cost(n); the smallest where several are best.

    Example:
        >>> best_count([0.5, 0.25, 0.01], lambda n: 1.0 + 0.1 * n)
        2
    """
    best, best_rate, tokens = 0, 1.0 / cost(0), 1.0
    for count, probability in enumerate(probabilities, start=1):
        tokens += probability
        rate = tokens / cost(count)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def calibrated(log_probs: torch.Tensor, calibration: Sequence[Sequence[float]]) -> torch.Tensor:
    """Log-probabilities of acceptance from those of the heads: per head an offset and a factor, at most certain.

    Args:
        log_probs: fp32 ``[B, K, k]``.
        calibration: ``(offset, factor)`` of each head; empty leaves them as they are.
    """
    if calibration:
        table = torch.tensor(calibration, device=log_probs.device)
        log_probs = table[:, :1] + table[:, 1:] * log_probs
    return log_probs.clamp_max(math.log(MOST_CERTAIN))
