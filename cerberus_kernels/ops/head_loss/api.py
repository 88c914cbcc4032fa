"""head_loss: fused linear cross-entropy of all draft heads, for training them."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from ..._checks import FLOATS, check_tensor, refuse
from ..._dispatch import LazyTriton, Operator
from . import native, reference

INTEGERS = (torch.int64, torch.int32)
# Logits that exist at a time by default, in elements: 64 MiB of fp32.
DEFAULT_CHUNK_LOGITS = 1 << 24

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    targets: torch.Tensor,
    teacher_logits: torch.Tensor | None,
    teacher_states: torch.Tensor | None,
    teacher_index: torch.Tensor | None,
    head_weights: torch.Tensor | None,
    soft_weight: float,
    chunk_tokens: int,
    needs_states: bool,
    needs_vocab_weight: bool,
    *,
    backend: str = "auto",
) -> Outputs:
    counts = targets.new_empty(states.shape[1], dtype=torch.int64)
    return (
        states.new_empty((), dtype=torch.float32),
        states.new_empty(states.shape if needs_states else 0),
        vocab_weight.new_empty(vocab_weight.shape if needs_vocab_weight else 0),
        counts,
        torch.empty_like(counts),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Outputs) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[1], output[2])


def _backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> tuple[Any, ...]:
    states_gradient, weight_gradient = ctx.saved_tensors
    needs_states, needs_vocab_weight = ctx.needs_input_grad[:2]
    return (
        states_gradient * gradient.to(states_gradient.dtype) if needs_states else None,
        weight_gradient * gradient.to(weight_gradient.dtype) if needs_vocab_weight else None,
        *[None] * 9,
    )


_operator = Operator(
    "head_loss",
    "(Tensor states, Tensor vocab_weight, Tensor targets, Tensor? teacher_logits, Tensor? teacher_states, "
    "Tensor? teacher_index, Tensor? head_weights, float soft_weight, int chunk_tokens, bool needs_states, "
    'bool needs_vocab_weight, *, str backend="auto") -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    {"reference": reference.loss_and_gradients, "native": native.head_loss, "triton": LazyTriton("head_loss")},
    _fake,
)
_operator.differentiate(_backward, _save)


@overload
def head_loss(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    teacher_logits: torch.Tensor | None = None,
    teacher_states: torch.Tensor | None = None,
    teacher_index: torch.Tensor | None = None,
    head_weights: torch.Tensor | None = None,
    soft_weight: float = 0.0,
    chunk_tokens: int | None = None,
    return_correct: Literal[False] = False,
    backend: str = "auto",
) -> torch.Tensor: ...


@overload
def head_loss(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    teacher_logits: torch.Tensor | None = None,
    teacher_states: torch.Tensor | None = None,
    teacher_index: torch.Tensor | None = None,
    head_weights: torch.Tensor | None = None,
    soft_weight: float = 0.0,
    chunk_tokens: int | None = None,
    return_correct: Literal[True],
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def head_loss(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    teacher_logits: torch.Tensor | None = None,
    teacher_states: torch.Tensor | None = None,
    teacher_index: torch.Tensor | None = None,
    head_weights: torch.Tensor | None = None,
    soft_weight: float = 0.0,
    chunk_tokens: int | None = None,
    return_correct: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fused linear cross-entropy of all draft heads through the shared LM head.

    For state s of head i with target y and, optionally, teacher logits t::

        hard = logsumexp(s·Wᵀ) - (s·Wᵀ)[y]
        soft = -sum_v softmax(t)[v] · log_softmax(s·Wᵀ)[v]
        loss = sum over valid rows of head_weights[i] · ((1 - soft_weight)·hard + soft_weight·soft) / valid rows

    The gradients are made in the same pass as the loss, ``chunk_tokens`` positions at a time, so the memory for logits
    is ``chunk_tokens · K · V`` floats whatever T is (the method of Liger Kernel, arXiv 2410.10989). Head i at position
    t learns the token i places after the newest one, and the base model's own distribution for it is the LM head on its
    hidden state i positions on; so a teacher is best given as ``teacher_states`` (the base model's hidden states) with
    ``teacher_index`` (which of them each head should match): its logits are then made per chunk, once for all heads
    that share a row, and never stored.

    Args:
        states: ``[T, K, H]`` fp32, bf16 or fp16, from :func:`head_states`.
        vocab_weight: ``[V, H]`` the LM head; its gradient is made only if it requires one.
        targets: int64 or int32 ``[T, K]`` in ``[0, V)``, or -1 for a row that counts nowhere and is not read.
        teacher_logits: ``[T, K, V]``, or None.
        teacher_states: ``[T, K, H]``, or ``[P, H]`` with ``teacher_index``: what the LM head ``vocab_weight`` is
            applied to for the teacher's logits. At most one kind of teacher may be given. No gradient flows through it.
        teacher_index: int64 or int32 ``[T, K]``, row of ``teacher_states`` in ``[0, P)``; not read where the target
            is -1.
        head_weights: ``[K]`` floats, by default all one.
        soft_weight: share of the loss on the teacher, in [0, 1]; above 0 it needs a teacher.
        chunk_tokens: positions per chunk, by default as many as keep its logits within 64 MiB.
        return_correct: also count, per head, how many targets were the first maximum of their row; in a row with NaN
            none is.
        backend: ``"auto"``, ``"reference"``, ``"native"`` or ``"triton"``.

    Returns:
        fp32 scalar, differentiable once with respect to states and vocab_weight; 0 when every row is ignored. With
        ``return_correct`` a tuple ``(loss, correct int64 [K], counted int64 [K])``.

    Raises:
        ValueError: wrong dtype, shape, stride, device or range.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> states = torch.zeros(1, 2, 8, requires_grad=True)
        >>> loss = ck.head_loss(states, torch.randn(16, 8), torch.tensor([[3, -1]]))
        >>> round(loss.item(), 4)  # ln 16: zero states know nothing
        2.7726
    """
    op = "head_loss"
    check_tensor(op, "states", states, ndim=3, dtypes=FLOATS)
    positions, heads, width = states.shape
    device = states.device
    check_tensor(op, "vocab_weight", vocab_weight, dtypes=FLOATS, device=device, shape=[None, width])
    check_tensor(op, "targets", targets, dtypes=INTEGERS, device=device, shape=[positions, heads])
    vocab = vocab_weight.shape[0]
    if vocab == 0:
        refuse(op, "vocab_weight", "of at least one row", list(vocab_weight.shape))
    if head_weights is not None:
        check_tensor(op, "head_weights", head_weights, dtypes=FLOATS, device=device, shape=[heads])
    if teacher_logits is not None:
        check_tensor(
            op, "teacher_logits", teacher_logits, dtypes=FLOATS, device=device, shape=[positions, heads, vocab]
        )
    _check_teacher_states(states, teacher_logits, teacher_states, teacher_index)
    if not 0 <= soft_weight <= 1:
        refuse(op, "soft_weight", "in [0, 1]", soft_weight)
    if soft_weight > 0 and teacher_logits is None and teacher_states is None:
        refuse(op, "soft_weight", "0 without teacher_logits or teacher_states", soft_weight)
    if chunk_tokens is None:
        chunk_tokens = max(1, DEFAULT_CHUNK_LOGITS // (max(1, heads) * vocab))
    if chunk_tokens < 1:
        refuse(op, "chunk_tokens", ">= 1", chunk_tokens)
    recording = torch.is_grad_enabled()
    loss, _, _, correct, counted = _operator.call(
        states,
        vocab_weight,
        targets,
        teacher_logits,
        teacher_states,
        teacher_index,
        head_weights,
        float(soft_weight),
        chunk_tokens,
        recording and states.requires_grad,
        recording and vocab_weight.requires_grad,
        backend=backend,
    )
    return (loss, correct, counted) if return_correct else loss


def _check_teacher_states(
    states: torch.Tensor,
    teacher_logits: torch.Tensor | None,
    teacher_states: torch.Tensor | None,
    teacher_index: torch.Tensor | None,
) -> None:
    """Refuse two teachers, an index without rows, and shapes that do not fit."""
    op = "head_loss"
    positions, heads, width = states.shape
    if teacher_states is None:
        if teacher_index is not None:
            refuse(op, "teacher_index", "None without teacher_states", f"shape {list(teacher_index.shape)}")
        return
    if teacher_logits is not None:
        refuse(op, "teacher_states", "None when teacher_logits are given", f"shape {list(teacher_states.shape)}")
    shape = [positions, heads, width] if teacher_index is None else [None, width]
    check_tensor(op, "teacher_states", teacher_states, dtypes=FLOATS, device=states.device, shape=shape)
    if teacher_index is not None:
        check_tensor(
            op, "teacher_index", teacher_index, dtypes=INTEGERS, device=states.device, shape=[positions, heads]
        )
