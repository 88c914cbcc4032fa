"""commit_kv against its reference and two plain PyTorch ways, layer by layer."""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work

LAYERS, SLOTS, KV_HEADS, HEAD_DIM = 30, 1024, 3, 64
PREFIX, NODES = 700, (4, 9, 11)


@functools.lru_cache(maxsize=1)
def inputs(layout: str):
    torch.manual_seed(0)
    shape = (LAYERS, 1, SLOTS, KV_HEADS, HEAD_DIM)
    caches = tuple(torch.randn(shape).to(torch.bfloat16) for _ in range(2))
    before = tuple(cache.clone() for cache in caches)
    return caches if layout == "stacked" else tuple(list(cache) for cache in caches), caches, before


def torch_index_copy(k_caches, v_caches, source, target):
    """Gather the accepted slots of a layer, then copy them to their places; slot numbers known on the host."""
    for cache in (*k_caches, *v_caches):
        cache.index_copy_(1, target, cache.index_select(1, source))


def torch_indexed(k_caches, v_caches, source, target):
    """Assignment by index for one request whose slot numbers the host already knows."""
    for cache in (*k_caches, *v_caches):
        cache[0, target] = cache[0, source]


@pytest.mark.parametrize("case", ["native", "reference", "torch_index_copy", "torch_indexed"])
@pytest.mark.parametrize("layout", ["stacked", "list"])
def test_commit_kv(compare, layout, case):
    """Sources lie past the targets, so that a call repeated on the same caches does the same again."""
    caches, stacked, before = inputs(layout)
    count = len(NODES)
    path = torch.tensor([[0, *NODES, -1]], dtype=torch.int32)
    accepted, prefix = torch.tensor([count], dtype=torch.int32), torch.tensor([PREFIX], dtype=torch.int32)
    source, target = torch.tensor(NODES) + PREFIX, torch.arange(count) + PREFIX + 1
    slots = slice(PREFIX + 1, PREFIX + 1 + count)
    calls = {
        "native": lambda: ck.commit_kv(*caches, path, accepted, prefix, backend="native"),
        "reference": lambda: ck.commit_kv(*caches, path, accepted, prefix, backend="reference"),
        "torch_index_copy": lambda: torch_index_copy(*caches, source, target),
        "torch_indexed": lambda: torch_indexed(*caches, source, slots),
    }

    def restored():
        for cache, original in zip(stacked, before, strict=True):
            cache.copy_(original)
        calls["reference"]()
        right = [cache.clone() for cache in stacked]
        for cache, original in zip(stacked, before, strict=True):
            cache.copy_(original)
        return right

    def agree(new_lens, right):
        """K and V as a whole: the accepted slots moved, and no other slot changed."""
        assert torch.equal(stacked[0], right[0]), "keys differ"
        assert torch.equal(stacked[1], right[1]), "values differ"
        assert new_lens is None or new_lens.tolist() == [PREFIX + 1 + count]

    moved = 2 * LAYERS * count * KV_HEADS * HEAD_DIM * stacked[0].element_size()
    compare(f"commit_kv {LAYERS} layers {layout}", calls, case, agree, work=Work(2 * moved), expected=restored)
