"""tree_mask and unpack_mask: what a node of a draft tree may see, as bits."""

from __future__ import annotations

import torch

from ... import tree
from ..._checks import check_tensor, refuse
from ..._dispatch import REFUSED, LazyTriton, Operator
from . import native, reference


def _fake(parents: torch.Tensor, *, num_nodes: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    batch, nodes = parents.shape
    return parents.new_empty(batch, nodes, tree.mask_words(nodes))


_operator = Operator(
    "tree_mask",
    '(Tensor parents, *, Tensor? num_nodes=None, str backend="auto") -> Tensor',
    {"reference": reference.tree_mask, "native": native.tree_mask, "triton": LazyTriton("tree_mask")},
    _fake,
)


def tree_mask(parents: torch.Tensor, *, num_nodes: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """Ancestor bits of every node of a draft tree.

    Bit ``j % 32`` of word ``j // 32`` in row ``i`` is set iff node ``j`` is node ``i`` or one of its ancestors, the
    layout of XQA's and TensorRT-LLM's packed masks. The committed prefix, which every node sees, is implicit.

    Args:
        parents: int32 ``[N]`` or ``[B, N]``; ``parents[0] = -1`` and ``0 <= parents[i] < i`` for every other node.
        num_nodes: int32 ``[B]``, nodes in use per row, each in ``[1, N]``; only with ``[B, N]`` parents. Entries of
            ``parents`` past it are not read, and their rows of the mask are zero.
        backend: ``"auto"``, ``"reference"``, ``"native"`` or ``"triton"``.

    Returns:
        int32 ``[N, W]`` or ``[B, N, W]`` with ``W = ceil(N / 32)``.

    Raises:
        ValueError: wrong dtype, shape or stride, or a malformed tree.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> ck.tree_mask(torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)).flatten().tolist()
        [1, 3, 5, 11, 21]
    """
    if num_nodes is None or getattr(parents, "ndim", 0) == 2:
        mask = _operator.attempt(parents, num_nodes, backend=backend)
        if mask is not REFUSED:
            return mask
    check_tensor("tree_mask", "parents", parents, ndim=(1, 2), dtypes=(torch.int32,))
    rows = parents if parents.ndim == 2 else parents.unsqueeze(0)
    if num_nodes is not None:
        if parents.ndim == 1:
            refuse("tree_mask", "num_nodes", "None for one tree [N]", f"shape {list(num_nodes.shape)}")
        check_tensor(
            "tree_mask", "num_nodes", num_nodes, dtypes=(torch.int32,), shape=[rows.shape[0]], device=parents.device
        )
    mask = _operator.call(rows, num_nodes=num_nodes, backend=backend)
    return mask if parents.ndim == 2 else mask.squeeze(0)


def unpack_mask(mask: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Bits to booleans.

    Args:
        mask: int32 ``[.., N, W]`` from :func:`tree_mask`.
        num_nodes: columns to unpack, at most ``32 * W``.

    Returns:
        bool ``[.., N, num_nodes]``.

    Raises:
        ValueError: wrong dtype, or more columns than the mask has bits.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> ck.unpack_mask(torch.tensor([[1], [3]], dtype=torch.int32), 2).tolist()
        [[True, False], [True, True]]
    """
    check_tensor("unpack_mask", "mask", mask, dtypes=(torch.int32,), last_contiguous=False)
    if mask.ndim < 2:
        refuse("unpack_mask", "mask", "at least 2-dimensional", f"shape {list(mask.shape)}")
    if not 0 <= num_nodes <= mask.shape[-1] * tree.WORD_BITS:
        refuse("unpack_mask", "num_nodes", f"in [0, {mask.shape[-1] * tree.WORD_BITS}]", num_nodes)
    return tree.unpack_mask(mask, num_nodes)
