"""gate through the native library."""

from __future__ import annotations

import torch

from ..._native import function


def gate(
    hidden: torch.Tensor | None,
    entropy: torch.Tensor | None,
    logits: torch.Tensor | None,
    thresholds: torch.Tensor | None,
    w1: torch.Tensor | None,
    b1: torch.Tensor | None,
    w2: torch.Tensor | None,
    b2: torch.Tensor | None,
    kind: str,
    threshold: float,
    vocab_size: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the other kinds are None; thresholds fp32 [B] replaces threshold -> fp32 [B], bool [B]."""
    given = next(tensor for tensor in (entropy, logits, hidden) if tensor is not None)
    score = given.new_empty(given.shape[0], dtype=torch.float32)
    is_open = given.new_empty(given.shape[0], dtype=torch.bool)
    inputs = (hidden, entropy, logits, thresholds, w1, b1, w2, b2)
    function("gate")(*inputs, kind, threshold, vocab_size, eps, score, is_open.view(torch.uint8))
    return score, is_open
