"""head_loss in Triton: the part between the matrix products, one program a row, in place of the chunk's logits.

The products are large and plain, and the library's own are as fast as any. Between them every logit is read twice and
written once: the first pass finds maximum, sum of exponentials, first maximum and the teacher's share, the second
leaves the gradient where the logits were.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .reference import Rows, loss_and_gradients


def row_loss(logits: torch.Tensor, rows: Rows, needs_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of ``reference.RowLoss``."""
    count, vocab_size = logits.shape
    loss = logits.new_empty(count)
    correct = torch.empty(count, dtype=torch.bool, device=logits.device)
    if count == 0:
        return loss, correct
    block, num_warps = launch_parameters(vocab_size)
    _row_loss_kernel[(count,)](
        logits, rows.targets, rows.scale, rows.teacher, rows.teacher_row, loss, correct.view(torch.uint8),
        vocab_size, logits.stride(0), 0 if rows.teacher is None else rows.teacher.stride(0), rows.soft_weight,
        BLOCK=block, HAS_TEACHER=rows.teacher is not None, GRADIENT=needs_gradient, num_warps=num_warps,
    )  # fmt: skip
    return loss, correct


def launch_parameters(vocab_size: int) -> tuple[int, int]:
    """Columns of a block and warps: 16 logits a thread, in 16-byte loads, are enough in flight to cover memory."""
    block = min(4096, triton.next_power_of_2(vocab_size))
    return block, 8 if block > 2048 else 4


head_loss = functools.partial(loss_and_gradients, row_loss=row_loss)


@triton.jit
def _row_loss_kernel(
    logits,  # fp32 [R, V], becomes the gradient
    targets,  # int64 [R]
    scale,  # fp32 [R]
    teacher,  # fp32 [U, V] probabilities, or None
    teacher_row,  # int64 [R]
    loss,  # fp32 [R]
    correct,  # uint8 [R]
    vocab_size, logits_stride, teacher_stride, soft_weight,
    BLOCK: tl.constexpr, HAS_TEACHER: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    target = tl.load(targets + row)
    if HAS_TEACHER:
        teacher += tl.load(teacher_row + row) * teacher_stride
    column = tl.arange(0, BLOCK)
    greatest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    token = tl.full([1], -1, tl.int64)
    agreed = tl.zeros([1], tl.float32)  # sum of teacher times logit
    taught = tl.zeros([1], tl.float32)  # sum of teacher
    for first in range(0, vocab_size, BLOCK):
        place = first + column
        value = tl.load(logits + place, mask=place < vocab_size, other=float("-inf"))
        best = tl.max(value, 0)
        here = tl.min(tl.where(value == best, place, vocab_size), 0)  # the block's first maximum
        token = tl.where(best > greatest, here, token)
        higher = tl.maximum(greatest, best)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(greatest - base) + tl.sum(tl.exp(value - base), 0)
        greatest = higher
        if HAS_TEACHER:
            share = tl.load(teacher + place, mask=place < vocab_size, other=0.0)
            agreed += tl.sum(tl.where(place < vocab_size, share * value, 0.0), 0)
            taught += tl.sum(share, 0)
    log_sum = tl.where(greatest == float("-inf"), 0.0, greatest) + tl.log(total)  # [1]
    one = tl.arange(0, 1)
    hard = log_sum - tl.load(logits + target + one)
    result = hard
    hard_weight = 1.0
    if HAS_TEACHER:
        result = (1.0 - soft_weight) * hard + soft_weight * (log_sum * taught - agreed)
        hard_weight = 1.0 - soft_weight
    tl.store(loss + row + one, result)
    # A NaN anywhere makes the sum one, and then no token is right.
    tl.store(correct + row + one, ((token == target) & (total == total)).to(tl.uint8))
    if GRADIENT:
        own_scale = tl.load(scale + row + one)
        for first in range(0, vocab_size, BLOCK):
            place = first + column
            value = tl.load(logits + place, mask=place < vocab_size, other=float("-inf"))
            change = tl.exp(value - log_sum) - tl.where(place == target, hard_weight, 0.0)
            if HAS_TEACHER:
                change -= soft_weight * tl.load(teacher + place, mask=place < vocab_size, other=0.0)
            tl.store(logits + place, change * own_scale, mask=place < vocab_size)
