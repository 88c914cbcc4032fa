"""commit_kv against its reference and against indexed copies layer by layer."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck

LAYERS, SLOTS, KV_HEADS, HEAD_DIM = 30, 1024, 3, 64


def indexed_copies(k_caches, v_caches, source, target):
    """Plain PyTorch for one request whose slot numbers the host already knows."""
    for cache in (*k_caches, *v_caches):
        cache[0, target] = cache[0, source]


@pytest.mark.parametrize("case", ["native", "reference", "indexed_copies"])
@pytest.mark.parametrize("layout", ["stacked", "list"])
def test_commit_kv(benchmark, case, layout):
    torch.manual_seed(0)
    shape = (LAYERS, 1, SLOTS, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.randn(shape).to(torch.bfloat16) for _ in range(2))
    caches = (k_cache, v_cache) if layout == "stacked" else (list(k_cache), list(v_cache))
    path = torch.tensor([[0, 2, 5, 11, -1]], dtype=torch.int32)
    accepted, prefix = torch.tensor([3], dtype=torch.int32), torch.tensor([700], dtype=torch.int32)
    source, target = torch.tensor([702, 705, 711]), slice(701, 704)
    calls = {
        "native": lambda: ck.commit_kv(*caches, path, accepted, prefix, backend="native"),
        "reference": lambda: ck.commit_kv(*caches, path, accepted, prefix, backend="reference"),
        "indexed_copies": lambda: indexed_copies(*caches, source, target),
    }
    expected = k_cache[:, :, source].clone()
    calls[case]()
    assert torch.equal(k_cache[:, :, target], expected)
    benchmark.group = f"commit_kv {LAYERS} layers {layout}"
    benchmark.pedantic(calls[case], rounds=20, iterations=2, warmup_rounds=2)
