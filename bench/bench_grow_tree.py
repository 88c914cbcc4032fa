"""grow_tree: the native heap, the reference, and all products of candidates sorted by plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work

SHAPES = [(1, 4, 10, 32), (1, 4, 10, 64), (32, 4, 10, 64)]


def torch_products(log_probs: torch.Tensor, budget: int) -> torch.Tensor:
    """Scores of the best nodes: every path of every length, then top-k."""
    paths = log_probs[:, 0]  # [B, k]
    scores = [paths]
    for head in range(1, log_probs.shape[1]):
        paths = (paths.unsqueeze(2) + log_probs[:, head].unsqueeze(1)).flatten(1)
        scores.append(paths)
    return torch.cat(scores, dim=1).topk(budget - 1).values


@pytest.mark.parametrize("case", ["native", "reference", "torch_products"])
@pytest.mark.parametrize(("batch", "heads", "ranks", "nodes"), SHAPES, ids=[f"B{s[0]}-N{s[3]}" for s in SHAPES])
def test_grow_tree(compare, batch, heads, ranks, nodes, case):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, heads, ranks, generator=generator) * 2
    log_probs = logits.log_softmax(-1).sort(descending=True).values
    calls = {
        "native": lambda: ck.grow_tree(log_probs, nodes, backend="native").score[:, 1:],
        "reference": lambda: ck.grow_tree(log_probs, nodes, backend="reference").score[:, 1:],
        "torch_products": lambda: torch_products(log_probs, nodes),
    }
    work = Work(4 * log_probs.numel() + 16 * batch * nodes, int(batch * nodes * math.log2(nodes)))
    compare(f"grow_tree B={batch} K={heads} k={ranks} N={nodes}", calls, case, torch.testing.assert_close, work=work)
