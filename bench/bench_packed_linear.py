"""packed_linear on SmolLM2's projections against torch's linear, with the weights streamed from memory."""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work, in_turns
from cerberus_kernels.testing import assert_close

SHAPES = {"attention": (576, 576), "up": (1536, 576), "down": (576, 1536), "lm_head": (49152, 576)}
ROWS = (1, 16, 32, 64, 128)


@functools.lru_cache(maxsize=1)
def inputs(shape: str) -> tuple[torch.Tensor, ck.PackedWeight, torch.Tensor]:
    out_features, in_features = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(torch.bfloat16)
    x = torch.randn(max(ROWS), in_features, generator=generator).to(torch.bfloat16)
    return weight, ck.pack_linear(weight), x


@pytest.mark.parametrize("case", ["native", "reference", "torch_bfloat16", "torch_float32"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_linear(compare, shape, rows, case):
    """``torch_float32`` holds the weights in twice the room: what is fastest where bf16 has no instructions."""
    weight, packed, x = inputs(shape)
    x = x[:rows]
    reference = functools.partial(ck.packed_linear, backend="reference")
    call = {
        "native": lambda: in_turns(lambda w: ck.packed_linear(x, w, backend="native"), packed),
        "reference": lambda: in_turns(lambda w: reference(x, w), packed),
        "torch_bfloat16": lambda: in_turns(functools.partial(torch.nn.functional.linear, x), weight),
        "torch_float32": lambda: in_turns(functools.partial(torch.nn.functional.linear, x.float()), weight.float()),
    }[case]()
    compare(
        f"packed_linear {shape} {weight.shape[0]}x{weight.shape[1]} T={rows} bfloat16",
        {case: call},
        case,
        lambda found, right: assert_close(found.to(right.dtype), right),
        work=Work(2 * (weight.numel() + x.numel() + rows * weight.shape[0]), 2 * weight.numel() * rows),
        expected=lambda: reference(x, packed),
    )
