"""head_states in Triton: one launch a block of all heads, with bias, SiLU and residual in the product's epilogue.

What a head and its left neighbour held before the block are two products into one sum; the concatenation is never made.
States between blocks stay fp32. As operands of a matrix instruction they are rounded to the weights' 16-bit type where
the inputs are of 16 bits too; the residual is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def head_states(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    root_embedding: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden [B, H], weight [L, K, H, 2H] or [L, K, H, H], bias [L, K, H], root_embedding [B, H] -> [B, K, H]."""
    batch, width = hidden.shape
    blocks, heads = weight.shape[:2]
    on_cpu = hidden.device.type == "cpu"  # the interpreter cuts bfloat16 off where it should round
    dtype = torch.float32 if on_cpu else hidden.dtype
    result = torch.empty(batch, heads, width, dtype=dtype, device=hidden.device)
    if blocks == 0:
        return hidden.unsqueeze(1).repeat(1, heads, 1)
    if result.numel() == 0:
        return result.to(hidden.dtype)
    constants, num_warps, num_stages = launch_parameters(batch, hidden.dtype, weight.dtype)
    link = hidden if root_embedding is None else root_embedding
    between = torch.empty(min(2, blocks - 1), batch, heads, width, dtype=torch.float32, device=hidden.device)
    states: tuple[torch.Tensor, int, int] = (hidden, hidden.stride(0), 0)  # rows, stride of a request, of a head
    for block in range(blocks):
        target = result if block == blocks - 1 else between[block % 2]
        grid = (triton.cdiv(width, constants["COLUMNS"]), heads, triton.cdiv(batch, constants["ROWS"]))
        _block_kernel[grid](
            states[0], link, weight[block], bias[block], target, batch, width,
            states[1], states[2], link.stride(0), weight.stride(1), weight.stride(2), bias.stride(1), bias.stride(2),
            heads * width, width,
            **constants, LINKED=weight.shape[3] != width, INTERPRETED=on_cpu,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        states = (target, heads * width, width)
    return result.to(hidden.dtype)


def launch_parameters(batch: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple[dict[str, object], int, int]:
    """Tile sizes, warps and stages.

    A step has a row per request, so reading the weights is all there is: 16 rows, the least of a matrix instruction,
    and tiles of 32 outputs, which make enough programs of K heads of a few thousand columns to fill a GPU. With more
    requests tiles grow to 64 rows. fp32 anywhere means products in full precision, without matrix instructions.
    """
    full = torch.float32 in (dtype, weight_dtype)
    rows = 16 if full else max(16, min(64, triton.next_power_of_2(batch)))
    constants: dict[str, object] = {"ROWS": rows, "COLUMNS": 32, "DEPTH": 64 if full else 128, "FULL": full}
    stages = 2 if full or torch.version.hip else 3  # 64 KiB of shared memory on gfx942
    return constants, 4, stages


@triton.jit
def _block_kernel(
    states,  # [B, H] for all heads, or fp32 [B, K, H]
    link,  # [B, H], what stands left of the first head
    weight,  # [K, H, 2H] or [K, H, H]
    bias,  # [K, H]
    target,  # [B, K, H]
    batch, width,
    states_stride, states_head_stride, link_stride, weight_head_stride, weight_row_stride,
    bias_head_stride, bias_stride, target_stride, target_head_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FULL: tl.constexpr, LINKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < batch
    weight += head * weight_head_stride + column.to(tl.int64)[:, None] * weight_row_stride
    own = states + row[:, None] * states_stride + head * states_head_stride
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        x = tl.load(own + depth[None, :], mask=inside[:, None] & (depth[None, :] < width), other=0.0)
        w = tl.load(weight + depth[None, :], mask=(column[:, None] < width) & (depth[None, :] < width), other=0.0)
        product += _product(x, w, FULL, INTERPRETED)
    if LINKED:
        # Both places are loaded under masks of which one is empty: pointers of different types cannot be chosen from.
        left_width = tl.where(head > 0, width, 0)
        left = states + row[:, None] * states_stride + (head - 1) * states_head_stride
        for first in range(0, width, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            on_left = inside[:, None] & (depth[None, :] < left_width)
            in_link = inside[:, None] & (depth[None, :] < width - left_width)
            x = tl.load(left + depth[None, :], mask=on_left, other=0.0).to(tl.float32)
            c = tl.load(link + row[:, None] * link_stride + depth[None, :], mask=in_link, other=0.0).to(tl.float32)
            w = tl.load(
                weight + width + depth[None, :], mask=(column[:, None] < width) & (depth[None, :] < width), other=0.0
            )
            product += _product(x + c, w, FULL, INTERPRETED)
    kept = inside[:, None] & (column[None, :] < width)
    product += tl.load(bias + head * bias_head_stride + column * bias_stride, mask=column < width, other=0.0).to(
        tl.float32
    )[None, :]
    before = tl.load(own + column[None, :], mask=kept, other=0.0).to(tl.float32)
    after = before + product * tl.sigmoid(product)
    target += row[:, None] * target_stride + head * target_head_stride
    tl.store(target + column[None, :], after.to(target.dtype.element_ty), mask=kept)


@triton.jit
def _product(x, w, FULL: tl.constexpr, INTERPRETED: tl.constexpr):
    """x [R, D] times w [C, D] transposed, summed in fp32."""
    if FULL or INTERPRETED:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    else:
        x = x.to(w.dtype)
    return tl.dot(x, tl.trans(w), input_precision="ieee")
