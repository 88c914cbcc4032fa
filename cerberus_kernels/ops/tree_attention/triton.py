"""tree_attention in Triton: split over keys, each part an online softmax, merged by log-sum-exp.

A program takes a tile of rows and a span of keys. The rows of one key head's queries, every node with every query head
of the group, share the tile, so that each key and value is read once for all of them. The committed prefix needs no
mask; only the blocks of the tree itself look at bits. Spans depend on shapes alone, never on lengths, so nothing is
read back and a captured graph serves every length.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .reference import check_lengths

SHORTEST_SPAN = 256
MOST_SPANS = 128
MERGED_ROWS = 8  # of a merging program: many programs, as each waits for memory
INTERPRETED_PROCESSORS = 132  # what the interpreter, which has none, counts as


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
    """Write out [B, N, Hq, Dh] and lse fp32 [B, N, Hq]; arguments as the reference takes them."""
    batch, nodes, q_heads, head_dim = q.shape
    if q.device.type == "cpu":
        counts = [nodes] * batch if num_nodes is None else num_nodes.tolist()
        check_lengths(counts, prefix_lens.tolist(), nodes, k_cache, block_table)
    if q.numel() == 0:
        return
    kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    capacity = block_size if block_table is None else block_size * block_table.shape[1]
    constants, num_warps, num_stages = launch_parameters(nodes, q_heads // kv_heads, head_dim, q.dtype)
    tiles = triton.cdiv(nodes * q_heads // kv_heads, constants["ROWS"])
    span = span_of(capacity, batch * kv_heads * tiles, _processors(q.device))
    spans = triton.cdiv(capacity, span)
    parts, moments = out.unsqueeze(0), lse.unsqueeze(0)
    if spans > 1:
        parts = torch.empty(spans, *q.shape, dtype=torch.float32, device=q.device)
        moments = torch.empty(spans, *lse.shape, 2, dtype=torch.float32, device=q.device)
    table_stride = 0 if block_table is None else block_table.stride(0)
    _attention_kernel[(spans, tiles, batch * kv_heads)](
        q, k_cache, v_cache, mask, prefix_lens, block_table, num_nodes, parts, moments,
        nodes, kv_heads, scale, softcap, window, span,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        mask.stride(0) if mask.ndim == 3 else 0, mask.stride(-2), table_stride,
        *parts.stride()[:4], *moments.stride()[:4],
        **constants, GROUP=q_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=1 if block_table is None else block_size,
        PAGED=block_table is not None,
        HAS_COUNTS=num_nodes is not None, HAS_SOFTCAP=softcap > 0, HAS_WINDOW=window > 0, SPLIT=spans > 1,
        INTERPRETED=q.device.type == "cpu", num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if spans > 1:
        rows = batch * nodes * q_heads
        _merge_kernel[(triton.cdiv(rows, MERGED_ROWS),)](
            parts, moments, out, lse, nodes, q_heads, rows, spans, *out.stride()[:3], *lse.stride(),
            HEAD_DIM=head_dim, WIDTH=triton.next_power_of_2(head_dim), ROWS=MERGED_ROWS, num_warps=4,
        )  # fmt: skip


def launch_parameters(nodes: int, group: int, head_dim: int, dtype: torch.dtype) -> tuple[dict[str, int], int, int]:
    """Tile sizes, warps and stages by shape.

    16 rows is the least that matrix instructions take, and plain decoding needs no more; 64 rows of up to 128 columns
    keep their sums in the registers of four or eight warps, and longer ones are fewer. fp32 has no matrix instruction
    of full precision everywhere, and its products by multiply-adds want smaller tiles. Keys come by 64, or 32 where a
    row of them is long, so that two or three stages of keys and values fit the shared memory of every target.
    """
    width = max(16, triton.next_power_of_2(head_dim))
    full = dtype == torch.float32
    wide = width * dtype.itemsize > 256  # bytes of a key
    most = (32 if width <= 64 else 16) if full else (64 if width <= 128 else 32)
    rows = max(16, min(most, triton.next_power_of_2(nodes * group)))
    keys = 32 if wide or full else 64
    stages = 2 if wide or full else 3
    if torch.version.hip:  # 64 KiB of shared memory, and a stage less of it in flight
        stages -= 1
    return {"ROWS": rows, "KEYS": keys, "WIDTH": width}, 8 if full or rows * width >= 8192 else 4, stages


def span_of(capacity: int, programs: int, processors: int) -> int:
    """Keys per span: a power of two, long enough that merging does not matter, short enough to fill the GPU twice."""
    wanted = max(1, 2 * processors // programs)
    span = max(SHORTEST_SPAN, triton.next_power_of_2(triton.cdiv(capacity, wanted)))
    return max(span, triton.next_power_of_2(triton.cdiv(capacity, MOST_SPANS)))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _num_bits(words):
    """Set bits of uint32 words."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _depths(mask, node, inside, count, mask_row_stride):
    """Depth of nodes [R]: the set bits of their rows below ``count``, less one."""
    depth = node * 0 - 1
    for word in range(0, (count + 31) // 32):
        place = node.to(tl.int64) * mask_row_stride + word
        bits = tl.load(mask + place, mask=inside, other=0)
        left = count - word * 32
        kept = tl.where(left >= 32, -1, (1 << tl.minimum(left, 31)) - 1)
        depth += _num_bits((bits & kept).to(tl.uint32, bitcast=True))
    return depth


@triton.jit
def _offsets(
    slot, inside, block_table, k_batch_stride, k_slot_stride, v_batch_stride, v_slot_stride,
    BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Where slots [T] of a request lie in the key and in the value cache, in elements, int64 [T]."""
    if PAGED:
        page = tl.load(block_table + slot // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        k_offset = page * k_batch_stride + (slot % BLOCK_SIZE).to(tl.int64) * k_slot_stride
        v_offset = page * v_batch_stride + (slot % BLOCK_SIZE).to(tl.int64) * v_slot_stride
    else:
        k_offset = slot.to(tl.int64) * k_slot_stride
        v_offset = slot.to(tl.int64) * v_slot_stride
    return k_offset, v_offset


@triton.jit
def _block(
    q, best, total, sums, keys, values, k_offset, v_offset, inside, visible, scale, softcap, column,
    HEAD_DIM: tl.constexpr, HAS_SOFTCAP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over keys [T] that rows [R] see: q [R, D] -> best, total [R], sums [R, D]."""
    loaded = inside[:, None] & (column[None, :] < HEAD_DIM)
    k = tl.load(keys + k_offset[:, None] + column[None, :], mask=loaded, other=0.0)
    v = tl.load(values + v_offset[:, None] + column[None, :], mask=loaded, other=0.0)
    if INTERPRETED:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [R, T]
    if HAS_SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    score = tl.where(visible, score, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, 1))
    base = tl.where(new_best == float("-inf"), 0.0, new_best)  # nothing seen yet: no difference of infinities
    weight = tl.exp(score - base[:, None])
    fade = tl.exp(best - base)
    total = total * fade + tl.sum(weight, 1)
    sums = sums * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new_best, total, sums


@triton.jit
def _attention_kernel(
    q, k_cache, v_cache,
    mask,  # int32 [B or 1, N, W]
    prefix_lens,  # int32 [B]
    block_table,  # int32 [B, max_blocks] or None
    num_nodes,  # int32 [B] or None
    parts,  # [B, N, Hq, Dh] of q's dtype, or fp32 [spans, B, N, Hq, Dh]
    moments,  # lse fp32 [B, N, Hq], or maximum and total fp32 [spans, B, N, Hq, 2]
    nodes, kv_heads, scale, softcap, window, span,
    q_batch_stride, q_node_stride, q_head_stride,
    k_batch_stride, k_slot_stride, k_head_stride,
    v_batch_stride, v_slot_stride, v_head_stride,
    mask_batch_stride, mask_row_stride, table_stride,
    part_span_stride, part_batch_stride, part_node_stride, part_head_stride,
    moment_span_stride, moment_batch_stride, moment_node_stride, moment_head_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    b = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, WIDTH)
    count = nodes
    if HAS_COUNTS:
        count = tl.load(num_nodes + b)
    prefix = tl.load(prefix_lens + b)
    last = tl.where(count > 0, prefix + count, 0)
    mask += b * mask_batch_stride
    in_use = node < count

    place = node.to(tl.int64)[:, None] * q_node_stride + head[:, None] * q_head_stride + column[None, :]
    rows = tl.load(q + b * q_batch_stride + place, mask=in_use[:, None] & (column[None, :] < HEAD_DIM), other=0.0)
    if INTERPRETED:
        rows = rows.to(tl.float32)
    k_cache += kv_head * k_head_stride
    v_cache += kv_head * v_head_stride
    if PAGED:
        block_table += b * table_stride
    else:
        k_cache += b * k_batch_stride
        v_cache += b * v_batch_stride

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    begin = part * span
    end = tl.minimum(begin + span, last)
    position = row * 0
    if HAS_WINDOW:
        position = prefix + _depths(mask, node, in_use, count, mask_row_stride)
        # No node sees further back than the root; blocks before that are passed over.
        begin = tl.maximum(begin, tl.maximum(prefix - window + 1, 0) // KEYS * KEYS)

    prefix_end = tl.minimum(end, prefix)
    for first in range(begin, prefix_end, KEYS):
        slot = first + tl.arange(0, KEYS)
        inside = slot < prefix_end
        visible = in_use[:, None] & inside[None, :]
        if HAS_WINDOW:
            visible = visible & (slot[None, :] > position[:, None] - window)
        k_offset, v_offset = _offsets(
            slot, inside, block_table, k_batch_stride, k_slot_stride, v_batch_stride, v_slot_stride, BLOCK_SIZE, PAGED
        )
        best, total, sums = _block(
            rows, best, total, sums, k_cache, v_cache, k_offset, v_offset, inside, visible, scale, softcap, column,
            HEAD_DIM, HAS_SOFTCAP, INTERPRETED,
        )  # fmt: skip

    for first in range(tl.maximum(begin, prefix), end, KEYS):
        slot = first + tl.arange(0, KEYS)
        inside = slot < end
        other = slot - prefix
        seen = in_use[:, None] & inside[None, :]
        words = mask + node.to(tl.int64)[:, None] * mask_row_stride + (other // 32)[None, :]
        bits = tl.load(words, mask=seen, other=0)
        visible = seen & (((bits >> (other % 32)[None, :]) & 1) != 0)
        if HAS_WINDOW:
            place_of_key = prefix + _depths(mask, other, inside, count, mask_row_stride)
            visible = visible & (place_of_key[None, :] > position[:, None] - window)
        k_offset, v_offset = _offsets(
            slot, inside, block_table, k_batch_stride, k_slot_stride, v_batch_stride, v_slot_stride, BLOCK_SIZE, PAGED
        )
        best, total, sums = _block(
            rows, best, total, sums, k_cache, v_cache, k_offset, v_offset, inside, visible, scale, softcap, column,
            HEAD_DIM, HAS_SOFTCAP, INTERPRETED,
        )  # fmt: skip

    exists = node < nodes
    empty = total == 0.0  # false for NaN, which goes out as it is
    place = part * part_span_stride + b * part_batch_stride
    place += node.to(tl.int64)[:, None] * part_node_stride + head[:, None] * part_head_stride + column[None, :]
    at = part * moment_span_stride + b * moment_batch_stride
    at += node.to(tl.int64) * moment_node_stride + head * moment_head_stride
    if SPLIT:
        tl.store(moments + at, best, mask=exists)
        tl.store(moments + at + 1, total, mask=exists)
        kept = (exists & ~empty)[:, None] & (column[None, :] < HEAD_DIM)
        tl.store(parts + place, sums, mask=kept)
    else:
        result = tl.where(empty[:, None], 0.0, sums / tl.where(empty, 1.0, total)[:, None])
        tl.store(parts + place, result.to(parts.dtype.element_ty), mask=exists[:, None] & (column[None, :] < HEAD_DIM))
        tl.store(moments + at, tl.where(empty, float("-inf"), best + tl.log(tl.where(empty, 1.0, total))), mask=exists)


@triton.jit
def _merge_kernel(
    parts,  # fp32 [spans, rows, Dh], rows = B * N * Hq
    moments,  # fp32 [spans, rows, 2]
    out,  # [B, N, Hq, Dh]
    lse,  # fp32 [B, N, Hq]
    nodes, q_heads, rows, spans,
    out_batch_stride, out_node_stride, out_head_stride,
    lse_batch_stride, lse_node_stride, lse_head_stride,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, WIDTH)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for index in range(0, spans):
        at = index * rows + row
        other = tl.load(moments + at * 2, mask=inside, other=float("-inf"))
        weight = tl.load(moments + at * 2 + 1, mask=inside, other=0.0)
        live = weight != 0.0  # true for NaN; a span that saw nothing wrote no sums
        new_best = tl.maximum(best, tl.where(live, other, float("-inf")))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        fade, mine = tl.exp(best - base), tl.where(live, tl.exp(other - base), 0.0)
        part = tl.load(
            parts + at[:, None] * HEAD_DIM + column[None, :],
            mask=(inside & live)[:, None] & (column[None, :] < HEAD_DIM),
            other=0.0,
        )
        total = total * fade + weight * mine
        sums = sums * fade[:, None] + part * mine[:, None]
        best = new_best
    empty = total == 0.0
    result = tl.where(empty[:, None], 0.0, sums / tl.where(empty, 1.0, total)[:, None])
    head = row % q_heads
    node = row // q_heads % nodes
    b = row // q_heads // nodes
    place = b * out_batch_stride + node * out_node_stride + head * out_head_stride
    kept = inside[:, None] & (column[None, :] < HEAD_DIM)
    tl.store(out + place[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=kept)
    value = tl.where(empty, float("-inf"), best + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse + b * lse_batch_stride + node * lse_node_stride + head * lse_head_stride, value, mask=inside)
