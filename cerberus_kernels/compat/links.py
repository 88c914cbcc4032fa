"""Tree layouts of other engines: child and sibling links, matrices of paths, EAGLE's selection of candidates.

Every function here makes a fixed number of torch operations, whatever the values, so none can walk without end or wait
for the device. A malformed tree is refused where looking at values is free of a sync (on the CPU) and reported as a
flag per request where it is not.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from .._checks import check_tensor, refuse
from ..tree import check_parents

INTEGERS = (torch.int32, torch.int64)
check = partial(check_tensor, last_contiguous=False)  # torch operations take any strides


class SiblingLists(NamedTuple):
    """Children of every node in the order of their list.

    Attributes:
        parents: int64 ``[B, N]``, -1 for the root and for nodes that no list holds.
        ranks: int64 ``[B, N]``, place among the siblings from 0; 0 for the root and for nodes that no list holds.
        malformed: bool ``[B]``, requests whose links are no tree; their other entries mean nothing.
    """

    parents: torch.Tensor
    ranks: torch.Tensor
    malformed: torch.Tensor


def _rounds(nodes: int) -> int:
    """Pointer doublings that reach the start of any list of ``nodes`` entries: ceil(log2 N)."""
    return max(nodes - 1, 0).bit_length()


def _inverse(links: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Who points at each node ([B, N] int64, -1 for nobody) and how many do."""
    batch, nodes = links.shape
    # column N takes what points nowhere, or where there is no node
    target = torch.where((links > 0) & (links < nodes), links, nodes).long()
    source = links.new_full((batch, nodes + 1), -1, dtype=torch.int64)
    source.scatter_(1, target, torch.arange(nodes, device=links.device).expand(batch, nodes))
    count = links.new_zeros(batch, nodes + 1, dtype=torch.int64).scatter_add_(1, target, torch.ones_like(target))
    return source[:, :nodes], count[:, :nodes]


def sibling_lists(first_child: torch.Tensor, next_sibling: torch.Tensor) -> SiblingLists:
    """Read child and sibling links, ``[B, N]`` integers each, -1 where a list ends.

    Links are a tree if each is -1 or in ``[1, N)``, no node is linked twice, none leads in a circle, and the root has
    no sibling. Nodes that no list holds are allowed; they are padding.
    """
    nodes = first_child.shape[1]
    parent_of_first, heads = _inverse(first_child)
    previous, tails = _inverse(next_sibling)
    malformed = ((heads + tails) > 1).any(1)
    for links in (first_child, next_sibling):
        malformed |= ((links != -1) & ((links < 1) | (links >= nodes))).any(1)
    if nodes:
        malformed |= next_sibling[:, 0] != -1
    own = torch.arange(nodes, device=first_child.device).expand_as(previous)

    head, ranks = torch.where(previous < 0, own, previous), (previous >= 0).long()
    for _ in range(_rounds(nodes)):
        ranks = ranks + ranks.gather(1, head)
        head = head.gather(1, head)
    malformed |= (previous.gather(1, head) >= 0).any(1)  # still not at the start of a list: a ring of siblings
    parents = parent_of_first.gather(1, head)

    top = torch.where(parents < 0, own, parents)
    for _ in range(_rounds(nodes)):
        top = top.gather(1, top)
    malformed |= (parents.gather(1, top) >= 0).any(1)  # a node among its own ancestors
    return SiblingLists(parents, ranks, malformed)


def refuse_malformed_links(
    op: str,
    names: tuple[str, str],
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    malformed: torch.Tensor,
) -> None:
    """ValueError for the first malformed request, on the CPU; elsewhere nothing, for it would wait for the device."""
    if malformed.device.type == "cpu" and bool(malformed.any()):
        b = int(malformed.nonzero()[0])
        constraint = (
            f"the links of a tree together with {names[1]}: -1 or in [1, {first_child.shape[1]}), "
            "no node linked twice, no circle, no sibling of the root"
        )
        refuse(op, names[0], constraint, f"{first_child[b].tolist()} and {next_sibling[b].tolist()} in row {b}")


def parents_from_links(first_child: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """Parents of the nodes of SGLang's and TensorRT-LLM's child and sibling lists.

    Args:
        first_child: int32 or int64 ``[B, N]``, -1 for a leaf (SGLang's ``retrive_next_token``).
        next_sibling: the same shape, -1 for the last sibling (SGLang's ``retrive_next_sibling``).

    Returns:
        int32 ``[B, N]``, -1 for the root and for nodes that no list holds. :func:`cerberus_kernels.verify_tree` takes
        it if parents have lower numbers than their children and the nodes that no list holds come last, past
        ``num_nodes``.

    Raises:
        ValueError: wrong dtype or shape, or, on the CPU, links that are no tree. Elsewhere a malformed request's
            nodes all get -1.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat.links import parents_from_links
        >>> parents_from_links(torch.tensor([[1, 3, 4, -1, -1]]), torch.tensor([[-1, 2, -1, -1, -1]])).tolist()
        [[-1, 0, 0, 1, 2]]
    """
    op = "parents_from_links"
    check(op, "first_child", first_child, ndim=2, dtypes=INTEGERS)
    shape, device = first_child.shape, first_child.device
    check(op, "next_sibling", next_sibling, dtypes=INTEGERS, shape=shape, device=device)
    lists = sibling_lists(first_child, next_sibling)
    refuse_malformed_links(op, ("first_child", "next_sibling"), first_child, next_sibling, lists.malformed)
    return torch.where(lists.malformed.unsqueeze(1), -1, lists.parents).to(torch.int32)


def links_from_parents(
    parents: torch.Tensor,
    *,
    num_nodes: torch.Tensor | None = None,
    dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Child and sibling lists of SGLang and TensorRT-LLM from parents; siblings stand in the order of their numbers.

    Args:
        parents: int32 ``[B, N]``: -1 for the root, else in ``[0, node)``.
        num_nodes: int32 ``[B]``, nodes in use, the rest is padding and gets -1; None is N for all.
        dtype: of the results, int64 for SGLang and int32 for TensorRT-LLM.

    Returns:
        ``(first_child, next_sibling)``, ``[B, N]`` each, -1 where there is none.

    Raises:
        ValueError: wrong dtype or shape, or, on the CPU, malformed parents. Elsewhere a parent outside ``[0, node)``
            leaves its node in no list.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat.links import links_from_parents
        >>> [links.tolist() for links in links_from_parents(torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32))]
        [[[1, 3, 4, -1, -1]], [[-1, 2, -1, -1, -1]]]
    """
    op = "links_from_parents"
    check(op, "parents", parents, ndim=2, dtypes=(torch.int32,))
    if num_nodes is not None:
        check(op, "num_nodes", num_nodes, dtypes=(torch.int32,), shape=parents.shape[:1], device=parents.device)
    if parents.device.type == "cpu":
        check_parents(op, parents, num_nodes)
    own = torch.arange(parents.shape[1], device=parents.device)
    in_use = (parents >= 0) & (parents < own)
    if num_nodes is not None:
        in_use &= own < num_nodes.unsqueeze(1)
    return _links(parents, in_use, dtype)


def _links(parents: torch.Tensor, in_use: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling [B, N] of each node, from parents [B, N] and which of them count."""
    batch, nodes = parents.shape
    own = torch.arange(nodes, device=parents.device)
    key = torch.where(in_use, parents, nodes).long()
    first_child = key.new_full((batch, nodes + 1), nodes).scatter_reduce_(1, key, own.expand_as(key), "amin")[:, :nodes]
    later_sibling = (key.unsqueeze(2) == key.unsqueeze(1)) & in_use.unsqueeze(2) & (own > own.unsqueeze(1))  # [B, N, N]
    candidates = torch.where(later_sibling, own, nodes)
    next_sibling = candidates.amin(2) if nodes else key
    return tuple(torch.where(links == nodes, -1, links).to(dtype) for links in (first_child, next_sibling))  # type: ignore[return-value]


def parents_from_paths(paths: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents from TensorRT-LLM's matrix of paths.

    Args:
        paths: int32 or int64 ``[B, P, L]``: node numbers from the root (0) down, then -1; a row of -1 is no path.
        num_nodes: N, columns of the result.

    Returns:
        ``(parents, num_nodes)`` for :func:`cerberus_kernels.verify_tree`: int32 ``[B, N]``, and int32 ``[B]``, the
        nodes in use. Entries of ``parents`` past those are -1.

    Raises:
        ValueError: wrong dtype or shape, or, on the CPU, paths that are no tree with parents before their children and
            no number left out. Elsewhere a request with such paths becomes the root alone.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat.links import parents_from_paths
        >>> parents, num_nodes = parents_from_paths(torch.tensor([[[0, 1, 3], [0, 2, -1]]]), 6)
        >>> parents.tolist(), num_nodes.tolist()
        ([[-1, 0, 0, 1, -1, -1]], [4])
    """
    op = "parents_from_paths"
    check(op, "paths", paths, ndim=3, dtypes=INTEGERS)
    if num_nodes < 1:
        refuse(op, "num_nodes", ">= 1", num_nodes)
    batch = paths.shape[0]
    paths = paths.long()
    node, parent = paths[:, :, 1:].flatten(1), paths[:, :, :-1].flatten(1)
    malformed = ((paths < -1) | (paths >= num_nodes)).flatten(1).any(1)
    malformed |= ((node >= 0) & ((parent < 0) | (parent >= node))).any(1)
    malformed |= (paths[:, :, 0] > 0).any(1)
    target = torch.where((node >= 0) & (node < num_nodes), node, num_nodes)
    lowest = paths.new_full((batch, num_nodes + 1), num_nodes).scatter_reduce_(1, target, parent, "amin")[:, :num_nodes]
    highest = paths.new_full((batch, num_nodes + 1), -1).scatter_reduce_(1, target, parent, "amax")[:, :num_nodes]
    used = lowest < num_nodes
    malformed |= (used & (lowest != highest)).any(1)
    count = used.sum(1)
    malformed |= (used[:, 1:] != (torch.arange(1, num_nodes, device=paths.device) <= count.unsqueeze(1))).any(1)
    if paths.device.type == "cpu" and bool(malformed.any()):
        b = int(malformed.nonzero()[0])
        constraint = (
            f"paths of one tree: numbers from 0 (the root) in [0, {num_nodes}), then -1, each node below one parent "
            "of a lower number, no number left out"
        )
        refuse(op, "paths", constraint, f"{paths[b].tolist()} in row {b}")
    used &= ~malformed.unsqueeze(1)
    parents = torch.where(used, highest, -1).to(torch.int32)
    return parents, torch.where(malformed, 1, count + 1).to(torch.int32)


class SelectedTree(NamedTuple):
    """The tree that EAGLE's drafting selected, as its engines hand it over.

    Attributes:
        first_child: int64 ``[B, N]``, -1 for a leaf.
        next_sibling: int64 ``[B, N]``, -1 for the last of its siblings.
        visible: bool ``[B, N, N]``, whether node i sees node j: itself and its ancestors.
        depths: int64 ``[B, N]``, 0 for the root.
    """

    first_child: torch.Tensor
    next_sibling: torch.Tensor
    visible: torch.Tensor
    depths: torch.Tensor


def selected_tree(
    op: str, parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int, depth: int, num_nodes: int
) -> SelectedTree:
    """The tree of ``num_nodes`` nodes behind ``selected_index`` [B, N - 1].

    Candidate c of EAGLE's drafting is a child of candidate ``parent_list[c // topk]``, and of the root if
    ``c // topk == 0``; node i + 1 is the candidate ``selected_index[i]``. Not on the CPU, where it is refused, a node
    whose parent was not selected, or not before it, gets no link; it sees itself and the root, at depth 1.
    """
    check(op, "selected_index", selected_index, ndim=2, dtypes=INTEGERS)
    check(op, "selected_index", selected_index, shape=(None, num_nodes - 1))
    if topk < 1 or depth < 1:
        refuse(op, "topk and depth", ">= 1", f"{topk} and {depth}")
    batch, device = selected_index.shape[0], selected_index.device
    # with one level of drafts nothing looks up a parent, and engines pass an empty list of any dtype
    rows = topk * (depth - 1) + 1
    if depth > 1:
        check(op, "parent_list", parent_list, dtypes=INTEGERS, device=device)
        check(op, "parent_list", parent_list, shape=(batch, rows))
        table = parent_list.long()
    else:
        table = selected_index.new_full((batch, 1), -1, dtype=torch.int64)
    selected = selected_index.long()
    row = torch.div(selected, topk, rounding_mode="floor")
    wanted = table.gather(1, row.clamp(0, rows - 1))
    found = (selected.unsqueeze(1) == wanted.unsqueeze(2)) & (wanted.unsqueeze(2) >= 0)  # [B, node, parent]
    place = torch.where(found, torch.arange(1, num_nodes, device=device), num_nodes)
    parents = torch.where(row == 0, 0, place.amin(2) if num_nodes > 1 else row)
    parents = torch.nn.functional.pad(parents, (1, 0), value=-1)
    own = torch.arange(num_nodes, device=device)
    in_range = torch.nn.functional.pad((selected >= 0) & (row < rows), (1, 0), value=True)
    in_use = in_range & (parents >= 0) & (parents < own)
    orphan = ~in_use[:, 1:]
    if device.type == "cpu" and bool(orphan.any()):
        b, i = orphan.nonzero()[0].tolist()
        constraint = f"in [0, {rows * topk}) with the parent of every candidate before it, as parent_list names it"
        refuse(op, "selected_index", constraint, f"{selected[b].tolist()} in row {b} (entry {i} has no parent)")

    first_child, next_sibling = _links(parents, in_use, torch.int64)
    up = torch.where(in_use, parents, 0)
    visible = (own == own.unsqueeze(1)).expand(batch, num_nodes, num_nodes)
    for _ in range(_rounds(num_nodes)):
        visible = visible | visible.gather(1, up.unsqueeze(2).expand_as(visible))
        up = up.gather(1, up)
    return SelectedTree(first_child, next_sibling, visible, visible.sum(2) - 1)
