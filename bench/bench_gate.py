"""gate against its reference, which is the plain PyTorch way."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close

WIDTH, INNER, VOCAB = 576, 64, 49152


def plain_torch_entropy(logits: torch.Tensor) -> torch.Tensor:
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("implementation", ["native", "reference", "plain_torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_entropy_of_logits(benchmark, dtype, implementation):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    runs = {
        "native": lambda: ck.gate(None, logits=logits, threshold=2.0, backend="native").score,
        "reference": lambda: ck.gate(None, logits=logits, threshold=2.0, backend="reference").score,
        "plain_torch": lambda: plain_torch_entropy(logits),
    }
    assert_close(runs[implementation](), runs["reference"]())
    benchmark.group = f"gate entropy of logits B=1 V={VOCAB} {dtype}"
    benchmark.pedantic(runs[implementation], rounds=100, warmup_rounds=5)


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("kind", ["entropy given", "hidden_entropy", "learned"])
def test_gate_of_one_step(benchmark, kind, implementation):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, WIDTH, generator=generator).bfloat16()
    options: dict[str, object] = {"kind": kind}
    if kind == "learned":
        shapes = ((INNER, WIDTH), (INNER,), (INNER,), (1,))
        options["weights"] = ck.GateWeights(*(torch.randn(shape, generator=generator) * 0.05 for shape in shapes))
    elif kind == "entropy given":
        options = {"entropy": torch.tensor([1.25])}

    def run(backend: str = implementation) -> torch.Tensor:
        return ck.gate(hidden, **options, threshold=2.0, backend=backend).score

    assert_close(run(), run("reference"))
    benchmark.group = f"gate {kind} B=1 H={WIDTH} bfloat16"
    benchmark.pedantic(run, rounds=200, warmup_rounds=5)
