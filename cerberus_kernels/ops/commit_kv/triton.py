"""commit_kv in Triton: one launch moves the accepted nodes' keys and values of all layers."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import reference

# The bits are moved as integers, so that no conversion touches a NaN's payload.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TABLES_KEPT = 16
_tables: collections.OrderedDict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = collections.OrderedDict()


def commit_kv(
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as the reference's.

    On a GPU nothing is read back and values out of range are not refused (``CERBERUS_VALIDATE=1`` reads them).

    A stacked cache is addressed by its layer stride, and so is a list whose layers lie evenly spaced in memory, such
    as ``list(stacked)``. Other lists need a table of their addresses on the device. It is filled by small kernels that
    carry the addresses as arguments, which a stream may capture, and kept for the next calls on the same layers: it
    depends on nothing but the addresses that are its key.
    """
    if path.device.type == "cpu" or os.environ.get("CERBERUS_VALIDATE") == "1":
        reference._check_path(k_caches[0], path, num_accepted, prefix_lens, block_table)
    new_lens = torch.empty(prefix_lens.shape, dtype=torch.int32, device=prefix_lens.device)
    batch = path.shape[0]
    keys, values = _planes(k_caches), _planes(v_caches)
    layers = len(k_caches) if k_caches[0].ndim == 4 else k_caches[0].shape[0]
    if batch == 0:
        return new_lens
    constants, num_warps = launch_parameters(keys, values)
    _commit_kv_kernel[(batch, 2 * max(layers, 1), constants["PARTS"])](
        keys.data, values.data, keys.table, values.table, path, num_accepted, prefix_lens, block_table, new_lens,
        path.shape[1] - 1, layers, path.stride(0), num_accepted.stride(0), prefix_lens.stride(0),
        0 if block_table is None else block_table.stride(0), k_caches[0].shape[-3], *keys.sizes, *values.sizes,
        *keys.strides, *values.strides, **constants, PAGED=block_table is not None,
        K_ALIGNMENT=keys.alignment, V_ALIGNMENT=values.alignment, num_warps=num_warps,
    )  # fmt: skip
    return new_lens


class Planes(NamedTuple):
    """Where the layers' keys, or values, lie.

    Attributes:
        data: the first layer as integers, of its elements' size.
        table: int64 ``[layers]`` addresses, or None where layer i begins ``i * strides[0]`` elements behind the first.
        alignment: bytes that every address in the table is a multiple of.
        sizes: heads and head dim.
        strides: in elements, of layer, row or block, slot, head.
    """

    data: torch.Tensor
    table: torch.Tensor | None
    alignment: int
    sizes: tuple[int, int]
    strides: tuple[int, ...]


def _planes(caches: Sequence[torch.Tensor]) -> Planes:
    first = caches[0]
    data = first.view(_INTEGERS.get(first.element_size(), torch.uint8))
    sizes = (data.shape[-2], data.shape[-1])
    if data.ndim == 5:
        return Planes(data, None, 1, sizes, data.stride()[:4])
    alike = all(cache.stride() == first.stride() and cache.dtype == first.dtype for cache in caches)
    if not alike:
        raise ValueError(
            "commit_kv: a list of layers must be of one dtype and the same strides for backend 'triton', got "
            f"{[(cache.dtype, cache.stride()) for cache in caches]}"
        )
    addresses = tuple(cache.data_ptr() for cache in caches)
    spacing = addresses[1] - addresses[0] if len(addresses) > 1 else 0
    even = all(address == addresses[0] + i * spacing for i, address in enumerate(addresses))
    if even and spacing % data.element_size() == 0:
        return Planes(data, None, 1, sizes, (spacing // data.element_size(), *data.stride()[:3]))
    alignment = 16 if all(address % 16 == 0 for address in addresses) else data.element_size()
    return Planes(data, _table(addresses, first.device), alignment, sizes, (0, *data.stride()[:3]))


def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 [layers] on the device, from kernels that carry one address each: no copy from the host, no sync."""
    key = (device, addresses)
    table = _tables.get(key)
    if table is None:
        table = torch.empty(len(addresses), dtype=torch.int64, device=device)
        for layer, address in enumerate(addresses):
            table[layer].fill_(address)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return table  # memory of the graph's pool, filled at each replay
        _tables[key] = table
        while len(_tables) > _TABLES_KEPT:
            _tables.popitem(last=False)
    return table


def launch_parameters(keys: Planes, values: Planes) -> tuple[dict[str, int], int]:
    """Block sizes and warps: a program moves up to 2048 elements of each of 4 slots at a time.

    What a step moves is a few KB a layer, so the launch is bound by latency: the slots of a block are all loaded
    before the first is stored, and heads are dealt to several programs.
    """
    columns = max(triton.next_power_of_2(keys.sizes[1]), triton.next_power_of_2(values.sizes[1]))
    heads = max(keys.sizes[0], values.sizes[0], 1)
    together = min(triton.next_power_of_2(heads), max(1, 1024 // columns))
    constants = {"STEPS": 4, "HEADS": together, "COLUMNS": columns, "PARTS": triton.cdiv(heads, together)}
    return constants, 4 if together * columns >= 512 else 1


@triton.jit
def _slot_offset(slot, inside, b, block_table, block_size, row_stride, slot_stride, PAGED: tl.constexpr):
    """Offset in elements of logical slots of request b. slot int64 [STEPS]."""
    if PAGED:
        block = tl.load(block_table + slot // block_size, mask=inside, other=0).to(tl.int64)
        return block * row_stride + slot % block_size * slot_stride
    return b * row_stride + slot * slot_stride


@triton.jit
def _move(
    base, path, accepted, prefix, b, block_table, block_size, first_head, heads, columns, row_stride, slot_stride,
    head_stride, STEPS: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Slots prefix + path[j] of one plane to prefix + j, for j = 1..accepted.

    Blocks of steps in ascending order are safe in place: ids ascend along a path, so path[j] >= j, and no step before
    j has written slot path[j]. Within a block all is loaded before anything is stored, the barrier sees to it.
    """
    head = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    within = (head * head_stride)[:, None] + column[None, :]  # [HEADS, COLUMNS]
    used = (head < heads)[:, None] & (column < columns)[None, :]
    for first in range(1, accepted + 1, STEPS):
        step = first + tl.arange(0, STEPS)
        inside = step <= accepted
        node = tl.load(path + step, mask=inside, other=0)
        source = _slot_offset(prefix + node, inside, b, block_table, block_size, row_stride, slot_stride, PAGED)
        target = _slot_offset(prefix + step, inside, b, block_table, block_size, row_stride, slot_stride, PAGED)
        moving = (inside & (node != step))[:, None, None] & used[None, :, :]
        rows = tl.load(base + source[:, None, None] + within[None, :, :], mask=moving)
        tl.debug_barrier()
        tl.store(base + target[:, None, None] + within[None, :, :], rows, mask=moving)


@triton.jit
def _commit_kv_kernel(
    k_data, v_data,  # the first layers
    k_table, v_table,  # int64 [layers] or None
    path,  # int32 [B, depth + 1]
    num_accepted, prefix_lens,  # int32 [B]
    block_table,  # int32 [B, max_blocks] or None
    new_lens,  # int32 [B]
    depth, layers, path_stride, accepted_stride, prefix_stride, table_stride, block_size,
    k_heads, k_columns, v_heads, v_columns,
    k_layer_stride, k_row_stride, k_slot_stride, k_head_stride,
    v_layer_stride, v_row_stride, v_slot_stride, v_head_stride,
    STEPS: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PAGED: tl.constexpr,
    K_ALIGNMENT: tl.constexpr, V_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1)  # keys of every layer, then values of every layer
    first_head = (tl.program_id(2) * HEADS).to(tl.int64)
    accepted = tl.load(num_accepted + b * accepted_stride)
    prefix = tl.load(prefix_lens + b * prefix_stride)
    if (plane == 0) & (first_head == 0):
        tl.store(new_lens + b, prefix + accepted + 1)
    accepted = tl.minimum(accepted, depth)
    path += b * path_stride
    prefix = prefix.to(tl.int64)
    if PAGED:
        block_table += b * table_stride
    if plane < layers:
        layer = plane.to(tl.int64)
        if k_table is not None:
            base = tl.multiple_of(tl.load(k_table + layer).to(k_data.dtype), K_ALIGNMENT)
        else:
            base = k_data + layer * k_layer_stride
        _move(
            base, path, accepted, prefix, b, block_table, block_size, first_head, k_heads, k_columns, k_row_stride,
            k_slot_stride, k_head_stride, STEPS, HEADS, COLUMNS, PAGED,
        )  # fmt: skip
    elif plane < 2 * layers:
        layer = (plane - layers).to(tl.int64)
        if v_table is not None:
            base = tl.multiple_of(tl.load(v_table + layer).to(v_data.dtype), V_ALIGNMENT)
        else:
            base = v_data + layer * v_layer_stride
        _move(
            base, path, accepted, prefix, b, block_table, block_size, first_head, v_heads, v_columns, v_row_stride,
            v_slot_stride, v_head_stride, STEPS, HEADS, COLUMNS, PAGED,
        )  # fmt: skip
