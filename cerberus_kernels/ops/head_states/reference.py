"""Specification of head_states: the draft heads' residual blocks, all K heads of a block as one batched product.

With x_0[i] = hidden for i = 1..K and c = root_embedding if given, else hidden:

    x_l[i] = x_{l-1}[i] + SiLU(W_l[i] · input_l[i] + b_l[i])
    input_l[i] = concat(x_{l-1}[i], x_{l-1}[i-1])   linked (Cerberus, arXiv 2410.13344), x_l[0] = c for every l
    input_l[i] = x_{l-1}[i]                         Medusa (arXiv 2401.10774)
"""

from __future__ import annotations

import torch


def head_states(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    root_embedding: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden [B, H], weight [L, K, H, 2H] or [L, K, H, H], bias [L, K, H], root_embedding [B, H] -> [B, K, H]."""
    num_heads, width = weight.shape[1:3]
    linked = weight.shape[3] == 2 * width
    first_link = hidden if root_embedding is None else root_embedding
    states = hidden.float().unsqueeze(0).expand(num_heads, -1, -1)  # [K, B, H]
    for block_weight, block_bias in zip(weight.float(), bias.float(), strict=True):
        inputs = states
        if linked:
            left = torch.cat([first_link.float().unsqueeze(0), states[:-1]])
            inputs = torch.cat([states, left], dim=-1)  # [K, B, 2H]
        product = torch.baddbmm(block_bias.unsqueeze(1), inputs, block_weight.transpose(1, 2))
        states = states + torch.nn.functional.silu(product)
    return states.transpose(0, 1).to(hidden.dtype)
