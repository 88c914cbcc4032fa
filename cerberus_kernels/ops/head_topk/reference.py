"""Specification of head_topk: projection, log-sum-exp and top-k over the vocabulary.

With logits[r, v] = sum over j of states[r, j] · vocab_weight[v, j], products and sums in fp32:

    lse[r] = ln sum over v < vocab_size of exp(logits[r, v])
    rows[r] = the k rows v < vocab_size of greatest logits[r, v], descending, equal logits by the lowest v
    log_probs[r, i] = logits[r, rows[r, i]] - lse[r]
    tokens[r, i] = token_map[rows[r, i]], or rows[r, i] without a map

Where lse is not finite (a NaN or +inf logit, or every logit -inf) lse and log_probs are NaN and rows are 0 .. k-1.
"""

from __future__ import annotations

import torch


def head_topk(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    k: int,
    vocab_size: int,
    token_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """states [R, H], vocab_weight [>= vocab_size, H] -> int32 [R, k], fp32 [R, k], fp32 [R]."""
    logits = states.float() @ vocab_weight[:vocab_size].float().T  # [R, vocab_size]
    lse = torch.logsumexp(logits, dim=-1)
    values, rows = torch.sort(logits, dim=-1, descending=True, stable=True)
    usable = lse.isfinite().unsqueeze(-1)
    rows = torch.where(usable, rows[:, :k], torch.arange(k, device=rows.device))
    log_probs = torch.where(usable, values[:, :k] - lse.unsqueeze(-1), torch.nan)
    tokens = rows.to(torch.int32) if token_map is None else token_map[rows]
    return tokens, log_probs, torch.where(usable.squeeze(-1), lse, torch.nan)
