"""TensorRT-LLM's tree calls: packed links [B, N, 3], and the matrix of paths of its C++ runtime.

Arguments come in the order of TensorRT-LLM's operators and kernels; their names are these in snake_case.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import VerifyStatus
from .._checks import refuse
from ..tree import pack_mask
from ._mask_layouts import TreeMaskMode
from ._walk import accepted_path
from .links import (
    INTEGERS,
    check,
    links_from_parents,
    parents_from_links,
    parents_from_paths,
    refuse_malformed_links,
    selected_tree,
    sibling_lists,
)

__all__ = [
    "TreeMaskMode",
    "accept_draft_tokens_by_ids_with_paths",
    "build_dynamic_tree_op",
    "links_from_parents",
    "pack_links",
    "parents_from_links",
    "parents_from_paths",
    "verify_dynamic_tree_greedy_out_packed_op",
]

FINISHED_EOS = 1
"""The bit of TensorRT-LLM's finished state that says that the end id was met."""


def pack_links(first_child: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """Links in the one tensor that :func:`verify_dynamic_tree_greedy_out_packed_op` takes.

    Args:
        first_child: int32 or int64 ``[B, N]``, -1 for a leaf.
        next_sibling: the same shape, -1 for the last sibling.

    Returns:
        int32 ``[B, N, 3]``: the node's own number, its first child, its next sibling.

    Raises:
        ValueError: wrong dtype or shape.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import tensorrt_llm as trt
        >>> parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
        >>> trt.pack_links(*trt.links_from_parents(parents)).tolist()
        [[[0, 1, -1], [1, -1, 2], [2, -1, -1]]]
    """
    check("pack_links", "first_child", first_child, ndim=2, dtypes=INTEGERS)
    shape, device = first_child.shape, first_child.device
    check("pack_links", "next_sibling", next_sibling, dtypes=INTEGERS, shape=shape, device=device)
    own = torch.arange(shape[1], device=device).expand(shape)
    return torch.stack([own, first_child, next_sibling], dim=2).to(torch.int32)


def verify_dynamic_tree_greedy_out_packed_op(
    candidates: torch.Tensor,
    retrieve_packed: torch.Tensor,
    target_predict: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    accept_token: torch.Tensor,
    tree_valid: torch.Tensor,
    num_spec_step: int,
    *,
    status: torch.Tensor | None = None,
) -> None:
    """Step to the first child that holds the target's token, and write what TensorRT-LLM's operator writes.

    Different on purpose: a walk never leaves its request and always ends, whatever the links hold; int64 is taken too,
    and any device; a candidate of -1 matches nothing.

    Args:
        candidates: int32 or int64 ``[B, N]``, token of each node; the root's is not read.
        retrieve_packed: int32 or int64 ``[B, N, 3]``: place of the node in ``target_predict``, first child, next
            sibling, all within the request; -1 for no child or sibling.
        target_predict: int32 or int64 ``[B, N]``, the target's greedy token after each node.
        accept_index: int32 or int64, at least ``[B, num_spec_step]``, written: places of the path from the root, then
            0.
        accept_token_num: int32 or int64, at least ``[B]``, written: accepted drafts, the bonus not counted.
        accept_token: as ``accept_index``, written: the accepted tokens and the bonus, then 0.
        tree_valid: bool, at least ``[B]``. Where it is False there is no tree: the token after the root is emitted.
        num_spec_step: nodes of the longest path, the root counted.
        status: uint8 ``[B]`` or None, written: bits of :class:`cerberus_kernels.VerifyStatus`.

    Raises:
        ValueError: wrong dtype, shape or device; or, on the CPU, links of a valid tree that are no tree. Elsewhere such
            a request accepts nothing and gets MALFORMED_TREE in ``status``.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import tensorrt_llm as trt
        >>> links = trt.pack_links(torch.tensor([[1, 3, 4, -1, -1]]), torch.tensor([[-1, 2, -1, -1, -1]]))
        >>> index, tokens = torch.empty(1, 4, dtype=torch.int32), torch.empty(1, 4, dtype=torch.int32)
        >>> count = torch.empty(1, dtype=torch.int32)
        >>> trt.verify_dynamic_tree_greedy_out_packed_op(
        ...     torch.tensor([[7, 3, 5, 9, 2]]), links, torch.tensor([[5, 9, 2, 4, 11]]), index, count, tokens,
        ...     torch.tensor([True]), 4)
        >>> index.tolist(), count.tolist(), tokens.tolist()
        ([[0, 2, 4, 0]], [2], [[5, 2, 11, 0]])
    """
    op = "verify_dynamic_tree_greedy_out_packed_op"
    check(op, "candidates", candidates, ndim=2, dtypes=INTEGERS)
    (batch, nodes), device = candidates.shape, candidates.device
    if nodes < 1 or num_spec_step < 1:
        refuse(op, "candidates and num_spec_step", "at least one node wide", f"{nodes} and {num_spec_step}")
    check(op, "retrieve_packed", retrieve_packed, dtypes=INTEGERS, shape=(batch, nodes, 3), device=device)
    check(op, "target_predict", target_predict, dtypes=INTEGERS, shape=(batch, nodes), device=device)
    for name, output, width in (
        ("accept_index", accept_index, (num_spec_step,)),
        ("accept_token", accept_token, (num_spec_step,)),
        ("accept_token_num", accept_token_num, ()),
    ):
        _check_at_least(op, name, output, INTEGERS, (batch, *width), device)
    _check_at_least(op, "tree_valid", tree_valid, (torch.bool,), (batch,), device)
    if status is not None:
        check(op, "status", status, dtypes=(torch.uint8,), shape=(batch,), device=device)

    index, first_child, next_sibling = retrieve_packed.unbind(2)
    valid = tree_valid[:batch]
    lists = sibling_lists(first_child, next_sibling)
    malformed = (lists.malformed | ((index < 0) | (index >= nodes)).any(1)) & valid
    names = ("retrieve_packed[.., 1] (places in [.., 0] below N)", "retrieve_packed[.., 2]")
    refuse_malformed_links(op, names, first_child, next_sibling, malformed)
    usable = (valid & ~malformed).unsqueeze(1)
    places = torch.where(usable, index, torch.arange(nodes, device=device)).long()
    lists = lists._replace(malformed=~usable.squeeze(1))

    targets = target_predict.gather(1, places)
    wanted = targets.gather(1, lists.parents.clamp(min=0))
    path = accepted_path(lists, (candidates == wanted) & (candidates >= 0), num_spec_step)
    on_path, node = path >= 0, path.clamp(min=0)
    for output, values in ((accept_index, places), (accept_token, targets)):
        output.zero_()
        output[:batch, :num_spec_step] = torch.where(on_path, values.gather(1, node), 0).to(output.dtype)
    accept_token_num.zero_()
    accept_token_num[:batch] = (on_path.sum(1) - 1).to(accept_token_num.dtype)
    if status is not None:
        status.copy_(malformed * int(VerifyStatus.MALFORMED_TREE))


def build_dynamic_tree_op(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    top_k: int,
    depth: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
    num_int32_per_row: int,
) -> None:
    """Mask, depths and links of the trees that EAGLE's drafting selected, as TensorRT-LLM's operator.

    The selection is read as in :func:`cerberus_kernels.compat.sglang.build_tree_kernel_efficient`. Different on
    purpose: N has no limit, and rows of the packed mask that are too short for N are refused instead of cut.

    Args:
        parent_list: int32 or int64 ``[B, top_k * (depth - 1) + 1]``; not read if ``depth`` is 1.
        selected_index: int32 or int64 ``[B, N - 1]``, parents before their children.
        tree_mask: int32, contiguous, written: for QLEN_ONLY ``B * N * N`` elements of 0 and 1; for
            QLEN_ONLY_BITPACKING ``B * N * num_int32_per_row`` words, bit ``j % 32`` of word ``j // 32`` for node j (the
            layout of :func:`cerberus_kernels.tree_mask`). What lies behind is set to 0.
        positions: int32 or int64, at least ``B * N`` elements, contiguous, written: depth of each node, then 0.
        retrieve_index: likewise, written: the node's number, then 0.
        retrieve_next_token: likewise, written: first child, -1 for none, then -1.
        retrieve_next_sibling: likewise, written: next sibling, -1 for none, then -1.
        top_k: candidates of each node of EAGLE's drafting.
        depth: levels of its drafting.
        num_draft_tokens: N, nodes with the root.
        tree_mask_mode: 1 (QLEN_ONLY) or 2 (QLEN_ONLY_BITPACKING).
        num_int32_per_row: words in a row of the packed mask, at least ``ceil(N / 32)``; unused in the other mode.

    Raises:
        ValueError: wrong dtype, shape, size or mode; or, on the CPU, a candidate without its parent.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import tensorrt_llm as trt
        >>> mask, positions, *links = (torch.empty(1, 5, dtype=torch.int32) for _ in range(5))
        >>> trt.build_dynamic_tree_op(
        ...     torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2, 4]]), mask, positions, *links, 2, 2, 5, 2, 1)
        >>> mask.tolist(), positions.tolist(), [link.tolist() for link in links[1:]]
        ([[1, 3, 5, 11, 21]], [[0, 1, 1, 2, 2]], [[[1, 3, 4, -1, -1]], [[-1, 2, -1, -1, -1]]])
    """
    op, nodes = "build_dynamic_tree_op", num_draft_tokens
    if nodes < 1:
        refuse(op, "num_draft_tokens", ">= 1", nodes)
    if tree_mask_mode not in (TreeMaskMode.QLEN_ONLY, TreeMaskMode.QLEN_ONLY_BITPACKING):
        refuse(op, "tree_mask_mode", "1 (QLEN_ONLY) or 2 (QLEN_ONLY_BITPACKING)", tree_mask_mode)
    tree = selected_tree(op, parent_list, selected_index, top_k, depth, nodes)
    batch, device = selected_index.shape[0], selected_index.device
    mask = tree.visible
    if tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        words = (nodes + 31) // 32
        if num_int32_per_row < words:
            refuse(op, "num_int32_per_row", f">= {words}", num_int32_per_row)
        mask = torch.nn.functional.pad(pack_mask(tree.visible), (0, num_int32_per_row - words))
    own = torch.arange(nodes, device=device).expand(batch, nodes)
    outputs: tuple[tuple[str, torch.Tensor, torch.Tensor, int], ...] = (
        ("tree_mask", tree_mask, mask, 0),
        ("positions", positions, tree.depths, 0),
        ("retrieve_index", retrieve_index, own, 0),
        ("retrieve_next_token", retrieve_next_token, tree.first_child, -1),
        ("retrieve_next_sibling", retrieve_next_sibling, tree.next_sibling, -1),
    )
    for name, output, values, _ in outputs:
        check(op, name, output, dtypes=(torch.int32,) if name == "tree_mask" else INTEGERS, device=device)
        if output.numel() < values.numel() or not output.is_contiguous():
            refuse(op, name, f"contiguous, of at least {values.numel()} elements", list(output.shape))
    for _, output, values, rest in outputs:
        flat = output.view(-1)
        flat[: values.numel()] = values.flatten().to(output.dtype)
        flat[values.numel() :] = rest


def _check_at_least(
    op: str, name: str, value: torch.Tensor, dtypes: Any, shape: tuple[int, ...], device: torch.device
) -> None:
    check(op, name, value, ndim=len(shape), dtypes=dtypes, device=device)
    if any(have < want for have, want in zip(value.shape, shape, strict=True)):
        refuse(op, name, f"at least of shape {list(shape)}", list(value.shape))


def accept_draft_tokens_by_ids_with_paths(
    output_ids: torch.Tensor,
    draft_ids: torch.Tensor,
    target_ids: torch.Tensor,
    sequence_lengths: torch.Tensor | None,
    accepted_lengths: torch.Tensor,
    finished_final: torch.Tensor | None,
    batch_slots: torch.Tensor | None,
    paths: torch.Tensor,
    end_ids: torch.Tensor | None,
    cur_tokens_per_step: torch.Tensor | None,
    target_tokens_per_step: torch.Tensor | None,
    best_path_ids: torch.Tensor,
) -> None:
    """Take the path along which most drafts equal the target's tokens, as TensorRT-LLM's kernel of this name.

    The kernel's pointers to logits, which it only passes on, are left out. M counts slots; request b uses slot
    ``batch_slots[b]``, and no other slot is touched. Different on purpose: the longest path is chosen before it is cut
    at the end id, and the end id is looked for in every emitted token, so a tie cannot hide it; a slot without a path
    emits the token after the root; a number outside the tree ends its path where it cannot be refused; tokens past the
    width of ``output_ids`` are not written.

    Args:
        output_ids: int32 or int64 ``[M, S_max]``, written from ``sequence_lengths`` on: the emitted tokens.
        draft_ids: int32 or int64 ``[M, N - 1]``, token of nodes 1 to N - 1.
        target_ids: int32 or int64 ``[M, N]``, the target's token after each node.
        sequence_lengths: int32 or int64 ``[M]`` or None for zeros. The accepted length is added in place.
        accepted_lengths: int32 or int64 ``[M]``, written: tokens emitted, the bonus counted, the end id and what
            follows it not.
        finished_final: uint8 ``[M]`` or None: bit FINISHED_EOS is set where the end id was met.
        batch_slots: int32 or int64 ``[B]``, distinct, or None for ``B = M`` and slot b for request b.
        paths: int32 or int64 ``[M, P, L]``: nodes from the root down, then -1; a row that starts with -1 is no path.
        end_ids: int32 or int64 ``[M]`` or None.
        cur_tokens_per_step: int32 or int64 ``[M]`` or None for N: nodes that have drafts; those past them match
            nothing. Where it is 1 the entry of ``target_tokens_per_step`` takes its place, if both are given.
        target_tokens_per_step: int32 or int64 ``[M]`` or None.
        best_path_ids: int32 or int64 ``[M]``, written: row of ``paths``, the lowest of equals.

    Raises:
        ValueError: wrong dtype, shape or device; or, on the CPU, a number in ``paths`` outside ``[-1, N)``.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import tensorrt_llm as trt
        >>> output, length, best = torch.zeros(1, 6, dtype=torch.int32), torch.empty(1).int(), torch.empty(1).int()
        >>> trt.accept_draft_tokens_by_ids_with_paths(
        ...     output, torch.tensor([[3, 5, 9, 2]]), torch.tensor([[5, 9, 2, 4, 11]]), None, length, None, None,
        ...     torch.tensor([[[0, 1, 3], [0, 2, 4]]]), None, None, None, best)
        >>> output.tolist(), length.tolist(), best.tolist()
        ([[5, 2, 11, 0, 0, 0]], [3], [1])
    """
    op = "accept_draft_tokens_by_ids_with_paths"
    check(op, "target_ids", target_ids, ndim=2, dtypes=INTEGERS)
    (slots, nodes), device = target_ids.shape, target_ids.device
    check(op, "draft_ids", draft_ids, dtypes=INTEGERS, shape=(slots, nodes - 1), device=device)
    check(op, "output_ids", output_ids, dtypes=INTEGERS, shape=(slots, None), device=device)
    check(op, "paths", paths, dtypes=INTEGERS, shape=(slots, None, None), device=device)
    if 0 in paths.shape[1:]:
        refuse(op, "paths", "of shape [M, P, L] with P, L >= 1", list(paths.shape))
    optional = {
        "sequence_lengths": sequence_lengths, "end_ids": end_ids, "cur_tokens_per_step": cur_tokens_per_step,
        "target_tokens_per_step": target_tokens_per_step, "finished_final": finished_final,
    }  # fmt: skip
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**given, "accepted_lengths": accepted_lengths, "best_path_ids": best_path_ids}.items():
        dtypes = (torch.uint8,) if name == "finished_final" else INTEGERS
        check(op, name, value, dtypes=dtypes, shape=(slots,), device=device)
    slot = torch.arange(slots, device=device)
    if batch_slots is not None:
        check(op, "batch_slots", batch_slots, ndim=1, dtypes=INTEGERS, device=device)
        slot = batch_slots.long()
    path = paths[slot].long()  # [B, P, L]
    if device.type == "cpu" and bool(((path < -1) | (path >= nodes)).any()):
        b = int(((path < -1) | (path >= nodes)).flatten(1).any(1).nonzero()[0])
        refuse(op, "paths", f"in [-1, {nodes})", f"{path[b].tolist()} in slot {int(slot[b])}")

    drafted = nodes if cur_tokens_per_step is None else cur_tokens_per_step[slot].view(-1, 1, 1)
    drafts = torch.nn.functional.pad(draft_ids, (1, 0), value=-1)[slot]
    best, count, emitted = _best_path(path, drafts, target_ids[slot], drafted)
    place = torch.arange(path.shape[2], device=device)
    length = count + 1
    if end_ids is not None:
        ends = (emitted == end_ids[slot].unsqueeze(1)) & (place <= count.unsqueeze(1))
        length = torch.minimum(length, torch.where(ends, place, path.shape[2]).amin(1))
        if finished_final is not None:
            finished_final[slot] |= ends.any(1).to(torch.uint8) * FINISHED_EOS

    start = torch.zeros_like(length) if sequence_lengths is None else sequence_lengths[slot].long()
    offset = torch.arange(output_ids.shape[1], device=device) - start.unsqueeze(1)
    written = (offset >= 0) & (offset < length.unsqueeze(1))
    values = emitted.gather(1, offset.clamp(0, path.shape[2] - 1)).to(output_ids.dtype)
    output_ids[slot] = torch.where(written, values, output_ids[slot])
    accepted_lengths[slot] = length.to(accepted_lengths.dtype)
    best_path_ids[slot] = best.to(best_path_ids.dtype)
    if sequence_lengths is not None:
        sequence_lengths[slot] += length.to(sequence_lengths.dtype)
    if cur_tokens_per_step is not None and target_tokens_per_step is not None:
        current = cur_tokens_per_step[slot]
        ahead = target_tokens_per_step[slot].to(current.dtype)
        cur_tokens_per_step[slot] = torch.where(current == 1, ahead, current)


def _best_path(
    path: torch.Tensor, drafts: torch.Tensor, targets: torch.Tensor, drafted: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row of ``path`` [B, P, L] with most drafts accepted, their number, and the target's tokens [B, L] along it."""
    inside = (path >= 0) & (path < targets.shape[1])
    node = torch.where(inside, path, 0)
    wanted = targets.unsqueeze(1).expand(-1, path.shape[1], -1).gather(2, node)  # [B, P, L]
    tokens = drafts.unsqueeze(1).expand(-1, path.shape[1], -1).gather(2, node)
    matches = (inside & (path < drafted))[:, :, 1:] & (tokens[:, :, 1:] >= 0) & (tokens[:, :, 1:] == wanted[:, :, :-1])
    accepted = torch.where(inside[:, :, 0], matches.long().cumprod(2).sum(2), -1)
    best = accepted.argmax(1)  # the lowest of equals
    row = best.view(-1, 1)
    along = wanted.gather(1, row.unsqueeze(2).expand(-1, 1, path.shape[2])).squeeze(1)  # no path at all reads the root
    return best, accepted.gather(1, row).squeeze(1).clamp(min=0), along
