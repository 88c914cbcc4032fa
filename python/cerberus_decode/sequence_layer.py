"""The sequence layer: one decoder layer in front of the draft heads, over states and newest tokens.

The base model's last hidden state at a position was computed before the token that follows it was known. The sequence
layer joins the two at every position, state and embedding of the next token, and lets the position attend to all
earlier ones, with keys and values of its own. Its output takes the hidden state's place as the heads' input. It runs
only when heads are about to draft, over the positions committed since the last time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import cerberus_kernels as ck
from cerberus_kernels import tree

from .cache import KVCache

CHUNK = 512
WEIGHT_NAMES = ("fuse", "input_norm", "qkv", "output", "post_norm", "gate_up", "down")


@dataclass(frozen=True)
class SequenceConfig:
    """Sizes of a sequence layer.

    Attributes:
        hidden_size: H.
        num_heads: query heads Hq.
        num_kv_heads: key and value heads Hkv.
        head_dim: Dh.
        inner_size: width I of the feed-forward part.
        norm_eps: of both normalisations.
        rope_theta: base of the rotary embedding.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight."""
        width, inner = self.hidden_size, self.inner_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "fuse": (width, 2 * width),
            "input_norm": (width,),
            "qkv": (heads + 2 * kv_heads, width),
            "output": (width, heads),
            "post_norm": (width,),
            "gate_up": (2 * inner, width),
            "down": (width, inner),
        }


def rotary_angles(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, fp32 ``[*positions, Dh]``, both halves alike."""
    rates = theta ** -(torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = torch.cat([positions.unsqueeze(-1) * rates] * 2, dim=-1)
    return angles.cos(), angles.sin()


class SequenceLayer:
    """A sequence layer's weights, packed for the operators.

    Args:
        config: sizes.
        weights: tensors by the names of :data:`WEIGHT_NAMES`, all of one dtype.
    """

    def __init__(self, config: SequenceConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.fuse = ck.pack_linear(weights["fuse"])
        qkv, output, gate_up, down = (ck.pack_linear(weights[name]) for name in ("qkv", "output", "gate_up", "down"))
        norms = (weights["input_norm"], weights["post_norm"])
        self.weights = ck.DecoderWeights(qkv, output, gate_up, down, *norms, config.norm_eps, config.norm_eps)
        self.dtype, self.device = weights["fuse"].dtype, weights["fuse"].device
        chain = torch.arange(-1, CHUNK - 1, dtype=torch.int32)
        self.chain_mask = ck.tree_mask(chain).to(self.device)  # [512, 16]

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence."""
        config = self.config
        return KVCache(1, 1, capacity, config.num_kv_heads, config.head_dim, self.dtype, self.device)

    def extend(self, hidden: torch.Tensor, following: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Run over the next positions of a sequence and commit them.

        Args:
            hidden: ``[1, n, H]``, the base model's states there.
            following: ``[1, n, H]``, embeddings of the tokens behind them.
            cache: keys and values of the positions before.

        Returns:
            ``[1, H]``, the layer's output at the last of them.
        """
        for start in range(0, hidden.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            joined = torch.cat([hidden[:, part], following[:, part]], dim=-1)
            nodes = joined.shape[1]
            keys, values = cache.reserve(0, nodes)
            positions = torch.arange(cache.lengths[0], cache.lengths[0] + nodes, device=self.device)
            angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
            cos, sin = (part.to(self.dtype).unsqueeze(0) for part in angles)
            mask = self.chain_mask[:nodes, : tree.mask_words(nodes)]
            x: Any = ck.packed_linear(joined, self.fuse)
            x = ck.decoder_layer(x, self.weights, cos, sin, keys, values, mask, cache.prefix_lens)
            cache.advance(nodes)
        return x[:, -1]
