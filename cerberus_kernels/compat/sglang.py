"""SGLang's tree calls (sgl_kernel.speculative): same positional arguments, mutated outputs and conventions.

``retrive_*`` is SGLang's spelling; the names are part of its interface.
"""

from __future__ import annotations

import torch

from .. import VerifyStatus
from .._checks import refuse
from ._mask_layouts import TreeMaskMode, write_mask
from ._walk import accepted_path, draw, greatest_entry
from .links import INTEGERS, SiblingLists, check, refuse_malformed_links, selected_tree, sibling_lists

__all__ = [
    "TreeMaskMode",
    "build_tree_kernel_efficient",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]

LEAST_THRESHOLD_ACC = 1e-9


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    *,
    status: torch.Tensor | None = None,
) -> None:
    """Step to the first child that holds the target's token, and write what SGLang's kernel of this name writes.

    Different on purpose: a walk never leaves its request and always ends, whatever the links hold; ids of any integer
    dtype of 32 or 64 bits are taken, on any device; ``accept_index`` is written whole, so it needs no -1 beforehand; a
    candidate of -1 matches nothing.

    Args:
        predicts: int32 or int64 ``[B * N]``, written at the rows of the path: the target's token after each node of it,
            so the accepted tokens and the bonus. The rest is left as it is.
        accept_index: int32 or int64 ``[B, D + 1]``, written: rows (entries of ``retrive_index``) of the path from the
            root, then -1. Its width bounds the path.
        accept_token_num: int32 or int64 ``[B]``, written: accepted drafts, neither root nor bonus counted.
        candidates: int32 or int64 ``[B, N]``, token of each node; the root's is not read.
        retrive_index: int32 or int64 ``[B, N]``, row of each node in ``predicts`` and ``target_predict``, taken flat.
        retrive_next_token: int32 or int64 ``[B, N]``, first child of each node within its request, -1 for none.
        retrive_next_sibling: int32 or int64 ``[B, N]``, next sibling, -1 for none.
        target_predict: int32 or int64 ``[B, N]``, the target's greedy token after each node.
        status: uint8 ``[B]`` or None, written: bits of :class:`cerberus_kernels.VerifyStatus`.

    Raises:
        ValueError: wrong dtype, shape or device; or, on the CPU, rows out of range or links that are no tree. Elsewhere
            such a request accepts nothing (root only, at row ``b * N``) and gets MALFORMED_TREE in ``status``.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import sglang
        >>> predicts, accept_index = torch.zeros(5, dtype=torch.int32), torch.full((1, 3), -1, dtype=torch.int32)
        >>> count = torch.zeros(1, dtype=torch.int32)
        >>> first, sibling = torch.tensor([[1, 3, 4, -1, -1]]), torch.tensor([[-1, 2, -1, -1, -1]])
        >>> drafts, target = torch.tensor([[7, 3, 5, 9, 2]]), torch.tensor([[5, 9, 2, 4, 11]])
        >>> sglang.verify_tree_greedy(
        ...     predicts, accept_index, count, drafts, torch.arange(5)[None], first, sibling, target)
        >>> predicts.tolist(), accept_index.tolist(), count.tolist()
        ([5, 0, 2, 0, 11], [[0, 2, 4]], [2])
    """
    op = "verify_tree_greedy"
    lists, rows = _read_tree(op, candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    batch, nodes = candidates.shape
    check(op, "target_predict", target_predict, dtypes=INTEGERS, shape=(batch, nodes), device=candidates.device)
    _check_outputs(op, predicts, accept_index, accept_token_num, status, candidates)
    targets = target_predict.reshape(-1)[rows].long()  # [B, N]
    wanted = targets.gather(1, lists.parents.clamp(min=0))
    path = accepted_path(lists, (candidates == wanted) & (candidates >= 0), accept_index.shape[1])
    _write(predicts, accept_index, accept_token_num, path, rows, targets.gather(1, path.clamp(min=0)))
    if status is not None:
        status.copy_(lists.malformed * int(VerifyStatus.MALFORMED_TREE))


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    status: torch.Tensor | None = None,
) -> None:
    """Sample along a tree of deterministic drafts with coins given, and write what SGLang's kernel of this name writes.

    At a node with row p, along its children in list order, a is the sum of p over the distinct tokens so far. The first
    child with ``coin < a / threshold_acc`` or ``p(token) >= threshold_single`` is accepted, with coin the entry of
    ``uniform_samples`` at the node; its own row and coin rule the next step. Where none is accepted the bonus is drawn
    from p without the tokens tried. With both thresholds 1 every emitted token has exactly the target's distribution;
    lower ones accept more and shift it.

    Different on purpose: exact with duplicate siblings too, which count once; comparisons are strict, so no token of
    probability zero is ever accepted or drawn, at any coin or threshold; sums are float64, so a coin within fp32
    rounding of a border may fall on the other side; ``draft_probs`` is neither read nor written and may be None (for
    drafts that were sampled from draft rows use ``verify_tree`` with ``mode="rejection"``); a row of NaN accepts
    nothing below it, a NaN among other entries counts as 0, and where nothing can be drawn the bonus is the row's
    greatest entry (the lowest of equals, 0 if all are NaN), not the last token of the vocabulary; links, outputs,
    dtypes and devices as in :func:`verify_tree_greedy`.

    Args:
        predicts: int32 or int64 ``[B * N]``, written at the rows of the path: the token emitted after each node of it.
        accept_index: int32 or int64 ``[B, D + 1]``, written: rows of the path from the root, then -1.
        accept_token_num: int32 or int64 ``[B]``, written: accepted drafts, neither root nor bonus counted.
        candidates: int32 or int64 ``[B, N]``, token of each node; one outside ``[0, V)`` is never accepted.
        retrive_index: int32 or int64 ``[B, N]``, row of each node in ``predicts``.
        retrive_next_token: int32 or int64 ``[B, N]``, first child, -1 for none.
        retrive_next_sibling: int32 or int64 ``[B, N]``, next sibling, -1 for none.
        uniform_samples: floating ``[B, N]`` in [0, 1), the coin of each node's children.
        uniform_samples_for_final_sampling: floating ``[B]`` in [0, 1), the coin of the bonus.
        target_probs: fp32, bf16 or fp16 ``[B, N, V]``, the target's distribution after each node.
        draft_probs: unused.
        threshold_single: in [0, 1].
        threshold_acc: in [0, 1]; 1e-9 stands in for less.
        deterministic: unused; the result is always a function of the arguments.
        status: uint8 ``[B]`` or None, written: bits of :class:`cerberus_kernels.VerifyStatus`.

    Raises:
        ValueError: as :func:`verify_tree_greedy`, or a threshold out of range.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import sglang
        >>> predicts, accept_index = torch.zeros(3, dtype=torch.int32), torch.full((1, 2), -1, dtype=torch.int32)
        >>> count = torch.zeros(1, dtype=torch.int32)
        >>> first, sibling = torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]])
        >>> probs = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.1, 0.8, 0.1]]])
        >>> sglang.tree_speculative_sampling_target_only(
        ...     predicts, accept_index, count, torch.tensor([[9, 0, 1]]), torch.arange(3)[None], first, sibling,
        ...     torch.tensor([[0.7, 0.0, 0.0]]), torch.tensor([0.5]), probs)
        >>> predicts.tolist(), accept_index.tolist(), count.tolist()  # 0.5 <= 0.7 < 0.5 + 0.3
        ([1, 0, 1], [[0, 2]], [1])
    """
    op = "tree_speculative_sampling_target_only"
    lists, rows = _read_tree(op, candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    batch, nodes = candidates.shape
    device = candidates.device
    floats = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    check(op, "target_probs", target_probs, dtypes=floats, shape=(batch, nodes, None), device=device)
    check(op, "uniform_samples", uniform_samples, dtypes=floats, shape=(batch, nodes), device=device)
    final = uniform_samples_for_final_sampling
    check(op, "uniform_samples_for_final_sampling", final, dtypes=floats, shape=(batch,), device=device)
    for name, threshold in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if not 0 <= threshold <= 1:
            refuse(op, name, "in [0, 1]", threshold)
    _check_outputs(op, predicts, accept_index, accept_token_num, status, candidates)

    vocab_size = target_probs.shape[2]
    parent = lists.parents.clamp(min=0)
    known = (candidates >= 0) & (candidates < vocab_size)
    tokens = torch.where(known, candidates, 0).long()
    request = torch.arange(batch, device=device)
    listed = known & (lists.parents >= 0)
    prob = target_probs[request.unsqueeze(1), parent, tokens].double()  # [B, N], of the node's token at its parent
    prob = torch.where(listed & (prob > 0) & (prob < torch.inf), prob, 0.0)  # NaN is neither
    coin = uniform_samples.double().gather(1, parent)
    reached = _distinct_sums(lists, tokens, listed, prob)
    accepts = (coin < reached / max(threshold_acc, LEAST_THRESHOLD_ACC)) | (prob >= threshold_single)
    path = accepted_path(lists, accepts & (prob > 0), accept_index.shape[1])

    count = (path >= 0).sum(1) - 1
    last = path.gather(1, count.unsqueeze(1))
    row = target_probs[request, last.squeeze(1)].double()  # [B, V]
    weights = torch.where((row > 0) & (row < torch.inf), row, 0.0)
    tried = (lists.parents == last) & known & (count < accept_index.shape[1] - 1).unsqueeze(1)
    tried &= ~lists.malformed.unsqueeze(1)
    weights.scatter_reduce_(1, tokens, torch.where(tried, 0.0, weights.gather(1, tokens)), "amin")
    bonus = draw(weights, final.double(), greatest_entry(row))
    following = tokens.gather(1, torch.nn.functional.pad(path[:, 1:], (0, 1)).clamp(min=0))
    place = torch.arange(path.shape[1], device=device)
    emitted = torch.where(place == count.unsqueeze(1), bonus.unsqueeze(1), following)
    _write(predicts, accept_index, accept_token_num, path, rows, emitted)
    if status is not None:
        foreign = (lists.parents >= 0) & ~known & (candidates != -1)
        flags = lists.malformed * int(VerifyStatus.MALFORMED_TREE)
        flags |= row.isnan().any(1) * int(VerifyStatus.NAN_ROW)
        status.copy_(flags | foreign.any(1) * int(VerifyStatus.TOKEN_OUT_OF_RANGE))


def build_tree_kernel_efficient(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
) -> None:
    """Mask, positions and links of the trees that EAGLE's drafting selected, as SGLang's kernel of this name.

    Candidate c of a request is a child of candidate ``parent_list[b, c // topk]``, of the root if ``c // topk == 0``;
    node i + 1 is candidate ``selected_index[b, i]``. N is ``draft_token_num``, the root counted.

    Different on purpose: no output needs to be filled beforehand, except the prefix part of a FULL_MASK, which is the
    caller's as it is there; N has no limit but 32 in the packed layout, where more is refused (``tree_mask`` packs any
    N); a node whose parent was not selected is refused on the CPU, and elsewhere it gets no link, sees the root and
    itself, and has depth 1.

    Args:
        parent_list: int32 or int64 ``[B, topk * (depth - 1) + 1]``; not read if ``depth`` is 1.
        selected_index: int32 or int64 ``[B, N - 1]``, parents before their children.
        verified_seq_len: int32 or int64 ``[B]``, S, positions before the root.
        tree_mask: written, contiguous, laid out as ``tree_mask_mode`` says; bool or uint8, or any integer type for
            QLEN_ONLY_BITPACKING.
        positions: int32 or int64, ``B * N`` elements, written: S + depth of each node.
        retrive_index: int32 or int64 ``[B, N]``, written: ``b * N + i``.
        retrive_next_token: int32 or int64 ``[B, N]``, written: first child, -1 for none.
        retrive_next_sibling: int32 or int64 ``[B, N]``, written: next sibling, -1 for none, lower numbers first.
        topk: candidates of each node of EAGLE's drafting.
        depth: levels of its drafting.
        draft_token_num: N.
        tree_mask_mode: a :class:`TreeMaskMode` or its number.

    Raises:
        ValueError: wrong dtype, shape, size or mode; or, on the CPU, a candidate without its parent.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import sglang
        >>> links = [torch.empty(1, 4, dtype=torch.int64) for _ in range(3)]
        >>> mask, positions = torch.empty(1, 4, 4, dtype=torch.bool), torch.empty(4, dtype=torch.int64)
        >>> sglang.build_tree_kernel_efficient(  # candidates 0 and 1 below the root, 2 below candidate 0
        ...     torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2]]), torch.tensor([6]), mask, positions, *links,
        ...     2, 2, 4, sglang.TreeMaskMode.QLEN_ONLY)
        >>> mask.int().tolist(), positions.tolist(), [link.tolist() for link in links[1:]]
        ([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]], [6, 7, 7, 8],
        [[[1, 3, -1, -1]], [[-1, 2, -1, -1]]])
    """
    op = "build_tree_kernel_efficient"
    nodes = draft_token_num
    if nodes < 1:
        refuse(op, "draft_token_num", ">= 1", nodes)
    if tree_mask_mode not in tuple(TreeMaskMode):
        refuse(op, "tree_mask_mode", "0, 1 or 2 (TreeMaskMode)", tree_mask_mode)
    tree = selected_tree(op, parent_list, selected_index, topk, depth, nodes)
    batch, device = selected_index.shape[0], selected_index.device
    check(op, "verified_seq_len", verified_seq_len, dtypes=INTEGERS, shape=(batch,), device=device)
    if device.type == "cpu" and bool((verified_seq_len < 0).any()):
        refuse(op, "verified_seq_len", ">= 0", verified_seq_len.tolist())
    check(op, "positions", positions, ndim=(1, 2), dtypes=INTEGERS, device=device)
    if positions.numel() != batch * nodes:
        refuse(op, "positions", f"of {batch * nodes} elements", list(positions.shape))
    own = torch.arange(batch * nodes, device=device).view(batch, nodes)
    outputs = {"retrive_index": retrive_index, "retrive_next_token": retrive_next_token}
    outputs["retrive_next_sibling"] = retrive_next_sibling
    for name, output in outputs.items():
        check(op, name, output, dtypes=INTEGERS, shape=(batch, nodes), device=device)
    write_mask(op, tree_mask, tree.visible, verified_seq_len.long(), TreeMaskMode(tree_mask_mode))
    positions.copy_((verified_seq_len.unsqueeze(1) + tree.depths).view_as(positions))
    for output, value in zip(outputs.values(), (own, tree.first_child, tree.next_sibling), strict=True):
        output.copy_(value)


def _read_tree(
    op: str,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
) -> tuple[SiblingLists, torch.Tensor]:
    """The tree of each request, and the row of each node in flat tensors: its own where the given one is none."""
    check(op, "candidates", candidates, ndim=2, dtypes=INTEGERS)
    shape, device = tuple(candidates.shape), candidates.device
    if shape[1] < 1:
        refuse(op, "candidates", "of shape [B, N] with N >= 1", list(shape))
    names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    for name, tensor in zip(names, (retrive_index, first_child, next_sibling), strict=True):
        check(op, name, tensor, dtypes=INTEGERS, shape=shape, device=device)
    lists = sibling_lists(first_child, next_sibling)
    refuse_malformed_links(op, names[1:], first_child, next_sibling, lists.malformed)
    foreign = ((retrive_index < 0) | (retrive_index >= candidates.numel())).any(1)
    if device.type == "cpu" and bool(foreign.any()):
        b = int(foreign.nonzero()[0])
        refuse(op, names[0], f"in [0, {candidates.numel()})", f"{retrive_index[b].tolist()} in row {b}")
    malformed = lists.malformed | foreign
    own = torch.arange(candidates.numel(), device=device).view(shape)
    return lists._replace(malformed=malformed), torch.where(malformed.unsqueeze(1), own, retrive_index.long())


def _check_outputs(
    op: str,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    status: torch.Tensor | None,
    candidates: torch.Tensor,
) -> None:
    batch, device = candidates.shape[0], candidates.device
    check(op, "predicts", predicts, ndim=1, dtypes=INTEGERS, device=device)
    if predicts.numel() < candidates.numel():
        refuse(op, "predicts", f"of at least {candidates.numel()} elements", predicts.numel())
    check(op, "accept_index", accept_index, dtypes=INTEGERS, shape=(batch, None), device=device)
    if accept_index.shape[1] < 1:
        refuse(op, "accept_index", "of shape [B, D + 1] with D >= 0", list(accept_index.shape))
    check(op, "accept_token_num", accept_token_num, dtypes=INTEGERS, shape=(batch,), device=device)
    if status is not None:
        check(op, "status", status, dtypes=(torch.uint8,), shape=(batch,), device=device)


def _distinct_sums(lists: SiblingLists, tokens: torch.Tensor, listed: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
    """Sum of ``prob`` over the distinct tokens of each node's siblings up to and with the node, float64 [B, N]."""
    siblings = (lists.parents.unsqueeze(2) == lists.parents.unsqueeze(1)) & listed.unsqueeze(2) & listed.unsqueeze(1)
    ranks = lists.ranks
    earlier = siblings & (ranks.unsqueeze(2) > ranks.unsqueeze(1))  # [B, i, j]: j stands before i
    first_copy = ~(earlier & (tokens.unsqueeze(2) == tokens.unsqueeze(1))).any(2)
    return prob * first_copy + (earlier * (prob * first_copy).unsqueeze(1)).sum(2)


def _write(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    path: torch.Tensor,
    rows: torch.Tensor,
    emitted: torch.Tensor,
) -> None:
    """Outputs from the path [B, L] of nodes and the tokens [B, L] emitted after them."""
    on_path = path >= 0
    places = rows.gather(1, path.clamp(min=0))
    accept_index.copy_(torch.where(on_path, places, -1))
    accept_token_num.copy_(on_path.sum(1) - 1)
    # what is off the path writes the root's token to the root's row once more, so that nothing depends on order
    places = torch.where(on_path, places, rows[:, :1])
    values = torch.where(on_path, emitted, emitted[:, :1]).to(predicts.dtype)
    predicts.scatter_(0, places.flatten(), values.flatten())
