"""Specification of decoder_layer: a Llama layer as the composition of packed_linear and tree_attention.

    q, k, v = rms_norm(x) @ qkv         q, k rotated:  r(x) = x cos + (-x_high, x_low) sin
    k, v of node j of request b go into slot prefix_lens[b] + j of the caches
    x = x + tree_attention(q) @ output
    x = x + (silu(gate) * up) @ down    gate, up = rms_norm(x) @ gate_up

Every product, every step around it and each term of the rotation rounds to the layer's dtype, as in transformers.
"""

from __future__ import annotations

import torch

from ..packed_linear.reference import packed_linear
from ..tree_attention.reference import check_lengths, tree_attention


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [B, N, heads, Dh] by cos and sin [B, N, Dh]."""
    low, high = x.chunk(2, -1)
    return x * cos.unsqueeze(2) + torch.cat((-high, low), -1) * sin.unsqueeze(2)


def append(cache: torch.Tensor, new: torch.Tensor, prefix_lens: torch.Tensor, block_table: torch.Tensor | None) -> None:
    """Write new [B, N, Hkv, Dh] behind the committed slots of a contiguous or a paged cache."""
    for b, prefix in enumerate(prefix_lens.tolist()):
        for node in range(new.shape[1]):
            row, slot = b, prefix + node
            if block_table is not None:
                row, slot = int(block_table[b, slot // cache.shape[1]]), slot % cache.shape[1]
            cache[row, slot] = new[b, node]


def decoder_layer(
    hidden: torch.Tensor,
    qkv: torch.Tensor,
    output: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    output_bias: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    input_norm: torch.Tensor,
    post_norm: torch.Tensor,
    input_eps: float,
    post_eps: float,
    q_heads: int,
    inner: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """hidden [B, N, H] -> [B, N, H]; panels of packed weights, norms [H], caches [.., slots, Hkv, Dh] written."""
    batch, nodes, width = hidden.shape
    kv_heads, head_dim = k_cache.shape[2:]
    check_lengths([nodes] * batch, prefix_lens.tolist(), nodes, k_cache, block_table, "decoder_layer")
    heads = packed_linear(
        hidden, qkv, (q_heads + 2 * kv_heads) * head_dim, qkv_bias, norm_weight=input_norm, eps=input_eps
    ).view(batch, nodes, q_heads + 2 * kv_heads, head_dim)
    queries, keys, values = heads.split((q_heads, kv_heads, kv_heads), 2)
    queries, keys = rotated(queries, cos, sin), rotated(keys, cos, sin)
    attended, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)
    append(k_cache, keys, prefix_lens, block_table)
    append(v_cache, values, prefix_lens, block_table)
    tree_attention(
        queries, k_cache, v_cache, mask, prefix_lens, out=attended, lse=lse, block_table=block_table, scale=scale
    )
    hidden = packed_linear(attended.flatten(2), output, width, output_bias, residual=hidden)
    gated = packed_linear(hidden, gate_up, 2 * inner, gate_up_bias, norm_weight=post_norm, eps=post_eps)
    return packed_linear(gated, down, width, down_bias, gated=True, residual=hidden)
