"""Specification of tree_attention.

Node i of request b, at position S + depth(i), attends to the keys at positions 0..S-1 of the committed prefix and to
its ancestors and itself, which lie in the slots S + j of the set bits j of its mask row:

    score(i, t) = scale · q_i · k_t,  or softcap · tanh(scale · q_i · k_t / softcap)
    out_i = sum_t softmax_t(score(i, t)) · v_t        lse_i = ln sum_t exp(score(i, t))

With a window w only keys whose position exceeds S + depth(i) - w count; a prefix key's position is its slot, a node's
is S plus its depth, and depth is the number of set bits in its row less one. Everything is computed in fp32.
"""

from __future__ import annotations

import torch

from ..._checks import refuse
from ...tree import unpack_mask


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_table: torch.Tensor | None = None,
    num_nodes: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    window: int = 0,
) -> None:
    """Write out [B, N, Hq, Dh] and lse fp32 [B, N, Hq]; q [B, N, Hq, Dh], window 0 for none, the rest as in the api."""
    batch, nodes = q.shape[:2]
    counts = [nodes] * batch if num_nodes is None else num_nodes.tolist()
    prefixes = prefix_lens.tolist()
    check_lengths(counts, prefixes, nodes, k_cache, block_table)
    out.zero_()
    lse.fill_(float("-inf"))
    for b, (count, prefix) in enumerate(zip(counts, prefixes, strict=True)):
        if count == 0:
            continue
        keys = logical_rows(k_cache, b, prefix + count, block_table).float()  # [T, Hkv, Dh]
        values = logical_rows(v_cache, b, prefix + count, block_table).float()
        bits = unpack_mask(mask if mask.ndim == 2 else mask[b], nodes)[:count, :count]
        visible = visible_keys(bits, prefix, window)  # [n, T]
        out[b, :count], lse[b, :count] = _attend(q[b, :count].float() * scale, keys, values, visible, softcap)


def logical_rows(cache: torch.Tensor, b: int, length: int, block_table: torch.Tensor | None) -> torch.Tensor:
    """Slots 0..length-1 of request b, [length, Hkv, Dh], out of a contiguous or a paged cache."""
    if block_table is None:
        return cache[b, :length]
    block_size = cache.shape[1]
    num_blocks = -(-length // block_size)
    return cache[block_table[b, :num_blocks].long()].flatten(0, 1)[:length]


def visible_keys(bits: torch.Tensor, prefix: int, window: int = 0) -> torch.Tensor:
    """bits bool [n, n] -> bool [n, prefix + n]: which keys each node sees."""
    count = bits.shape[0]
    visible = torch.cat([bits.new_ones(count, prefix), bits], dim=1)
    if window == 0:
        return visible
    positions = prefix + bits.sum(1) - 1  # [n]
    key_positions = torch.cat([torch.arange(prefix, device=bits.device), positions])
    return visible & (key_positions > positions.unsqueeze(1) - window)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, Dh] already scaled, keys and values [T, Hkv, Dh], visible [n, T] -> [n, Hq, Dh], lse [n, Hq]."""
    count, q_heads, _ = q.shape
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [n, Hkv, G, Dh]
    scores = torch.einsum("nhgd,thd->nhgt", grouped, keys)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    lse = scores.logsumexp(-1)  # [n, Hkv, G]
    weights = scores.softmax(-1).where(visible.any(1)[:, None, None, None], 0)  # a node that sees nothing gives zero
    mixed = torch.einsum("nhgt,thd->nhgd", weights, values)
    return mixed.reshape(count, q_heads, -1), lse.reshape(count, q_heads)


def check_lengths(
    counts: list[int],
    prefixes: list[int],
    nodes: int,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    op: str = "tree_attention",
) -> None:
    """Refuse lengths and block ids that lead out of the caches. Rows with no nodes are not looked at."""
    block_size = k_cache.shape[1]
    capacity = block_size if block_table is None else block_table.shape[1] * block_size
    for b, (count, prefix) in enumerate(zip(counts, prefixes, strict=True)):
        if not 0 <= count <= nodes:
            refuse(op, "num_nodes", f"in [0, {nodes}]", f"{count} in row {b}")
        if count == 0:
            continue
        if not 0 <= prefix <= capacity - count:
            constraint = f"in [0, {capacity - count}] for {count} nodes in {capacity} slots"
            refuse(op, "prefix_lens", constraint, f"{prefix} in row {b}")
        if block_table is not None:
            for block in block_table[b, : -(-(prefix + count) // block_size)].tolist():
                if not 0 <= block < k_cache.shape[0]:
                    constraint = f"in [0, {k_cache.shape[0]}) for blocks in use"
                    refuse(op, "block_table", constraint, f"{block} in row {b}")
