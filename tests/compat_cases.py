"""Trees as other engines hand them over, and their rules in plain Python, for the tests of compat."""

from __future__ import annotations

import itertools
import math
import random

import torch

T5_LINKS = ([1, 3, 4, -1, -1], [-1, 2, -1, -1, -1])

# Links that are no tree, by what is wrong with them; the first five break it as the parents of MSK-02 do.
MALFORMED_LINKS = {
    "a node that is not there": ([1, 9, -1, -1, -1], [-1, 2, -1, -1, -1]),
    "siblings in a circle": ([1, -1, -1, -1, -1], [-1, 2, 1, -1, -1]),
    "the root below a node": ([1, 0, -1, -1, -1], [-1, -1, -1, -1, -1]),
    "a node with two parents": ([1, 3, 3, -1, -1], [-1, 2, -1, -1, -1]),
    "a node below itself": ([1, -1, -1, 3, -1], [-1, -1, -1, -1, -1]),
    "two nodes below each other": ([1, -1, -1, 4, 3], [-1, -1, -1, -1, -1]),
    "a sibling of the root": ([1, -1, -1, -1, -1], [2, -1, -1, -1, -1]),
    "a ring of siblings that no node leads to": ([1, -1, -1, -1, -1], [-1, 2, -1, 4, 3]),
    "a number below -1": ([1, -2, -1, -1, -1], [-1, -1, -1, -1, -1]),
}


def shuffled_links(parents: list[int], seed: int) -> tuple[list[int], list[int]]:
    """Child and sibling links with the siblings of every node in some order."""
    order = random.Random(seed)
    first, sibling = [-1] * len(parents), [-1] * len(parents)
    for parent in range(len(parents)):
        children = [node for node in range(1, len(parents)) if parents[node] == parent]
        order.shuffle(children)
        if children:
            first[parent] = children[0]
        for left, right in itertools.pairwise(children):
            sibling[left] = right
    return first, sibling


def inverse_cdf(weights: list[float], coin: float) -> int:
    """First token whose running sum exceeds coin * total, among those with weight."""
    total, target, last = 0.0, coin * math.fsum(weights), -1
    for token, weight in enumerate(weights):
        total += weight
        if weight > 0:
            last = token
            if total > target:
                return token
    return last


def target_only(
    tokens: list[int],
    first: list[int],
    sibling: list[int],
    coins: list[float],
    final_coin: float,
    probs: list[list[float]],
    length: int,
    single: float = 1.0,
    acc: float = 1.0,
) -> tuple[list[int], int]:
    """SGLang's target-only rule by its pointer walk, with our treatment of duplicates: accepted path and bonus."""
    path, vocab_size = [0], len(probs[0])
    while True:
        row, tried, child, mass = probs[path[-1]], set(), first[path[-1]], 0.0
        found = -1
        while len(path) < length and child != -1 and found < 0:
            token = tokens[child]
            if 0 <= token < vocab_size:
                mass += row[token] if token not in tried else 0.0
                if row[token] > 0 and (coins[path[-1]] < mass / max(acc, 1e-9) or row[token] >= single):
                    found = child
                tried.add(token)
            child = sibling[child]
        if found < 0:
            left = [0.0 if token in tried else p for token, p in enumerate(row)]
            bonus = inverse_cdf(left, final_coin)
            return path, bonus if bonus >= 0 else max(range(vocab_size), key=lambda v: (row[v], -v))
        path.append(found)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic of observed counts against probabilities."""
    expected = probs.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())
