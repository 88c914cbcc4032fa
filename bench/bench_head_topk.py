"""head_topk against its reference and the plain PyTorch way: linear, logsumexp, topk."""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work

ROWS, CANDIDATES = 4, 10
# Vocabularies of SmolLM2 and Llama 3 with the widths of SmolLM2-135M, Llama 3.2 1B and Llama 3 8B.
SHAPES = [(vocab, width, "bfloat16") for vocab in (49152, 128256) for width in (576, 2048, 4096)]
SHAPES += [(49152, 576, "float32"), (49152, 576, "float16")]


@functools.lru_cache(maxsize=1)
def inputs(vocab: int, width: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, width, generator=generator).to(getattr(torch, dtype))
    weight = torch.empty(vocab, width, dtype=states.dtype)
    # A block of random rows under scales of their own: half a billion normal numbers would take longer than the timing.
    block = (torch.randn(1024, width, generator=generator) / width**0.5).to(states.dtype)
    for rows in weight.split(len(block)):
        scale = 0.5 + torch.rand(len(rows), 1, generator=generator)
        torch.mul(block[: len(rows)], scale.to(states.dtype), out=rows)
    return states, weight


def torch_linear_topk(states: torch.Tensor, weight: torch.Tensor) -> ck.Candidates:
    logits = torch.nn.functional.linear(states, weight).float()
    lse = torch.logsumexp(logits, dim=-1)
    values, tokens = torch.topk(logits, CANDIDATES, dim=-1)
    return ck.Candidates(tokens, values - lse.unsqueeze(-1), lse)


@functools.lru_cache(maxsize=1)
def expected(vocab: int, width: int, dtype: str) -> ck.Candidates:
    return ck.head_topk(*inputs(vocab, width, dtype), CANDIDATES, backend="reference")


def agree(case: str, dtype: str, found: ck.Candidates, right: ck.Candidates) -> None:
    # Plain PyTorch rounds logits to 16 bits, which can swap close candidates and moves their values by half a step.
    rounded = case.startswith("torch") and dtype != "float32"
    tolerance = {"rtol": 2e-5, "atol": 2e-2 if rounded else 2e-5}
    torch.testing.assert_close(found.lse, right.lse, **tolerance)
    torch.testing.assert_close(found.log_probs, right.log_probs, **tolerance)
    if not rounded:
        assert torch.equal(found.tokens, right.tokens.to(found.tokens.dtype))


@pytest.mark.parametrize("case", ["native", "reference", "torch_linear_topk"])
@pytest.mark.parametrize(("vocab", "width", "dtype"), SHAPES)
def test_head_topk(compare, vocab, width, dtype, case):
    states, weight = inputs(vocab, width, dtype)
    calls = {
        "native": lambda: ck.head_topk(states, weight, CANDIDATES, backend="native"),
        "reference": lambda: ck.head_topk(states, weight, CANDIDATES, backend="reference"),
        "torch_linear_topk": lambda: torch_linear_topk(states, weight),
    }
    compare(
        f"head_topk R={ROWS} k={CANDIDATES} V={vocab} H={width} {dtype}",
        calls,
        case,
        functools.partial(agree, case, dtype),
        work=Work(weight.numel() * weight.element_size(), 2 * ROWS * weight.numel()),
        expected=lambda: expected(vocab, width, dtype),
    )
