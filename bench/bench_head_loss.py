"""head_loss forward and backward: ours, the plain loss by autograd, and torch's own cross-entropy."""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work
from cerberus_kernels.ops.head_loss import reference

POSITIONS, HEADS, WIDTH, VOCAB = 256, 4, 576, 8192


@functools.lru_cache(maxsize=1)
def inputs():
    torch.manual_seed(0)
    states = torch.randn(POSITIONS, HEADS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH) / WIDTH**0.5
    targets = torch.randint(VOCAB, (POSITIONS, HEADS))
    rows = torch.randn(POSITIONS + HEADS, WIDTH)
    return states, weight, targets, rows, torch.arange(POSITIONS).unsqueeze(1) + torch.arange(HEADS)


def with_gradient(loss, states):
    value = loss()
    return value.detach(), torch.autograd.grad(value, states)[0]


@pytest.mark.parametrize("case", ["native", "reference", "torch_autograd", "torch_cross_entropy"])
@pytest.mark.parametrize("teacher", [False, True], ids=["hard", "soft"])
def test_head_loss(compare, teacher, case):
    """``torch_autograd`` is the specification left to autograd, all logits in memory; it is also what is right."""
    if teacher and case == "torch_cross_entropy":
        pytest.skip("with a teacher, cross_entropy would run twice; torch_autograd is that already")
    states, weight, targets, rows, index = inputs()
    soft_weight = 0.5 if teacher else 0.0
    options = {"teacher_states": rows, "teacher_index": index} if teacher else {}

    def ours(backend):
        return ck.head_loss(states, weight, targets, soft_weight=soft_weight, backend=backend, **options)

    def autograd():
        logits = (rows @ weight.t())[index] if teacher else None
        return reference.head_loss(states, weight, targets, logits, soft_weight=soft_weight)

    def cross_entropy():
        logits = states.flatten(0, 1) @ weight.t()
        return torch.nn.functional.cross_entropy(logits, targets.flatten())

    losses = {
        "native": functools.partial(ours, "native"),
        "reference": functools.partial(ours, "reference"),
        "torch_autograd": autograd,
        "torch_cross_entropy": cross_entropy,
    }
    calls = {name: functools.partial(with_gradient, loss, states) for name, loss in losses.items()}
    products = 2 * POSITIONS * HEADS * VOCAB * WIDTH
    work = Work(2 * VOCAB * WIDTH * 4, products * 2 + (2 * len(rows) * VOCAB * WIDTH if teacher else 0))
    group = f"head_loss T={POSITIONS} K={HEADS} V={VOCAB} H={WIDTH} float32 {'soft' if teacher else 'hard'}"
    compare(group, calls, case, work=work, expected=calls["torch_autograd"])
