"""gate against its reference and plain PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work
from cerberus_kernels.testing import assert_close

WIDTH, INNER, VOCAB = 576, 64, 49152


def torch_entropy(logits: torch.Tensor) -> torch.Tensor:
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def torch_learned(hidden: torch.Tensor, weights: ck.GateWeights) -> torch.Tensor:
    w1, b1, w2, b2 = weights
    x = torch.nn.functional.rms_norm(hidden.float(), (hidden.shape[-1],), eps=1e-6)
    return torch.sigmoid(torch.nn.functional.silu(x @ w1.t() + b1) @ w2 + b2)


@functools.lru_cache(maxsize=1)
def logits_of(batch: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, VOCAB, generator=generator).to(getattr(torch, dtype))


@pytest.mark.parametrize("case", ["native", "reference", "torch_entropy"])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_entropy_of_logits(compare, dtype, batch, case):
    logits = logits_of(batch, dtype)
    calls = {
        "native": lambda: ck.gate(None, logits=logits, threshold=2.0, backend="native").score,
        "reference": lambda: ck.gate(None, logits=logits, threshold=2.0, backend="reference").score,
        "torch_entropy": lambda: torch_entropy(logits),
    }
    work = Work(logits.numel() * logits.element_size(), 4 * logits.numel())
    compare(f"gate entropy of logits B={batch} V={VOCAB} {dtype}", calls, case, assert_close, work=work)


@pytest.mark.parametrize("case", ["native", "reference", "torch"])
@pytest.mark.parametrize("kind", ["entropy given", "hidden_entropy", "learned"])
def test_gate_of_one_step(compare, kind, case):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, WIDTH, generator=generator).bfloat16()
    shapes = ((INNER, WIDTH), (INNER,), (INNER,), (1,))
    weights = ck.GateWeights(*(torch.randn(shape, generator=generator) * 0.05 for shape in shapes))
    entropy = torch.tensor([1.25])
    options = {
        "entropy given": {"entropy": entropy},
        "hidden_entropy": {"kind": kind},
        "learned": {"kind": kind, "weights": weights},
    }[kind]
    # Open or not is the decision; the score goes with it.
    plain = {
        "entropy given": lambda: (entropy, entropy < 2.0),
        "hidden_entropy": lambda: ((score := torch_entropy(hidden)), score < 2.0),
        "learned": lambda: ((score := torch_learned(hidden, weights)), score >= 2.0),
    }[kind]
    calls = {
        "native": lambda: tuple(ck.gate(hidden, **options, threshold=2.0, backend="native")),
        "reference": lambda: tuple(ck.gate(hidden, **options, threshold=2.0, backend="reference")),
        "torch": plain,
    }
    weight_bytes = 4 * INNER * WIDTH if kind == "learned" else 0
    work = Work(hidden.numel() * 2 + weight_bytes, weight_bytes // 2)
    compare(f"gate {kind} B=1 H={WIDTH} bfloat16", calls, case, work=work)
