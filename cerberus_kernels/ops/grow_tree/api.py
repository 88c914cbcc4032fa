"""grow_tree: a draft tree for this step, from what the heads hold likely now."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..._checks import check_integer, check_tensor, refuse
from ..._dispatch import REFUSED, Operator
from . import native, reference

_OP = "grow_tree"


class GrownTree(NamedTuple):
    """A draft tree for every request, its nodes best first.

    Attributes:
        parents: int32 ``[B, N]``, -1 for the root and for entries that hold no node.
        slots: int32 ``[B, N, 2]``, head and rank of each node, -1 for the root and for entries that hold no node.
        score: fp32 ``[B, N]``, sum of log-probabilities on the path; 0 for the root, -inf where there is no node.
        num_nodes: int32 ``[B]``, nodes to use, root included.
        draft_tokens: int32 ``[B, N]``, token of every node, -1 where there is none; None without ``tokens``.
    """

    parents: torch.Tensor
    slots: torch.Tensor
    score: torch.Tensor
    num_nodes: torch.Tensor
    draft_tokens: torch.Tensor | None


def _fake(
    log_probs: torch.Tensor,
    budget: int,
    tokens: torch.Tensor | None = None,
    roots: torch.Tensor | None = None,
    costs: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    score = log_probs.new_empty((log_probs.shape[0], budget))
    parents = torch.empty_like(score, dtype=torch.int32)
    slots = parents.new_empty((*parents.shape, 2))
    drafts = torch.empty_like(parents) if tokens is not None else parents.new_empty((parents.shape[0], 0))
    return parents, slots, score, parents.new_empty(parents.shape[:1]), drafts


_operator = Operator(
    _OP,
    "(Tensor log_probs, SymInt budget, Tensor? tokens=None, Tensor? roots=None, Tensor? costs=None, *, "
    'str backend="auto") -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    {"reference": reference.grow_tree, "native": native.grow_tree},
    _fake,
)


def grow_tree(
    log_probs: torch.Tensor,
    budget: int,
    *,
    tokens: torch.Tensor | None = None,
    roots: torch.Tensor | None = None,
    costs: torch.Tensor | None = None,
    backend: str = "auto",
) -> GrownTree:
    """The likeliest draft tree of a number of nodes, and how many of them to use.

    Every candidate of head i may follow every candidate of head i - 1, so a node is a path of ranks, and its score the
    sum of the heads' log-probabilities along it. The nodes come best first: the first n are the best tree of n nodes,
    for every n, and parents come before their children. Nodes of equal score come the shallower first, then that of
    the earlier parent, then the better rank. Not differentiable.

    Args:
        log_probs: fp32 ``[B, K, k]``, of each head's candidates, best first, as :func:`head_topk` gives them. Values
            above 0 count as 0; a head's candidates end at its first NaN or -inf.
        budget: N, nodes of the largest tree, root included, at least 1.
        tokens: int32 ``[B, K, k]``, the candidates' tokens, to get every node's token; with ``roots``.
        roots: int32 ``[B]``, newest token of every request.
        costs: fp32 ``[N]``, what a step with n nodes costs in any unit at n - 1; then ``num_nodes`` is the n with the
            most expected tokens for its cost, (1 + sum of exp(score) of the drafts) / costs, the least of several.
            Without it, all nodes there are.
        backend: ``"auto"``, ``"reference"`` or ``"native"``.

    Returns:
        A :class:`GrownTree`; the arguments of :func:`tree_mask` and :func:`verify_tree`.

    Raises:
        ValueError: wrong dtype, shape, stride or device, a budget below 1, tokens without roots; on CPU also
            candidates that are not sorted, or costs that are not above 0.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> log_probs = torch.tensor([[[0.6, 0.3], [0.5, 0.1]]]).log()
        >>> tree = ck.grow_tree(log_probs, 4)
        >>> tree.parents.tolist(), tree.slots[0, 1:].tolist()
        ([[-1, 0, 0, 1]], [[0, 0], [0, 1], [1, 0]])
        >>> ck.grow_tree(log_probs, 4, costs=torch.tensor([1.0, 1.2, 1.5, 1.9])).num_nodes.tolist()
        [2]
    """
    if type(budget) is int and budget > 0:
        found = _operator.attempt(log_probs, budget, tokens, roots, costs, backend=backend)
        if found is not REFUSED:
            return _named(found, tokens is not None)
    check_tensor(_OP, "log_probs", log_probs, ndim=3, dtypes=(torch.float32,))
    check_integer(_OP, "budget", budget)
    if budget < 1:
        refuse(_OP, "budget", "at least 1", budget)
    device = log_probs.device
    if (tokens is None) != (roots is None):
        refuse(_OP, "roots", "given with tokens, and only then", "roots" if tokens is None else "tokens alone")
    if tokens is not None:
        check_tensor(_OP, "tokens", tokens, dtypes=(torch.int32,), shape=log_probs.shape, device=device)
        check_tensor(_OP, "roots", roots, dtypes=(torch.int32,), shape=[log_probs.shape[0]], device=device)
    if costs is not None:
        check_tensor(_OP, "costs", costs, dtypes=(torch.float32,), shape=[budget], device=device)
    found = _operator.call(log_probs, budget, tokens, roots, costs, backend=backend)
    return _named(found, tokens is not None)


def _named(found: tuple[torch.Tensor, ...], with_tokens: bool) -> GrownTree:
    parents, slots, score, num_nodes, drafts = found
    return GrownTree(parents, slots, score, num_nodes, drafts if with_tokens else None)
