"""tree_mask: the native walk, the reference, and powers of the parent matrix in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work
from cerberus_kernels.testing import random_parents
from cerberus_kernels.tree import pack_mask

SHAPES = [(1, 32), (1, 64), (32, 64), (1, 512)]


def torch_matrix_powers(parents: torch.Tensor) -> torch.Tensor:
    """Reachability by squaring I + A, A holding each node's parent."""
    nodes = parents.shape[-1]
    reach = torch.eye(nodes + 1).repeat(parents.shape[0], 1, 1)
    rows = torch.arange(nodes).expand_as(parents)
    reach[torch.arange(parents.shape[0]).unsqueeze(1), rows, parents.to(torch.int64).where(parents >= 0, nodes)] = 1
    for _ in range((nodes - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    return pack_mask(reach[:, :nodes, :nodes] > 0)


@pytest.mark.parametrize("case", ["native", "reference", "torch_matrix_powers"])
@pytest.mark.parametrize(("batch", "nodes"), SHAPES, ids=[f"B{b}-N{n}" for b, n in SHAPES])
def test_tree_mask(compare, batch, nodes, case):
    parents = torch.tensor([random_parents(nodes, seed) for seed in range(batch)], dtype=torch.int32)
    calls = {
        "native": lambda: ck.tree_mask(parents, backend="native"),
        "reference": lambda: ck.tree_mask(parents, backend="reference"),
        "torch_matrix_powers": lambda: torch_matrix_powers(parents),
    }
    mask_bytes = calls["native"]().numel() * 4
    compare(f"tree_mask B={batch} N={nodes}", calls, case, work=Work(4 * batch * nodes + mask_bytes))
