"""tree_attention against its reference and against scaled_dot_product_attention with a dense mask."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close, random_parents
from cerberus_kernels.testing.trees import chain

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
SHAPES = [(nodes, prefix) for nodes in (1, 8, 32, 64) for prefix in (256, 1024)] + [(512, 0)]


def problem(nodes: int, prefix: int, dtype: torch.dtype):
    q = torch.randn(1, nodes, HEADS, HEAD_DIM).to(dtype)
    # The caches lie heads first, as scaled_dot_product_attention likes them.
    k_cache, v_cache = (
        torch.randn(1, KV_HEADS, prefix + nodes + 32, HEAD_DIM).to(dtype).transpose(1, 2) for _ in range(2)
    )
    parents = random_parents(nodes, 0) if prefix else chain(nodes)
    mask = ck.tree_mask(torch.tensor(parents, dtype=torch.int32))
    return q, k_cache, v_cache, mask, torch.tensor([prefix], dtype=torch.int32)


def dense(q, k_cache, v_cache, visible):
    length = visible.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k_cache[:, :length].transpose(1, 2),
        v_cache[:, :length].transpose(1, 2),
        attn_mask=visible,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("case", ["native", "reference", "dense_sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("nodes", "prefix"), SHAPES)
def test_tree_attention(benchmark, case, dtype, nodes, prefix):
    torch.manual_seed(0)
    inputs = problem(nodes, prefix, dtype)
    visible = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), ck.unpack_mask(inputs[3], nodes)], dim=1)
    calls = {
        "native": lambda: ck.tree_attention(*inputs, backend="native"),
        "reference": lambda: ck.tree_attention(*inputs, backend="reference"),
        "dense_sdpa": lambda: dense(*inputs[:3], visible),
    }
    assert_close(calls[case](), calls["reference"]())
    benchmark.group = f"tree_attention N={nodes} S={prefix} {dtype}"
    benchmark.pedantic(calls[case], rounds=12, iterations=2, warmup_rounds=2)
