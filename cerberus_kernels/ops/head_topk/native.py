"""head_topk through the native library."""

from __future__ import annotations

import torch

from ..._native import function


def head_topk(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    k: int,
    vocab_size: int,
    token_map: torch.Tensor | None = None,
    leading: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """states [R, H], vocab_weight [>= vocab_size, H] -> int32 [.., k], fp32 [.., k], fp32 [..]: leading, else [R]."""
    rows = states.shape[:1] if leading is None else leading
    tokens = states.new_empty(*rows, k, dtype=torch.int32)
    log_probs = states.new_empty(*rows, k, dtype=torch.float32)
    lse = states.new_empty(rows, dtype=torch.float32)
    if states.requires_grad or vocab_weight.requires_grad:
        states, vocab_weight = states.detach(), vocab_weight.detach()
    function("head_topk")(states, vocab_weight, vocab_size, token_map, tokens, log_probs, lse)
    return tokens, log_probs, lse
