"""tree_attention: all nodes of a draft tree in one attention call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..._checks import FLOATS, check_integer, check_number, check_tensor, refuse
from ..._dispatch import LazyTriton, Operator
from ...tree import mask_words
from . import native, reference

_OP = "tree_attention"
_ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor mask, Tensor prefix_lens, *, Tensor? block_table=None, "
    "Tensor? num_nodes=None, float scale=1.0, float softcap=0.0, int window=0, "
)
_SCALE_TYPES = (float, type(None))
_IMPLEMENTATIONS: dict[str, Callable[..., None]] = {
    "reference": reference.tree_attention,
    "native": native.tree_attention,
    "triton": LazyTriton("tree_attention"),
}


def _empty_results(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _allocating(write: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def run(q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _empty_results(q)
        write(q, *args, out=out, lse=lse, **kwargs)
        return out, lse

    return run


_operator = Operator(
    _OP,
    f'({_ARGUMENTS}str backend="auto") -> (Tensor, Tensor)',
    {name: _allocating(write) for name, write in _IMPLEMENTATIONS.items()},
    lambda q, *args, **kwargs: _empty_results(q),
)
_operator_out = Operator(
    "tree_attention_out",
    f'({_ARGUMENTS}Tensor(a!) out, Tensor(b!) lse, str backend="auto") -> ()',
    dict(_IMPLEMENTATIONS),
    lambda *args, **kwargs: None,
)


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    num_nodes: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of every node of a draft tree over the committed prefix, its ancestors and itself.

    The tree's own keys and values already lie in the caches, node ``j`` of request ``b`` in slot
    ``prefix_lens[b] + j``. A chain mask and a prefix of 0 make it causal attention over a prompt. Sums are kept in
    fp32 for every dtype. Not differentiable.

    Slots at and past ``prefix_lens[b] + num_nodes[b]`` are never read. A slot that only some rows may not see must
    hold finite values.

    Args:
        q: fp32, bf16 or fp16 ``[B, N, Hq, Dh]``; ``Dh`` a multiple of 8, at most 256. Any strides with a contiguous
            last dimension, here and for every other tensor.
        k_cache: as ``q``'s dtype, contiguous ``[B, S_max, Hkv, Dh]``, or with ``block_table`` paged
            ``[blocks, block_size, Hkv, Dh]``; ``Hq`` is a multiple of ``Hkv``, and query head ``h`` reads head
            ``h // (Hq / Hkv)``.
        v_cache: as ``k_cache``.
        mask: int32 ``[N, W]`` or ``[B, N, W]`` with ``W = ceil(N / 32)``, from :func:`tree_mask`. Bits at and past
            ``num_nodes`` are ignored.
        prefix_lens: int32 ``[B]``, committed length of each request, 0 allowed.
        block_table: int32 ``[B, max_blocks]``, block ids of each request in order; entries past its length are not
            read.
        num_nodes: int32 ``[B]``, nodes in use per request, each in ``[0, N]``; all ``N`` if None.
        scale: factor on ``q · k``; ``Dh ** -0.5`` if None.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for none.
        window: a node at position ``p = S + depth`` sees only keys at positions greater than ``p - window``; a node's
            depth is the number of set bits of its mask row less one. None for no limit.
        return_lse: return the log-sum-exp of the scores too, so that partial attentions can be merged.
        backend: ``"auto"``, ``"reference"``, ``"native"`` or ``"triton"``.
        out: written and returned in place of a new tensor; as ``q``. With ``return_lse`` it may be the pair
            ``(out, lse)``.

    Returns:
        ``[B, N, Hq, Dh]`` of ``q``'s dtype, and with ``return_lse`` fp32 ``[B, N, Hq]``. Rows at and past
        ``num_nodes``, and rows that see no key, are zero with a log-sum-exp of -inf.

    Raises:
        ValueError: wrong dtype, shape, stride or device; on CPU also lengths or block ids outside the caches.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> tree = ck.Tree.from_choices([(0,), (1,)])
        >>> q, cache = torch.zeros(1, 3, 2, 8), torch.zeros(1, 6, 1, 8)
        >>> cache[0, :, 0] = torch.tensor([4.0, 8, 3, 9, 0, 0])[:, None]
        >>> out = ck.tree_attention(q, cache, cache, ck.tree_mask(tree.parents), torch.tensor([1], dtype=torch.int32))
        >>> out[0, :, 0, 0].round().tolist()
        [6.0, 5.0, 7.0]
    """
    inputs = (q, k_cache, v_cache, mask, prefix_lens)
    if type(scale) in _SCALE_TYPES and type(softcap) is float and not return_lse:
        choices = (block_table, num_nodes, scale, softcap, window)
        done = _attempt(inputs, out, choices, backend)
        if done is not None:
            return done
    check_tensor(_OP, "q", q, ndim=4, dtypes=FLOATS)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    check_number(_OP, "scale", scale)
    check_number(_OP, "softcap", softcap)
    if window is not None:
        check_integer(_OP, "window", window)
    if not math.isfinite(scale):
        refuse(_OP, "scale", "finite", scale)
    if not (softcap >= 0 and math.isfinite(softcap)):
        refuse(_OP, "softcap", "finite and >= 0", softcap)
    if window is not None and window < 1:
        refuse(_OP, "window", "None or >= 1", window)
    options: dict[str, Any] = {
        "block_table": block_table,
        "num_nodes": num_nodes,
        "scale": scale,
        "softcap": softcap,
        "window": window or 0,
        "backend": backend,
    }
    _check_inputs(*inputs, block_table, num_nodes)
    if out is None:
        result, lse = _operator.call(*inputs, **options)
    else:
        result, lse = _check_out(out, q, return_lse)
        _operator_out.call(*inputs, out=result, lse=lse, **options)
    return (result, lse) if return_lse else result


def _attempt(inputs: tuple[Any, ...], out: Any, choices: tuple[Any, ...], backend: str) -> torch.Tensor | None:
    """The call without its log-sum-exp, where the native function takes it as it is."""
    q = inputs[0]
    operator = _operator if out is None else _operator_out
    block_table, num_nodes, scale, softcap, window = choices
    if torch.compiler.is_compiling() or not operator.goes_native((*inputs, block_table, num_nodes), backend):
        return None
    if not (window is None or (type(window) is int and window > 0)):
        return None
    try:
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        elif type(out) is not torch.Tensor or not out.is_contiguous():
            return None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        native.run(*inputs, block_table, num_nodes, scale, softcap, window or 0, out, None)
    except Exception:
        return None
    return out


def _check_inputs(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    num_nodes: torch.Tensor | None,
) -> None:
    batch, nodes, q_heads, head_dim = q.shape
    if head_dim % 8 or not 8 <= head_dim <= 256:
        refuse(_OP, "q", "of a head size that is a multiple of 8 in [8, 256]", head_dim)
    rows = batch if block_table is None else None
    check_tensor(
        _OP, "k_cache", k_cache, ndim=4, dtypes=(q.dtype,), shape=[rows, None, None, head_dim], device=q.device
    )
    check_tensor(_OP, "v_cache", v_cache, ndim=4, dtypes=(q.dtype,), shape=k_cache.shape, device=q.device)
    kv_heads = k_cache.shape[2]
    if kv_heads == 0 or q_heads % kv_heads:
        refuse(_OP, "q", f"of a head count that is a multiple of k_cache's {kv_heads}", q_heads)
    check_tensor(_OP, "mask", mask, ndim=(2, 3), dtypes=(torch.int32,), device=q.device)
    shape = [nodes, mask_words(nodes)]
    check_tensor(_OP, "mask", mask, shape=shape if mask.ndim == 2 else [batch, *shape])
    check_tensor(_OP, "prefix_lens", prefix_lens, dtypes=(torch.int32,), shape=[batch], device=q.device)
    if block_table is not None:
        check_tensor(_OP, "block_table", block_table, dtypes=(torch.int32,), shape=[batch, None], device=q.device)
    if num_nodes is not None:
        check_tensor(_OP, "num_nodes", num_nodes, dtypes=(torch.int32,), shape=[batch], device=q.device)


def _check_out(out: object, q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    result, lse = out if isinstance(out, tuple) else (out, q.new_empty(q.shape[:3], dtype=torch.float32))
    if isinstance(out, tuple) and not return_lse:
        refuse(_OP, "out", "one tensor without return_lse", "a tuple")
    check_tensor(_OP, "out", result, dtypes=(q.dtype,), shape=q.shape, device=q.device)
    check_tensor(_OP, "out", lse, dtypes=(torch.float32,), shape=q.shape[:3], device=q.device)
    for tensor in (result, lse):
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            refuse(_OP, "out", "free of overlapping elements", f"strides {list(tensor.stride())}")
    return result, lse
