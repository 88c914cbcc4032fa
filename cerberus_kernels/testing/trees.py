"""Makers of draft trees as parent lists."""

from __future__ import annotations

from collections.abc import Iterator

import torch

NODE_COUNTS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 257)

# Root, A, B, A1 under A, B1 under B: the smallest tree whose flat order differs from every path.
T5 = (-1, 0, 0, 1, 2)


def chain(num_nodes: int) -> list[int]:
    """Each node below the one before it."""
    return [node - 1 for node in range(num_nodes)]


def star(num_nodes: int) -> list[int]:
    """All nodes below the root."""
    return [-1] + [0] * (num_nodes - 1)


def binary(num_nodes: int) -> list[int]:
    """A full binary tree, cut at ``num_nodes``."""
    return [-1] + [(node - 1) // 2 for node in range(1, num_nodes)]


def random_parents(num_nodes: int, seed: int) -> list[int]:
    """Every node's parent drawn uniformly from the nodes before it."""
    generator = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, num_nodes)]


def tree_cases(num_nodes: int) -> Iterator[tuple[str, list[int]]]:
    """Named trees of ``num_nodes`` nodes: chain, star, binary and two random ones."""
    yield "chain", chain(num_nodes)
    yield "star", star(num_nodes)
    yield "binary", binary(num_nodes)
    for seed in (0, 1):
        yield f"random{seed}", random_parents(num_nodes, seed)
