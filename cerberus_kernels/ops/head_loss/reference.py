"""Specification of head_loss: cross-entropy of every head's state against its target, through the shared LM head.

For state s of head i with target y and optional teacher logits t:

    hard = logsumexp(s·Wᵀ) - (s·Wᵀ)[y]
    soft = -sum_v softmax(t)[v] · log_softmax(s·Wᵀ)[v]
    loss = sum over valid rows of head_weights[i] · ((1 - soft_weight)·hard + soft_weight·soft) / number of valid rows

A row with target -1 counts nowhere. No gradient flows through the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

IGNORED = -1


def head_loss(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    targets: torch.Tensor,
    teacher_logits: torch.Tensor | None = None,
    head_weights: torch.Tensor | None = None,
    soft_weight: float = 0.0,
) -> torch.Tensor:
    """states [T, K, H], vocab_weight [V, H], targets int64 [T, K], teacher_logits [T, K, V] -> scalar."""
    wide = torch.promote_types(states.dtype, torch.float32)
    log_probs = (states.to(wide) @ vocab_weight.to(wide).t()).log_softmax(-1)  # [T, K, V]
    valid = targets != IGNORED
    loss = -log_probs.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    if teacher_logits is not None:
        soft = -(teacher_logits.to(wide).softmax(-1) * log_probs).sum(-1)
        loss = (1 - soft_weight) * loss + soft_weight * soft
    if head_weights is not None:
        loss = loss * head_weights
    return loss.where(valid, 0).sum() / valid.sum().clamp_min(1)


@dataclass(frozen=True)
class Rows:
    """What a chunk of R rows is compared with.

    Attributes:
        targets: int64 ``[R]``, each in ``[0, V)``.
        scale: fp32 ``[R]``, the row's share of the loss: head weight over the number of valid rows.
        teacher: fp32 ``[U, V]`` probabilities, or None.
        teacher_row: int64 ``[R]``, row of ``teacher`` for each row; several rows may share one.
        soft_weight: share of the loss on the teacher.
    """

    targets: torch.Tensor
    scale: torch.Tensor
    teacher: torch.Tensor | None
    teacher_row: torch.Tensor | None
    soft_weight: float


# (logits fp32 [R, V], rows, needs_gradient) -> loss fp32 [R] before scaling, correct bool [R]; with needs_gradient the
# logits become the gradient of the scaled loss, in place; without, their content is lost.
RowLoss = Callable[[torch.Tensor, Rows, bool], tuple[torch.Tensor, torch.Tensor]]


def row_loss(logits: torch.Tensor, rows: Rows, needs_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each row and, in place of the logits, scale · (softmax - (1 - a)·onehot - a·teacher)."""
    targets = rows.targets.unsqueeze(1)
    greatest, token = logits.max(-1)
    correct = (token == rows.targets) & ~greatest.isnan()
    log_sum = logits.logsumexp(-1, keepdim=True)
    hard = (log_sum - logits.gather(1, targets)).squeeze(1)
    loss = hard
    teacher = None
    if rows.teacher is not None:
        teacher = rows.teacher[rows.teacher_row]  # [R, V]
        soft = -(teacher * (logits - log_sum)).sum(-1)
        loss = (1 - rows.soft_weight) * hard + rows.soft_weight * soft
    if needs_gradient:
        logits.sub_(log_sum).exp_()
        hard_weight = 1.0 if teacher is None else 1 - rows.soft_weight
        logits.scatter_add_(1, targets, torch.full_like(loss, -hard_weight).unsqueeze(1))
        if teacher is not None:
            logits.sub_(teacher, alpha=rows.soft_weight)
        logits.mul_(rows.scale.unsqueeze(1))
    return loss, correct


def loss_and_gradients(
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
    row_loss: RowLoss = row_loss,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss and its gradients, with the logits of ``chunk_tokens`` positions in memory at a time.

    Shapes as in the operator's docstring; ``row_loss`` is the part between the matrix products.

    Returns:
        loss fp32 [], gradient of states [T, K, H] and of vocab_weight [V, H] (empty where not needed), and per head how
        many targets were the row's first maximum and how many there were, int64 [K].
    """
    positions, heads, width = states.shape
    needs_gradient = needs_states or needs_vocab_weight
    flat_states, flat_targets = states.reshape(-1, width), targets.reshape(-1).to(torch.int64)
    valid = (flat_targets != IGNORED).nonzero().squeeze(1)
    _check_range(flat_targets, "targets", vocab_weight.shape[0])
    head_of_row = torch.arange(heads, device=states.device).repeat(positions)[valid]
    weights = torch.ones(heads, device=states.device) if head_weights is None else head_weights.to(torch.float32)
    teachers = _Teachers(teacher_logits, teacher_states, teacher_index, heads) if soft_weight > 0 else None
    wide_weight = vocab_weight.to(torch.float32)

    counted = torch.bincount(head_of_row, minlength=heads)
    correct = torch.zeros_like(counted)
    total = torch.zeros((), dtype=torch.float64, device=states.device)
    states_gradient = torch.zeros_like(flat_states) if needs_states else states.new_empty(0)
    weight_gradient = torch.zeros_like(wide_weight) if needs_vocab_weight else vocab_weight.new_empty(0)
    for chunk in valid.split(chunk_tokens * heads):
        heads_here = head_of_row[: len(chunk)]
        head_of_row = head_of_row[len(chunk) :]
        scale = weights[heads_here] / max(1, len(valid))
        teacher, teacher_row = teachers.probabilities(chunk, wide_weight) if teachers else (None, None)
        rows = Rows(flat_targets[chunk], scale, teacher, teacher_row, soft_weight)
        chunk_states = flat_states[chunk].to(torch.float32)
        logits = chunk_states @ wide_weight.t()
        loss, right = row_loss(logits, rows, needs_gradient)
        total += (loss.double() * scale).sum()
        correct += torch.bincount(heads_here[right], minlength=heads)
        if needs_states:
            states_gradient[chunk] = (logits @ wide_weight).to(states.dtype)
        if needs_vocab_weight:
            weight_gradient.addmm_(logits.t(), chunk_states)
    if needs_states:
        states_gradient = states_gradient.view(positions, heads, width)
    return total.float(), states_gradient, weight_gradient.to(vocab_weight.dtype), correct, counted


class _Teachers:
    """The teacher's distributions of a chunk of rows, however they were given."""

    def __init__(
        self,
        logits: torch.Tensor | None,
        states: torch.Tensor | None,
        index: torch.Tensor | None,
        heads: int,
    ) -> None:
        self.logits = None if logits is None else logits.reshape(-1, logits.shape[-1])
        self.states, self.index = states, None
        if states is not None and index is None:
            self.states = states.reshape(-1, states.shape[-1])
        if index is not None:
            self.index = index.reshape(-1).to(torch.int64)

    def probabilities(self, chunk: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """chunk int64 [R] flat row numbers, weight fp32 [V, H] -> fp32 [U, V], int64 [R]."""
        if self.logits is not None:
            return self.logits[chunk].to(torch.float32).softmax(-1), torch.arange(len(chunk), device=chunk.device)
        assert self.states is not None
        if self.index is None:
            used, row = chunk, torch.arange(len(chunk), device=chunk.device)
        else:
            used, row = self.index[chunk].unique(return_inverse=True)
            _check_range(used, "teacher_index", self.states.shape[0], lowest=0)
        logits = self.states[used].to(torch.float32) @ weight.t()
        return logits.softmax(-1), row


def _check_range(values: torch.Tensor, argument: str, size: int, lowest: int = IGNORED) -> None:
    """Refuse indices outside [lowest, size); on a GPU, where that would stop the stream, indexing itself does."""
    if values.device.type != "cpu" or values.numel() == 0:
        return
    for extreme in (int(values.min()), int(values.max())):
        if not lowest <= extreme < size:
            raise ValueError(f"head_loss: {argument} must lie in [{lowest}, {size}), got {extreme}")
