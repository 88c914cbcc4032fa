"""commit_kv: after verification, the accepted nodes' keys and values become part of the prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._checks import check_tensor, refuse
from ..._dispatch import REFUSED, LazyTriton, Operator
from . import native, reference

_OP = "commit_kv"
Caches = torch.Tensor | Sequence[torch.Tensor]

_operator = Operator(
    _OP,
    "(Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor path, Tensor num_accepted, Tensor prefix_lens, *, "
    'Tensor? block_table=None, str backend="auto") -> Tensor',
    {"reference": reference.commit_kv, "native": native.commit_kv, "triton": LazyTriton("commit_kv")},
    lambda k_caches, v_caches, path, num_accepted, prefix_lens, **kwargs: torch.empty_like(prefix_lens),
)


def commit_kv(
    k_caches: Caches,
    v_caches: Caches,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Move the accepted nodes' keys and values behind the committed prefix, in every layer, in place.

    In each cache, slot ``prefix_lens[b] + path[b, j]`` goes to slot ``prefix_lens[b] + j`` for
    ``j = 1..num_accepted[b]``; the root is in place already. Takes the outputs of ``verify_tree`` as they are.
    No other slot changes. Slots at and past the new length hold leftovers of rejected nodes.

    Args:
        k_caches: one tensor ``[layers, ..]`` or a list with a tensor per layer; a layer's cache is
            ``[B, S_max, Hkv, Dh]``, or with ``block_table`` paged ``[blocks, block_size, Hkv, Dh]``. Any dtype, any
            strides with a contiguous last dimension; changed in place.
        v_caches: as ``k_caches``.
        path: int32 ``[B, D + 1]``, node ids from the root (0) downwards, ascending; entries past ``num_accepted``
            (-1 from ``verify_tree``) are not read.
        num_accepted: int32 ``[B]``, accepted nodes below the root, each in ``[0, D]``.
        prefix_lens: int32 ``[B]``, committed length before this step, the slot of the root.
        block_table: int32 ``[B, max_blocks]``, block ids of each request in order.
        backend: ``"auto"``, ``"reference"``, ``"native"`` or ``"triton"``.

    Returns:
        int32 ``[B]``, ``prefix_lens + num_accepted + 1``: the committed length with the root and the accepted nodes.

    Raises:
        ValueError: wrong dtype, shape, stride or device; on CPU also counts, node ids or block ids out of range.
            Nothing has been written then.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> cache = torch.arange(8.0).reshape(1, 1, 8, 1, 1)  # one layer, one request, 8 slots
        >>> path = torch.tensor([[0, 2, 4, -1]], dtype=torch.int32)
        >>> two, one = torch.tensor([2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        >>> ck.commit_kv(cache, cache.clone(), path, two, one).tolist(), cache.flatten().tolist()
        ([4], [0.0, 1.0, 3.0, 5.0, 4.0, 5.0, 6.0, 7.0])
    """
    plain = _as_layers(k_caches, v_caches)
    if plain:
        new_lens = _operator.attempt(*plain, path, num_accepted, prefix_lens, block_table=block_table, backend=backend)
        if new_lens is not REFUSED:
            return new_lens
    check_tensor(_OP, "path", path, ndim=2, dtypes=(torch.int32,))
    batch = path.shape[0]
    if path.shape[1] < 1:
        refuse(_OP, "path", "of shape [any, at least 1]", list(path.shape))
    for name, value in (("num_accepted", num_accepted), ("prefix_lens", prefix_lens)):
        check_tensor(_OP, name, value, dtypes=(torch.int32,), shape=[batch], device=path.device)
    if block_table is not None:
        check_tensor(_OP, "block_table", block_table, dtypes=(torch.int32,), shape=[batch, None], device=path.device)
    keys = _check_caches("k_caches", k_caches)
    values = _check_caches("v_caches", v_caches)
    if len(keys) != len(values):
        refuse(_OP, "v_caches", f"of as many layers as k_caches ({len(keys)})", len(values))
    rows, slots = keys[0].shape[-4:-2]
    for name, caches in (("k_caches", keys), ("v_caches", values)):
        for cache in caches:
            want = [*keys[0].shape[:-4], rows if block_table is not None else batch, slots, None, None]
            check_tensor(_OP, name, cache, shape=want, device=path.device)
    return _operator.call(keys, values, path, num_accepted, prefix_lens, block_table=block_table, backend=backend)


def _as_layers(k_caches: Caches, v_caches: Caches) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Both caches as lists, where they are of one kind that the native function checks by itself, else None."""
    if isinstance(k_caches, torch.Tensor) and isinstance(v_caches, torch.Tensor):
        keys, values = k_caches.shape, v_caches.shape
        return ([k_caches], [v_caches]) if len(keys) == 5 and keys[:3] == values[:3] else None
    if type(k_caches) is not list or type(v_caches) is not list or len(k_caches) != len(v_caches):
        return None
    fits = all(type(cache) is torch.Tensor and cache.ndim == 4 and cache.is_cpu for cache in k_caches + v_caches)
    return (k_caches, v_caches) if fits else None


def _check_caches(name: str, caches: Caches) -> list[torch.Tensor]:
    """The caches as a list: of the one stacked tensor, or of the layers' tensors."""
    if isinstance(caches, torch.Tensor):
        check_tensor(_OP, name, caches, ndim=5)
        return [caches]
    if not isinstance(caches, (list, tuple)) or not caches:
        refuse(_OP, name, "a tensor or a non-empty list of tensors", caches)
    for cache in caches:
        check_tensor(_OP, name, cache, ndim=4)
    return list(caches)
