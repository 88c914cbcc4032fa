"""Specification of commit_kv: slot prefix + path[j] goes to slot prefix + j for j = 1..num_accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._checks import refuse


def commit_kv(
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Caches [.., B or blocks, slots, Hkv, Dh] each, path int32 [B, D + 1] -> new lengths int32 [B].

    Steps past num_accepted repeat the last accepted move, so every index is one that the tree holds and no step
    depends on a host value.
    """
    if path.device.type == "cpu":
        _check_path(k_caches[0], path, num_accepted, prefix_lens, block_table)
    steps = torch.arange(path.shape[1], device=path.device).expand(path.shape)
    steps = steps.minimum(num_accepted.unsqueeze(1).long())  # [B, D + 1]
    prefix = prefix_lens.unsqueeze(1).long()
    source = _rows_and_slots(prefix + path.long().gather(1, steps), k_caches[0], block_table)
    target = _rows_and_slots(prefix + steps, k_caches[0], block_table)
    for cache in (*k_caches, *v_caches):
        layers = cache if cache.ndim == 5 else cache.unsqueeze(0)
        for layer in layers:
            layer[target] = layer[source]  # the right side is gathered whole before anything is written
    return prefix_lens + num_accepted + 1


def _rows_and_slots(
    positions: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logical positions [B, D + 1] -> index of the batch row or block, and the slot in it."""
    if block_table is None:
        return torch.arange(positions.shape[0], device=positions.device).unsqueeze(1), positions
    block_size = cache.shape[-3]
    return block_table.long().gather(1, positions // block_size), positions % block_size


def _check_path(
    cache: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor | None,
) -> None:
    """Refuse what would read or write outside a request's slots, before anything is written."""
    depth = path.shape[1] - 1
    rows, block_size = cache.shape[-4:-2]
    capacity = block_size if block_table is None else block_table.shape[1] * block_size
    lengths = zip(path.tolist(), num_accepted.tolist(), prefix_lens.tolist(), strict=True)
    for b, (nodes, accepted, prefix) in enumerate(lengths):
        if not 0 <= accepted <= depth:
            refuse("commit_kv", "num_accepted", f"in [0, {depth}]", f"{accepted} in row {b}")
        if not 0 <= prefix < capacity:
            refuse("commit_kv", "prefix_lens", f"in [0, {capacity})", f"{prefix} in row {b}")
        for step, node in enumerate(nodes[: accepted + 1]):
            fits = node == 0 if step == 0 else nodes[step - 1] < node < capacity - prefix
            if not fits:
                constraint = f"0, then ascending node ids below {capacity - prefix}"
                refuse("commit_kv", "path", constraint, f"{node} at step {step} in row {b}")
        if block_table is not None:
            for block in block_table[b, : (prefix + nodes[accepted]) // block_size + 1].tolist():
                if not 0 <= block < rows:
                    constraint = f"in [0, {rows}) for blocks in use"
                    refuse("commit_kv", "block_table", constraint, f"{block} in row {b}")
