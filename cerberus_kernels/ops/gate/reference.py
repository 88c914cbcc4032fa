"""Specification of gate: a score per request and whether it lets drafting through.

    entropy of x[b]:  m = max x[b], e_i = exp(x_i - m), z = sum e_i,  H = ln z - (sum e_i · (x_i - m)) / z   (nats)
                      a term with e_i = 0 is 0, so -inf logits count as probability zero
    entropy           score = the given entropy, or H of logits[b, :vocab_size]
    hidden_entropy    score = H of hidden[b]
    learned           score = sigmoid(w2 · SiLU(W1 · rms_norm(hidden[b]) + b1) + b2)
                      rms_norm(x) = x / sqrt(mean(x²) + eps)

    open = score < threshold for the entropies, score >= threshold for learned; a NaN score never opens

Everything after the inputs is fp32, the threshold too.
"""

from __future__ import annotations

import torch

KINDS = ("entropy", "hidden_entropy", "learned")


def row_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of softmax over the last dimension; [.., V] -> fp32 [..]. NaN for a row without a maximum."""
    logits = logits.float()
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    weight = shifted.exp()
    total = weight.sum(dim=-1)
    terms = torch.where(weight == 0, 0.0, weight * shifted)
    return total.log() - terms.sum(dim=-1) / total


def probability(
    hidden: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, eps: float
) -> torch.Tensor:
    """Learned score: hidden [B, H], w1 [M, H], b1 [M], w2 [M], b2 [1] -> fp32 [B]."""
    hidden = hidden.float()
    normed = hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + eps)
    inner = torch.nn.functional.silu(normed @ w1.float().T + b1.float())
    return torch.sigmoid(inner @ w2.float() + b2.float())


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
    if kind == "learned":
        assert hidden is not None and w1 is not None and b1 is not None and w2 is not None and b2 is not None
        score = probability(hidden, w1, b1, w2, b2, eps)
    elif kind == "hidden_entropy":
        assert hidden is not None
        score = row_entropy(hidden)
    elif entropy is not None:
        score = entropy.clone()
    else:
        assert logits is not None
        score = row_entropy(logits[:, :vocab_size])
    limit = torch.full_like(score, threshold) if thresholds is None else thresholds
    return score, score >= limit if kind == "learned" else score < limit


def entropy_gradient(logits: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`row_entropy`: dH/dx_i = -p_i · (ln p_i + H); logits [B, V], gradient [B] -> fp32 [B, V]."""
    logits = logits.float()
    log_p = torch.log_softmax(logits, dim=-1)
    p = log_p.exp()
    surprise = torch.where(p == 0, 0.0, p * (log_p + row_entropy(logits).unsqueeze(-1)))
    return -gradient.unsqueeze(-1) * surprise


def probability_gradients(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    eps: float,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of :func:`probability` for hidden, w1, b1, w2, b2 in fp32, given its gradient [B]."""
    hidden, w1, w2 = hidden.float(), w1.float(), w2.float()
    scale = torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + eps)  # [B, 1]
    normed = hidden * scale
    before = normed @ w1.T + b1.float()  # [B, M]
    squashed = torch.sigmoid(before)
    inner = before * squashed
    score = torch.sigmoid(inner @ w2 + b2.float())
    d_logit = gradient * score * (1 - score)
    d_before = d_logit.unsqueeze(-1) * w2 * squashed * (1 + before * (1 - squashed))
    d_normed = d_before @ w1
    d_hidden = scale * (d_normed - normed * (d_normed * normed).mean(dim=-1, keepdim=True))
    return d_hidden, d_before.T @ normed, d_before.sum(dim=0), d_logit @ inner, d_logit.sum().reshape(b2.shape)
