"""head_topk in Triton: tiles of the vocabulary give their best candidates, which are merged until k are left.

A program multiplies a tile of rows with a tile of the weight and keeps, per row, the tile's maximum and sum of
exponentials and its best k logits; logits never leave the registers. A candidate is one integer that orders like its
logit and then by the lower row of the weight, so that a maximum finds both and no tie is left to chance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._checks import refuse

MOST_CANDIDATES = 2048  # past it, sorting all logits is the better way
MERGED_KEYS = 4096  # of a merging program


def head_topk(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    k: int,
    vocab_size: int,
    token_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """states [R, H], vocab_weight [>= vocab_size, H] -> int32 [R, k], fp32 [R, k], fp32 [R]."""
    if k > MOST_CANDIDATES:
        refuse("head_topk", "k", f"at most {MOST_CANDIDATES} with backend 'triton'", k)
    rows, width = states.shape
    device = states.device
    tokens = torch.empty(rows, k, dtype=torch.int32, device=device)
    log_probs = torch.empty(rows, k, dtype=torch.float32, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return tokens, log_probs, lse
    constants, num_warps, num_stages = launch_parameters(rows, states.dtype)
    tiles = triton.cdiv(vocab_size, constants["TILE"])
    per_tile = min(k, constants["TILE"])
    keys = torch.empty(rows, tiles * per_tile, dtype=torch.int64, device=device)
    moments = torch.empty(rows, tiles, 2, dtype=torch.float32, device=device)
    _tile_kernel[(tiles, triton.cdiv(rows, constants["ROWS"]))](
        states, vocab_weight, keys, moments, rows, width, vocab_size, per_tile, tiles,
        states.stride(0), vocab_weight.stride(0), **constants, INTERPRETED=device.type == "cpu",
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    groups = tiles  # a tile's own candidates are in order
    while groups > 1:
        groups = triton.cdiv(keys.shape[1], MERGED_KEYS)
        merged = torch.empty(rows, groups * k, dtype=torch.int64, device=device)
        block = min(MERGED_KEYS, triton.next_power_of_2(keys.shape[1]))
        _merge_kernel[(rows, groups)](keys, merged, keys.shape[1], merged.shape[1], k, BLOCK=block, num_warps=8)
        keys = merged
    _finish_kernel[(rows,)](
        keys, moments, token_map, tokens, log_probs, lse, k, tiles,
        CANDIDATES=triton.next_power_of_2(k), TILES=1024, HAS_MAP=token_map is not None, num_warps=4,
    )  # fmt: skip
    return tokens, log_probs, lse


def launch_parameters(rows: int, dtype: torch.dtype) -> tuple[dict[str, int], int, int]:
    """Tile sizes, warps and stages.

    The weight is what has to be read, so as many rows as registers allow share a tile of it: 16, the least of a matrix
    instruction, up to 64. Tiles of 128 weight rows give every multiprocessor several programs at any vocabulary. fp32
    multiplies without matrix instructions, in smaller tiles.
    """
    full = dtype == torch.float32
    most = 16 if full else 64
    constants = {"ROWS": max(16, min(most, triton.next_power_of_2(rows))), "TILE": 64 if full else 128}
    return {**constants, "DEPTH": 32 if full else 64}, 4 if constants["ROWS"] < 64 else 8, 2 if full else 3


@triton.jit
def _ordered(value, column):
    """int64 that orders like the fp32 value, then by the lower column."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (signed.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _value(key):
    """The fp32 value of such an integer."""
    signed = (key >> 32).to(tl.int32)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _tile_kernel(
    states,  # [R, H]
    weight,  # [V, H]
    keys,  # int64 [R, tiles * per_tile]
    moments,  # fp32 [R, tiles, 2]: maximum, sum of exponentials
    rows, width, vocab_size, per_tile, tiles, states_stride, weight_stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tile * TILE + tl.arange(0, TILE)
    inside = row < rows
    states += row.to(tl.int64)[:, None] * states_stride
    weight += column.to(tl.int64)[:, None] * weight_stride
    logits = tl.zeros([ROWS, TILE], tl.float32)
    for first in range(0, width, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        x = tl.load(states + depth[None, :], mask=inside[:, None] & (depth[None, :] < width), other=0.0)
        w = tl.load(weight + depth[None, :], mask=(column[:, None] < vocab_size) & (depth[None, :] < width), other=0.0)
        if INTERPRETED:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        logits += tl.dot(x, tl.trans(w), input_precision="ieee")
    used = (column < vocab_size)[None, :]
    best = tl.max(tl.where(used, logits, float("-inf")), 1)
    base = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.where(used, tl.exp(logits - base[:, None]), 0.0), 1)
    at = (row.to(tl.int64) * tiles + tile) * 2
    tl.store(moments + at, best, mask=inside)
    tl.store(moments + at + 1, total, mask=inside)
    left = tl.where(used, _ordered(logits, column[None, :]), -0x8000000000000000)
    keys += row.to(tl.int64) * tiles * per_tile + tile * per_tile
    for rank in range(0, per_tile):
        top = tl.max(left, 1)
        tl.store(keys + rank, top, mask=inside)
        left = tl.where(left == top[:, None], -0x8000000000000000, left)


@triton.jit
def _merge_kernel(keys, merged, given, made, kept, BLOCK: tl.constexpr):
    """The best ``kept`` of a block of keys, descending."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    place = group * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(keys + row * given + place, mask=place < given, other=-0x8000000000000000)
    merged += row * made + group * kept
    for rank in range(0, kept):
        top = tl.max(left, 0)
        tl.store(merged + rank, top)
        left = tl.where(left == top, -0x8000000000000000, left)


@triton.jit
def _finish_kernel(
    keys,  # int64 [R, k], descending
    moments,  # fp32 [R, tiles, 2]
    token_map,  # int32 [V] or None
    tokens, log_probs, lse, k, tiles,
    CANDIDATES: tl.constexpr, TILES: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    moments += row * tiles * 2
    tile = tl.arange(0, TILES)
    best = tl.full([TILES], float("-inf"), tl.float32)
    for first in range(0, tiles, TILES):
        here = first + tile < tiles
        best = tl.maximum(best, tl.load(moments + (first + tile) * 2, mask=here, other=float("-inf")))
    greatest = tl.max(best, 0)
    total = tl.zeros([TILES], tl.float32)
    for first in range(0, tiles, TILES):
        here = first + tile < tiles
        own = tl.load(moments + (first + tile) * 2, mask=here, other=float("-inf"))
        part = tl.load(moments + (first + tile) * 2 + 1, mask=here, other=0.0)
        total += tl.where(own == float("-inf"), part * 0.0, part * tl.exp(own - greatest))
    whole = greatest + tl.log(tl.sum(total, 0))
    usable = (whole - whole) == 0.0  # finite
    nan = float("nan")
    tl.store(lse + row, tl.where(usable, whole, nan))
    rank = tl.arange(0, CANDIDATES)
    kept = rank < k
    key = tl.load(keys + row * k + rank, mask=kept, other=0)
    column = tl.where(usable, 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32), rank)
    value = tl.where(usable, _value(key) - whole, nan)
    if HAS_MAP:
        column = tl.load(token_map + column, mask=kept, other=0)
    tl.store(tokens + row * k + rank, column, mask=kept)
    tl.store(log_probs + row * k + rank, value, mask=kept)
