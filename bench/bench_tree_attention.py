"""tree_attention over contiguous and paged caches, its reference, and two plain PyTorch ways: SDPA and FlexAttention.

The caches come from memory, as those of a model's layers do, and lie slot by slot; the paged ones in blocks of 16 in
random order. SDPA and FlexAttention get what they like best, caches that lie heads first.
"""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work, in_turns
from cerberus_kernels.testing import random_parents
from cerberus_kernels.testing.trees import chain

BLOCK = 16
# Nodes, prefix, query heads, heads of the cache, head dim: SmolLM2-135M's layers, one of Llama 3 8B, a prompt.
SHAPES = [(nodes, prefix, 9, 3, 64) for nodes in (1, 8, 32, 64) for prefix in (256, 1024, 4096)]
SHAPES += [(64, 1024, 32, 8, 128), (512, 0, 9, 3, 64)]


@functools.lru_cache(maxsize=1)
def inputs(nodes: int, prefix: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, nodes, heads, head_dim, generator=generator).to(dtype)
    slots = (prefix + nodes + 32) // BLOCK * BLOCK
    k_cache, v_cache = (torch.randn(1, slots, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    # A prompt is a chain over an empty prefix.
    mask = ck.tree_mask(torch.tensor(random_parents(nodes, 0) if prefix else chain(nodes), dtype=torch.int32))
    return q, k_cache, v_cache, mask, torch.tensor([prefix], dtype=torch.int32)


def paged(cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """The same slots in blocks that lie in another order."""
    blocks = torch.empty(block_table.shape[1], BLOCK, *cache.shape[2:], dtype=cache.dtype)
    blocks[block_table[0].long()] = cache[0].unflatten(0, (-1, BLOCK))
    return blocks


def visible_slots(mask: torch.Tensor, prefix: int) -> torch.Tensor:
    nodes = mask.shape[0]
    return torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), ck.unpack_mask(mask, nodes)], dim=1)


def torch_sdpa(q, visible, k_cache, v_cache):
    length = visible.shape[1]
    keys, values = k_cache[:, :length].transpose(1, 2), v_cache[:, :length].transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=visible, enable_gqa=True
    ).transpose(1, 2)


def torch_flex(q, visible):
    """FlexAttention compiled for the shape, its block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    nodes, length = visible.shape
    blocks = create_block_mask(lambda b, h, i, j: visible[i, j], 1, 1, nodes, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def call(k_cache, v_cache):
        keys, values = k_cache[:, :length].transpose(1, 2), v_cache[:, :length].transpose(1, 2)
        return compiled(q.transpose(1, 2), keys, values, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    return call


CASES = [
    (shape, dtype, case)
    for shape in SHAPES
    for dtype in (torch.float32, torch.bfloat16)
    for case in ("native", "native_paged", "reference", "torch_sdpa")
]
# Compiled for one shape only: that takes half a minute.
CASES.append(((64, 1024, 9, 3, 64), torch.bfloat16, "torch_flex"))


def name_of(value: object) -> str:
    return "N{}-S{}-{}/{}x{}".format(*value) if isinstance(value, tuple) else str(value).removeprefix("torch.")


@pytest.mark.parametrize(("shape", "dtype", "case"), CASES, ids=name_of)
def test_tree_attention(compare, request, shape, dtype, case):
    if case == "torch_flex" and request.config.getoption("quick"):
        pytest.skip("compiling FlexAttention takes half a minute")
    nodes, prefix, heads, kv_heads, head_dim = shape
    q, k_cache, v_cache, mask, prefix_lens = inputs(*shape, dtype)
    visible = visible_slots(mask, prefix)
    caches = (k_cache, v_cache)
    block_table = torch.randperm(k_cache.shape[1] // BLOCK, generator=torch.Generator().manual_seed(1))[None].int()

    def ours(backend, k, v, **options):
        return ck.tree_attention(q, k, v, mask, prefix_lens, backend=backend, **options)

    if case == "native_paged":
        caches = tuple(paged(cache, block_table) for cache in caches)
    elif case.startswith("torch"):
        caches = tuple(cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches)
    make = {
        "native": lambda: functools.partial(ours, "native"),
        "native_paged": lambda: functools.partial(ours, "native", block_table=block_table),
        "reference": lambda: functools.partial(ours, "reference"),
        "torch_sdpa": lambda: functools.partial(torch_sdpa, q, visible),
        "torch_flex": lambda: torch_flex(q, visible),
    }
    with torch.inference_mode(case != "torch_flex"), torch.no_grad():
        compare(
            f"tree_attention N={nodes} S={prefix} heads={heads}/{kv_heads}x{head_dim} {str(dtype)[6:]}",
            {case: in_turns(make[case](), *caches)},
            case,
            work=Work(
                (2 * (prefix + nodes) * kv_heads + 2 * nodes * heads) * head_dim * q.element_size(),
                4 * heads * head_dim * int(visible.sum()),
            ),
            expected=functools.partial(ours, "reference", k_cache, v_cache),
        )
