"""head_loss with the part between the matrix products in the native library."""

from __future__ import annotations

import functools

import torch

from ..._native import function
from .reference import Rows, loss_and_gradients


def row_loss(logits: torch.Tensor, rows: Rows, needs_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of ``reference.RowLoss``."""
    loss = logits.new_empty(logits.shape[0])
    correct = torch.empty(logits.shape[0], dtype=torch.bool)
    teacher = (rows.teacher, rows.teacher_row, rows.soft_weight)
    function("head_loss")(logits, rows.targets, rows.scale, *teacher, needs_gradient, loss, correct)
    return loss, correct


head_loss = functools.partial(loss_and_gradients, row_loss=row_loss)
