"""Specification of head_states: the draft heads' residual blocks, all K heads of a block as one batched product.

With x_0[i] = hidden for i = 1..K and c = root_embedding if given, else hidden:

    x_l[i] = x_{l-1}[i] + SiLU(W_l[i] · input_l[i] + b_l[i])
    input_l[i] = concat(x_{l-1}[i], x_{l-1}[i-1])   linked (Cerberus, arXiv 2410.13344), x_l[0] = c for every l
    input_l[i] = x_{l-1}[i]                         Medusa (arXiv 2401.10774)

Sums and the states between blocks are kept in fp32 (fp64 for fp64 inputs); only the result is rounded.
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
    wide = torch.promote_types(hidden.dtype, torch.float32)
    first_link = _first_link(hidden, weight, root_embedding)
    states = hidden.to(wide).unsqueeze(0).expand(weight.shape[1], -1, -1)  # [K, B, H]
    for block_weight, block_bias in zip(weight.to(wide), bias.to(wide), strict=True):
        product = _product(_inputs(states, first_link), block_weight, block_bias)
        states = states + torch.nn.functional.silu(product)
    return states.transpose(0, 1).to(hidden.dtype)


def head_states_gradients(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    root_embedding: torch.Tensor | None = None,
    *,
    needs_weight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden, weight, bias and root_embedding, given that of the result [B, K, H].

    The states between blocks are computed again rather than kept, which costs a third of the backward pass and saves
    L · K states per position. Without ``needs_weight`` the gradients of weight and bias are None.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    first_link = _first_link(hidden, weight, root_embedding)
    states = hidden.to(wide).unsqueeze(0).expand(weight.shape[1], -1, -1)
    saved = []
    for block_weight, block_bias in zip(weight.to(wide), bias.to(wide), strict=True):
        inputs = _inputs(states, first_link)
        product = _product(inputs, block_weight, block_bias)
        saved.append((block_weight, inputs, product))
        states = states + torch.nn.functional.silu(product)

    width = hidden.shape[1]
    flowing = gradient.to(wide).transpose(0, 1)  # [K, B, H]
    link_gradient = torch.zeros_like(hidden, dtype=wide)
    weight_gradients, bias_gradients = [], []
    for block_weight, inputs, product in reversed(saved):
        gate = product.sigmoid()
        product_gradient = flowing * gate * (1 + product * (1 - gate))
        if needs_weight:
            weight_gradients.append(product_gradient.transpose(1, 2) @ inputs)
            bias_gradients.append(product_gradient.sum(1))
        input_gradient = product_gradient @ block_weight  # [K, B, 2H] or [K, B, H]
        flowing = flowing + input_gradient[..., :width]
        if first_link is not None:
            left = input_gradient[..., width:]
            link_gradient = link_gradient + left[0]
            flowing = torch.cat([flowing[:-1] + left[1:], flowing[-1:]])
    hidden_gradient = flowing.sum(0)
    if root_embedding is None:
        hidden_gradient = hidden_gradient + link_gradient
    return (
        hidden_gradient.to(hidden.dtype),
        torch.stack(weight_gradients[::-1]).to(weight.dtype) if weight_gradients else None,
        torch.stack(bias_gradients[::-1]).to(bias.dtype) if bias_gradients else None,
        None if root_embedding is None else link_gradient.to(root_embedding.dtype),
    )


def _first_link(hidden: torch.Tensor, weight: torch.Tensor, root_embedding: torch.Tensor | None) -> torch.Tensor | None:
    """What stands left of the first head, [1, B, H]; None for heads that are not linked."""
    if weight.shape[3] != 2 * weight.shape[2]:
        return None
    link = hidden if root_embedding is None else root_embedding
    return link.to(torch.promote_types(hidden.dtype, torch.float32)).unsqueeze(0)


def _inputs(states: torch.Tensor, first_link: torch.Tensor | None) -> torch.Tensor:
    """A block's inputs [K, B, 2H] or [K, B, H] from the states [K, B, H] before it."""
    if first_link is None:
        return states
    return torch.cat([states, torch.cat([first_link, states[:-1]])], dim=-1)


def _product(inputs: torch.Tensor, block_weight: torch.Tensor, block_bias: torch.Tensor) -> torch.Tensor:
    """W · inputs + b per head, [K, B, H]."""
    return torch.baddbmm(block_bias.unsqueeze(1), inputs, block_weight.transpose(1, 2))
