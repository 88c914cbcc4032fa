"""packed_linear on SmolLM2's projections against torch's linear, with the weights streamed from memory."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close

SHAPES = {"attention": (576, 576), "up": (1536, 576), "down": (576, 1536), "lm_head": (49152, 576)}
ROWS = (1, 8, 32)
# Weights used in turn, more than any cache holds, as in a pass over a model.
STREAMED_BYTES = 48_000_000


@functools.lru_cache(maxsize=1)
def weights(shape: str, dtype: torch.dtype) -> list[tuple[torch.Tensor, ck.PackedWeight]]:
    out_features, in_features = SHAPES[shape]
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    copies = max(1, STREAMED_BYTES // (weight.numel() * weight.element_size()))
    return [(copy, ck.pack_linear(copy)) for copy in (weight.clone() for _ in range(copies))]


@pytest.mark.parametrize("case", ["native", "torch", "torch_fp32"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_linear(benchmark, shape, rows, case):
    pairs = weights(shape, torch.bfloat16)
    weight, packed = pairs[0]
    x = torch.randn(rows, weight.shape[1]).to(torch.bfloat16)
    native = ck.packed_linear(x, packed, backend="native")
    assert_close(native, ck.packed_linear(x, packed, backend="reference"))
    if case == "torch_fp32":
        # The weight would take twice the room; a few copies already exceed the caches.
        pairs = [(copy.float(), None) for copy, _ in pairs[: len(pairs) // 2 + 1]]
        x = x.float()
    turns = itertools.cycle(pairs)

    def call() -> torch.Tensor:
        unpacked, panels = next(turns)
        if case == "native":
            return ck.packed_linear(x, panels, backend="native")
        return torch.nn.functional.linear(x, unpacked)

    benchmark.group = f"packed_linear {shape} {weight.shape[0]}x{weight.shape[1]} T={rows}"
    benchmark.extra_info["bytes"] = weight.numel() * pairs[0][0].element_size()
    benchmark.extra_info["flops"] = 2 * weight.numel() * rows
    benchmark.pedantic(call, warmup_rounds=2, rounds=12, iterations=1)
