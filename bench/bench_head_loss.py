"""head_loss forward and backward: ours, the plain loss by autograd, and torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.ops.head_loss import reference
from cerberus_kernels.testing import assert_close

POSITIONS, HEADS, WIDTH, VOCAB = 256, 4, 576, 8192


@pytest.mark.parametrize("way", ["native", "reference", "specification", "torch_cross_entropy"])
@pytest.mark.parametrize("teacher", [False, True], ids=["hard", "soft"])
def test_head_loss(benchmark, teacher, way):
    if teacher and way == "torch_cross_entropy":
        pytest.skip("with a teacher, cross_entropy would run twice; the specification is that already")
    torch.manual_seed(0)
    benchmark.group = f"head_loss T={POSITIONS} K={HEADS} V={VOCAB} H={WIDTH} fp32 {'soft' if teacher else 'hard'}"
    states = torch.randn(POSITIONS, HEADS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH) / WIDTH**0.5
    targets = torch.randint(VOCAB, (POSITIONS, HEADS))
    rows = torch.randn(POSITIONS + HEADS, WIDTH)
    index = torch.arange(POSITIONS).unsqueeze(1) + torch.arange(HEADS)
    soft_weight = 0.5 if teacher else 0.0

    def specification():
        logits = (rows @ weight.t())[index] if teacher else None
        return reference.head_loss(states, weight, targets, logits, soft_weight=soft_weight)

    def loss():
        if way == "torch_cross_entropy":
            return torch.nn.functional.cross_entropy(states.flatten(0, 1) @ weight.t(), targets.flatten())
        if way == "specification":
            return specification()
        options = {"teacher_states": rows, "teacher_index": index} if teacher else {}
        return ck.head_loss(states, weight, targets, soft_weight=soft_weight, backend=way, **options)

    def run():
        return torch.autograd.grad(loss(), states)[0]

    if way == "native":
        assert_close(loss(), specification())
        assert_close(run(), torch.autograd.grad(specification(), states)[0])
    benchmark.pedantic(run, rounds=4, warmup_rounds=1)
