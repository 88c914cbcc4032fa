"""tree_mask in Triton: every node of a block of rows walks up to the root and sets its ancestors' bits."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ...tree import WORD_BITS, check_parents, mask_words


def tree_mask(parents: torch.Tensor, num_nodes: torch.Tensor | None = None) -> torch.Tensor:
    """parents int32 [B, N], num_nodes int32 [B] or None -> int32 [B, N, W].

    On a GPU nothing is read back, so a malformed tree is not refused there: its mask is that of the root alone. With
    ``CERBERUS_VALIDATE=1`` it is refused at the cost of a host sync.
    """
    if parents.device.type == "cpu" or os.environ.get("CERBERUS_VALIDATE") == "1":
        check_parents("tree_mask", parents, num_nodes)
    return unchecked_tree_mask(parents, num_nodes)


def unchecked_tree_mask(parents: torch.Tensor, num_nodes: torch.Tensor | None = None) -> torch.Tensor:
    """What :func:`tree_mask` launches."""
    batch, nodes = parents.shape
    words = mask_words(nodes)
    mask = torch.empty(batch, nodes, words, dtype=torch.int32, device=parents.device)
    if mask.numel() == 0:
        return mask
    constants, num_warps = launch_parameters(nodes)
    grid = (batch, triton.cdiv(nodes, constants["ROWS"]))
    _tree_mask_kernel[grid](
        parents, num_nodes, mask, nodes, parents.stride(0), **constants, HAS_COUNTS=num_nodes is not None,
        num_warps=num_warps,
    )  # fmt: skip
    return mask


def launch_parameters(nodes: int) -> tuple[dict[str, int], int]:
    """Block sizes and warps for trees of ``nodes`` nodes.

    A block of rows by words of about 1024 elements is few registers per thread; 32 rows at least, so that the words of
    a large tree, not its rows, make the blocks larger.
    """
    words = triton.next_power_of_2(mask_words(nodes))
    rows = min(triton.next_power_of_2(nodes), max(32, 1024 // words))
    tree_block = min(triton.next_power_of_2(nodes), 1024)
    constants = {"ROWS": rows, "WORDS": words, "TREE_BLOCK": tree_block, "WORD_BITS": WORD_BITS}
    return constants, 1 if rows * words <= 128 else 4


@triton.jit
def _num_sound_nodes(parents, count, nodes, TREE_BLOCK: tl.constexpr):
    """``count``, or 1 where it or the tree breaks the encoding."""
    sound = (count >= 1) & (count <= nodes)
    bad = (count * 0).to(tl.int32)
    for first in range(0, tl.where(sound, count, 0), TREE_BLOCK):
        node = first + tl.arange(0, TREE_BLOCK)
        parent = tl.load(parents + node, mask=node < count, other=-1)
        broken = tl.where(node == 0, parent != -1, (parent < 0) | (parent >= node)) & (node < count)
        bad += tl.sum(broken.to(tl.int32), 0)
    return tl.where(sound & (bad == 0), count, 1)


@triton.jit
def _tree_mask_kernel(
    parents,  # int32 [B, N]
    num_nodes,  # int32 [B] or None
    mask,  # int32 [B, N, W]
    nodes,
    parents_stride,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
    WORD_BITS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    parents += b * parents_stride
    count = tl.load(num_nodes + b) if HAS_COUNTS else nodes
    count = _num_sound_nodes(parents, count, nodes, TREE_BLOCK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    ancestor = tl.where(row < count, row, -1)  # [ROWS]
    bits = tl.zeros([ROWS, WORDS], tl.uint32)
    while tl.max(ancestor, 0) >= 0:
        bit = tl.full([ROWS], 1, tl.uint32) << (ancestor % WORD_BITS).to(tl.uint32)
        here = (ancestor[:, None] >= 0) & (ancestor[:, None] // WORD_BITS == word[None, :])
        bits |= tl.where(here, bit[:, None], 0).to(tl.uint32)
        ancestor = tl.load(parents + ancestor, mask=ancestor > 0, other=-1)  # the root has none
    num_words = (nodes + WORD_BITS - 1) // WORD_BITS
    mask += b * nodes * num_words
    place = row[:, None].to(tl.int64) * num_words + word[None, :]
    inside = (row[:, None] < nodes) & (word[None, :] < num_words)
    tl.store(mask + place, bits.to(tl.int32, bitcast=True), mask=inside)
