"""head_topk against its reference and the plain PyTorch way: linear, logsumexp, topk."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck

ROWS, WIDTH, CANDIDATES = 4, 576, 10


def plain_torch(states: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(states, weight).float()
    lse = torch.logsumexp(logits, dim=-1)
    values, tokens = torch.topk(logits, CANDIDATES, dim=-1)
    return tokens, values - lse.unsqueeze(-1), lse


@pytest.mark.parametrize("implementation", ["native", "reference", "plain_torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [8192, 16384, 49152])
def test_head_topk(benchmark, vocab, dtype, implementation):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, WIDTH, generator=generator).to(getattr(torch, dtype))
    weight = (torch.randn(vocab, WIDTH, generator=generator) / WIDTH**0.5).to(states.dtype)
    runs = {
        "native": lambda: ck.head_topk(states, weight, CANDIDATES, backend="native"),
        "reference": lambda: ck.head_topk(states, weight, CANDIDATES, backend="reference"),
        "plain_torch": lambda: plain_torch(states, weight),
    }
    expected = runs["reference"]()
    _, log_probs, lse = runs[implementation]()
    # bf16 logits are rounded in the plain way, and only there.
    loose = implementation == "plain_torch" and dtype == "bfloat16"
    torch.testing.assert_close(lse, expected.lse, rtol=2e-5, atol=2e-2 if loose else 2e-5)
    torch.testing.assert_close(log_probs, expected.log_probs, rtol=2e-5, atol=2e-2 if loose else 2e-5)
    benchmark.group = f"head_topk R={ROWS} H={WIDTH} k={CANDIDATES} V={vocab} {dtype}"
    benchmark.pedantic(runs[implementation], rounds=3 if implementation == "reference" else 12, warmup_rounds=1)
