"""The sequence layer under training: one decoder layer over the base model's states and the tokens that follow them.

The decoder runs the same layer through :func:`cerberus_kernels.decoder_layer`, see :mod:`cerberus_decode.heads`; here
it is plain PyTorch, for gradients.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ..sequence_layer import SequenceConfig, rotary_angles


class SequenceLayer(nn.Module):
    """Hidden states ``[S, L, H]`` and embeddings of the next tokens, same shape, to states of the same shape.

    It begins as the identity on the hidden states: what it adds has weights of zero.

    Args:
        config: sizes.
    """

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        self.input_norm = nn.Parameter(torch.ones(width))
        self.post_norm = nn.Parameter(torch.ones(width))
        self.fuse = nn.Parameter(torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1))
        self.qkv = nn.Parameter(torch.randn(heads + 2 * kv_heads, width) * width**-0.5)
        self.output = nn.Parameter(torch.zeros(width, heads))
        self.gate_up = nn.Parameter(torch.randn(2 * config.inner_size, width) * width**-0.5)
        self.down = nn.Parameter(torch.zeros(width, config.inner_size))

    def forward(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Run over whole sequences from their first token on; padding must be behind them."""
        config = self.config
        x = torch.cat([hidden, following], dim=-1) @ self.fuse.t()  # [S, L, H]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = functional.rms_norm(x, [x.shape[-1]], self.input_norm, config.norm_eps) @ self.qkv.t()
        qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, dim)).transpose(1, 2)  # [S, heads, L, Dh]
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        cos, sin = rotary_angles(torch.arange(x.shape[1]), dim, config.rope_theta)  # [L, Dh]
        q, k = q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attended.transpose(1, 2).flatten(2) @ self.output.t()
        gate, up = (functional.rms_norm(x, [x.shape[-1]], self.post_norm, config.norm_eps) @ self.gate_up.t()).chunk(
            2, dim=-1
        )
        return x + (functional.silu(gate) * up) @ self.down.t()


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
