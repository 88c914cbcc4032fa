"""head_states at the size of SmolLM2-135M's heads: ours, the reference, and a linear per head as Medusa runs them."""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work, in_turns

BLOCKS, HEADS, WIDTH = 2, 4, 576


def torch_linear_per_head(hidden, weight, bias, root):
    """The best plain PyTorch for few rows: one linear per head and block, states in fp32 as the operator keeps them."""
    dtype = hidden.dtype
    states = [root.float()] + [hidden.float()] * HEADS
    for block_weight, block_bias in zip(weight, bias, strict=True):
        inputs = [torch.cat([states[i + 1], states[i]], -1).to(dtype) for i in range(HEADS)]
        products = [torch.nn.functional.linear(*each) for each in zip(inputs, block_weight, block_bias, strict=True)]
        moved = [state + torch.nn.functional.silu(p.float()) for state, p in zip(states[1:], products, strict=True)]
        states = [states[0], *moved]
    return torch.stack(states[1:], dim=1).to(dtype)


@functools.lru_cache(maxsize=1)
def inputs(batch: int, dtype: torch.dtype):
    torch.manual_seed(0)
    hidden, root = torch.randn(batch, WIDTH).to(dtype), torch.randn(batch, WIDTH).to(dtype)
    weight = (torch.randn(BLOCKS, HEADS, WIDTH, 2 * WIDTH) / WIDTH**0.5 / 2).to(dtype)
    return hidden, weight, torch.randn(BLOCKS, HEADS, WIDTH).to(dtype), root


def agree(case: str, found: torch.Tensor, right: torch.Tensor) -> None:
    # Plain PyTorch rounds each product to bf16 before the sum; two blocks of it come to a few units in the last place.
    loose = 4 if case.startswith("torch") and right.dtype == torch.bfloat16 else 1
    base = 1.6e-2 if right.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found, right, rtol=base * loose, atol=base * loose)


@pytest.mark.parametrize("case", ["native", "reference", "torch_linear_per_head"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_head_states(compare, dtype, batch, case):
    hidden, weight, bias, root = inputs(batch, dtype)
    calls = {
        "native": lambda w: ck.head_states(hidden, w, bias, root_embedding=root, backend="native"),
        "reference": lambda w: ck.head_states(hidden, w, bias, root_embedding=root, backend="reference"),
        "torch_linear_per_head": lambda w: torch_linear_per_head(hidden, w, bias, root),
    }
    with torch.inference_mode():
        compare(
            f"head_states B={batch} L={BLOCKS} K={HEADS} H={WIDTH} {str(dtype).removeprefix('torch.')}",
            {name: in_turns(call, weight) for name, call in calls.items() if name in {case, "reference"}},
            case,
            functools.partial(agree, case),
            work=Work(weight.numel() * weight.element_size(), 2 * batch * weight.numel()),
        )
