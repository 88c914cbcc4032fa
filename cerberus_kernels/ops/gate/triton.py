"""gate in Triton: blocks of a row, or of the learned gate's inner units, are reduced apart and merged in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def gate(
    hidden: torch.Tensor | None,
    entropy: torch.Tensor | None,
    logits: torch.Tensor | None,
    thresholds: torch.Tensor | None,
    w1: torch.Tensor | None,
    b1: torch.Tensor | None,
    w2: torch.Tensor | None,
    b2: torch.Tensor | None,
    kind: str,
    threshold: float,
    vocab_size: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as the reference's."""
    given = next(tensor for tensor in (entropy, logits, hidden) if tensor is not None)
    batch = given.shape[0]
    score = torch.empty(batch, dtype=torch.float32, device=given.device)
    is_open = torch.empty(batch, dtype=torch.bool, device=given.device)
    if batch == 0:
        return score, is_open
    limit = (thresholds, 0 if thresholds is None else thresholds.stride(0), threshold)
    outputs = (score, is_open.view(torch.uint8))
    if kind == "learned":
        assert hidden is not None and w1 is not None and b1 is not None and w2 is not None and b2 is not None
        _learned(hidden, w1, b1, w2, b2, eps, limit, outputs)
    elif entropy is not None:
        _given_kernel[(triton.cdiv(batch, 128),)](
            entropy, entropy.stride(0), *limit, *outputs, batch, BLOCK=128, num_warps=1
        )
    else:
        rows = hidden if kind == "hidden_entropy" else logits
        assert rows is not None
        _row_entropy(rows, rows.shape[1] if kind == "hidden_entropy" else vocab_size, limit, outputs)
    return score, is_open


def _row_entropy(rows: torch.Tensor, columns: int, limit: tuple, outputs: tuple) -> None:
    constants, num_warps = entropy_parameters(columns)
    batch, blocks = rows.shape[0], triton.cdiv(columns, constants["COLUMNS"])
    moments = torch.empty(batch, blocks, 3, dtype=torch.float32, device=rows.device)
    _moments_kernel[(batch, blocks)](rows, rows.stride(0), columns, moments, **constants, num_warps=num_warps)
    _merge_moments_kernel[(batch,)](
        moments, blocks, *limit, *outputs, BLOCKS=triton.next_power_of_2(blocks), num_warps=1
    )


def _learned(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    eps: float,
    limit: tuple,
    outputs: tuple,
) -> None:
    (batch, width), inner = hidden.shape, w1.shape[0]
    constants, num_warps = learned_parameters(width)
    blocks = triton.cdiv(inner, constants["UNITS"])
    parts = torch.empty(batch, blocks, dtype=torch.float32, device=hidden.device)
    if blocks:
        _inner_kernel[(batch, blocks)](
            hidden, hidden.stride(0), w1, w1.stride(0), b1, w2, width, inner, eps, parts, **constants,
            num_warps=num_warps,
        )  # fmt: skip
    merged = triton.next_power_of_2(max(blocks, 1))
    _probability_kernel[(batch,)](parts, blocks, b2, *limit, *outputs, BLOCKS=merged, num_warps=1)


def entropy_parameters(columns: int) -> tuple[dict[str, int], int]:
    """Block of columns and warps. 4096 columns a program keep 16 or 32 in each thread's registers: read once."""
    block = min(triton.next_power_of_2(columns), 4096)
    return {"COLUMNS": block}, 8 if block >= 2048 else 4 if block >= 512 else 1


def learned_parameters(width: int) -> tuple[dict[str, int], int]:
    """Units and columns of a tile of W1, and warps: 4 rows of W1 a program, so that a small gate fills many."""
    return {"UNITS": 4, "COLUMNS": min(triton.next_power_of_2(width), 1024)}, 4


@triton.jit
def _decide(score, b, thresholds, thresholds_stride, threshold, AT_LEAST: tl.constexpr):
    """1 where the gate opens; comparisons with NaN are false."""
    limit = threshold if thresholds is None else tl.load(thresholds + b * thresholds_stride)
    return (score >= limit if AT_LEAST else score < limit).to(tl.uint8)


@triton.jit
def _given_kernel(
    entropy, entropy_stride, thresholds, thresholds_stride, threshold, score, is_open, batch, BLOCK: tl.constexpr
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < batch
    value = tl.load(entropy + b * entropy_stride, mask=inside, other=0.0)
    if thresholds is None:
        limit = tl.zeros([BLOCK], tl.float32) + threshold
    else:
        limit = tl.load(thresholds + b * thresholds_stride, mask=inside, other=0.0)
    tl.store(score + b, value, mask=inside)
    tl.store(is_open + b, (value < limit).to(tl.uint8), mask=inside)


@triton.jit
def _shift_for(greatest):
    """The maximum as something to subtract: 0 for a block of only -inf, where nothing is to be subtracted from."""
    return tl.where(greatest == -float("inf"), 0.0, greatest)


@triton.jit
def _moments_kernel(rows, row_stride, columns, moments, COLUMNS: tl.constexpr):
    """Of one block of a row: its maximum m, the sum of e = exp(x - m), and the sum of e * (x - m)."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    entry = tl.load(rows + b * row_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    greatest = tl.max(tl.where(entry == entry, entry, -float("inf")), 0)
    distance = entry - _shift_for(greatest)  # NaN where the maximum is +inf, and in a NaN entry
    power = tl.exp(distance)
    place = moments + (b * tl.num_programs(1) + block) * 3
    tl.store(place, greatest)
    tl.store(place + 1, tl.sum(power, 0))
    tl.store(place + 2, tl.sum(tl.where(power == 0.0, 0.0, power * distance), 0))


@triton.jit
def _merge_moments_kernel(
    moments, blocks, thresholds, thresholds_stride, threshold, score, is_open, BLOCKS: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    place = moments + (b * blocks + block) * 3
    greatest = tl.load(place, mask=inside, other=-float("inf"))
    total = tl.load(place + 1, mask=inside, other=0.0)
    weighted = tl.load(place + 2, mask=inside, other=0.0)
    distance = _shift_for(greatest) - _shift_for(tl.max(greatest, 0))
    factor = tl.where(greatest == -float("inf"), 1.0, tl.exp(distance))
    moved = tl.where(factor == 0.0, 0.0, factor * (weighted + total * distance))
    whole = tl.sum(factor * total, 0)
    nats = tl.log(whole) - tl.sum(moved, 0) / whole
    tl.store(score + b, nats)
    tl.store(is_open + b, _decide(nats, b, thresholds, thresholds_stride, threshold, False))


@triton.jit
def _inner_kernel(
    hidden, hidden_stride, w1, w1_stride, b1, w2, width, inner, eps, parts, UNITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """w2 · SiLU(W1 · rms_norm(x) + b1) over UNITS inner units. The norm is a factor of the row: applied after."""
    b = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    used = unit < inner
    squares = tl.zeros([COLUMNS], tl.float32)
    products = tl.zeros([UNITS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < width
        x = tl.load(hidden + b * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
        place = w1 + unit[:, None].to(tl.int64) * w1_stride + column[None, :]
        weight = tl.load(place, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
        squares += x * x
        products += weight * x[None, :]
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    before = tl.sum(products, 1) * scale + tl.load(b1 + unit, mask=used, other=0.0).to(tl.float32)
    activated = before / (1.0 + tl.exp(-before))
    weighted = tl.load(w2 + unit, mask=used, other=0.0).to(tl.float32) * activated
    part = tl.sum(tl.where(used, weighted, 0.0), 0)
    tl.store(parts + b * tl.num_programs(1) + tl.program_id(1), part)


@triton.jit
def _probability_kernel(
    parts, blocks, b2, thresholds, thresholds_stride, threshold, score, is_open, BLOCKS: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    part = tl.load(parts + b * blocks + block, mask=block < blocks, other=0.0)
    logit = tl.sum(part, 0) + tl.load(b2).to(tl.float32)
    probability = 1.0 / (1.0 + tl.exp(-logit))
    tl.store(score + b, probability)
    tl.store(is_open + b, _decide(probability, b, thresholds, thresholds_stride, threshold, True))
