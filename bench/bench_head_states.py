"""head_states at the size of SmolLM2-135M's heads: ours, the reference, and a linear per head as Medusa runs them."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close

BLOCKS, HEADS, WIDTH = 2, 4, 576


def linear_per_head(hidden, weight, bias, root):
    """The best plain PyTorch for few rows: one linear per head and block, in the weights' own dtype."""
    states = [root] + [hidden] * HEADS
    for block_weight, block_bias in zip(weight, bias, strict=True):
        inputs = [torch.cat([states[i + 1], states[i]], -1) for i in range(HEADS)]
        products = [torch.nn.functional.linear(*each) for each in zip(inputs, block_weight, block_bias, strict=True)]
        moved = [state + torch.nn.functional.silu(p) for state, p in zip(states[1:], products, strict=True)]
        states = [root, *moved]
    return torch.stack(states[1:], dim=1)


@pytest.mark.parametrize("way", ["native", "reference", "linear_per_head"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_head_states(benchmark, dtype, batch, way):
    torch.manual_seed(0)
    benchmark.group = f"head_states B={batch} L={BLOCKS} K={HEADS} H={WIDTH} {dtype}"
    hidden, root = torch.randn(batch, WIDTH).to(dtype), torch.randn(batch, WIDTH).to(dtype)
    weight = (torch.randn(BLOCKS, HEADS, WIDTH, 2 * WIDTH) / WIDTH**0.5 / 2).to(dtype)
    bias = torch.randn(BLOCKS, HEADS, WIDTH).to(dtype)

    def run():
        if way == "linear_per_head":
            return linear_per_head(hidden, weight, bias, root)
        return ck.head_states(hidden, weight, bias, root_embedding=root, backend=way)

    with torch.inference_mode():
        expected = ck.head_states(hidden, weight, bias, root_embedding=root, backend="reference")
        if way == "native":
            assert_close(run(), expected)
        benchmark.pedantic(run, rounds=30, warmup_rounds=3)
