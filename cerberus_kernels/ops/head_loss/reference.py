"""Specification of head_loss: cross-entropy of every head's state against its target, through the shared LM head.

For state s of head i with target y and optional teacher logits t:

    hard = logsumexp(s·Wᵀ) - (s·Wᵀ)[y]
    soft = -sum_v softmax(t)[v] · log_softmax(s·Wᵀ)[v]
    loss = sum over valid rows of head_weights[i] · ((1 - soft_weight)·hard + soft_weight·soft) / number of valid rows

A row with target -1 counts nowhere.
"""

from __future__ import annotations

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
    log_probs = (states.float() @ vocab_weight.float().t()).log_softmax(-1)  # [T, K, V]
    valid = targets != IGNORED
    loss = -log_probs.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    if teacher_logits is not None:
        soft = -(teacher_logits.float().softmax(-1) * log_probs).sum(-1)
        loss = (1 - soft_weight) * loss + soft_weight * soft
    if head_weights is not None:
        loss = loss * head_weights
    return loss.where(valid, 0).sum() / valid.sum().clamp_min(1)
