"""decoder_layer: a Llama layer over draft trees in one call."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..._checks import FLOATS, check_number, check_tensor, refuse
from ..._dispatch import REFUSED, Operator
from ...tree import mask_words
from ..packed_linear.api import PackedWeight
from . import native, reference

_OP = "decoder_layer"


class DecoderWeights(NamedTuple):
    """Weights of one layer, all of one dtype.

    Attributes:
        qkv: queries, keys and values in one: ``[(Hq + 2 * Hkv) * Dh, H]`` before packing.
        output: ``[H, Hq * Dh]``.
        gate_up: gate and up in one: ``[2 * I, H]``.
        down: ``[H, I]``.
        input_norm: ``[H]``, of the normalisation before the attention.
        post_norm: ``[H]``, of the one after it.
        input_eps: >= 0, of the first normalisation.
        post_eps: >= 0, of the second.
        qkv_bias: a bias for each product, or None.
        output_bias: as above.
        gate_up_bias: as above.
        down_bias: as above.
    """

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    input_eps: float
    post_eps: float
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


_operator = Operator(
    _OP,
    "(Tensor hidden, Tensor qkv, Tensor output, Tensor gate_up, Tensor down, Tensor? qkv_bias, Tensor? output_bias, "
    "Tensor? gate_up_bias, Tensor? down_bias, Tensor input_norm, Tensor post_norm, float input_eps, float post_eps, "
    "int q_heads, int inner, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor mask, "
    'Tensor prefix_lens, Tensor? block_table, float scale, *, str backend="auto") -> Tensor',
    {"reference": reference.decoder_layer, "native": native.decoder_layer},
    lambda hidden, *rest, **kwargs: torch.empty_like(hidden, memory_format=torch.contiguous_format),
)


def decoder_layer(
    hidden: torch.Tensor,
    weights: DecoderWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    scale: float | None = None,
    block_table: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """A decoder layer of the Llama family over the nodes of draft trees: everything between two residual streams.

    A pass of a small model over one token spends a third of its time on the way between operators. Here the layer's
    four products, rotary embedding, cache writes and attention are one call. The result is that of
    :func:`packed_linear` and :func:`tree_attention` in turn, with the roundings of transformers' Llama. Not
    differentiable.

    Args:
        hidden: fp32, bf16 or fp16 ``[B, N, H]``, contiguous; the residual stream at the tree's nodes.
        weights: the layer's weights, of ``hidden``'s dtype.
        cos: ``[B, N, Dh]`` of the same dtype, contiguous: cosines of each node's position.
        sin: as ``cos``.
        k_cache: ``[B, S_max, Hkv, Dh]``, or paged with ``block_table``, as :func:`tree_attention` takes it. The nodes'
            keys are written into the slots ``prefix_lens[b] + j``.
        v_cache: as ``k_cache``.
        mask: int32 ``[N, W]`` or ``[B, N, W]`` from :func:`tree_mask`.
        prefix_lens: int32 ``[B]``, committed length of each request.
        scale: of the scores, ``Dh ** -0.5`` by default.
        block_table: int32 ``[B, max_blocks]``.
        backend: ``"auto"``, ``"reference"`` or ``"native"``.

    Returns:
        ``[B, N, H]``, a new tensor.

    Raises:
        ValueError: wrong dtype, shape, stride or device; on CPU also lengths or block ids outside the caches. The
            caches are as before then.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> pack = lambda *shape: ck.pack_linear(torch.zeros(shape))
        >>> ones = torch.ones(8)
        >>> weights = ck.DecoderWeights(pack(24, 8), pack(8, 8), pack(32, 8), pack(8, 16), ones, ones, 1e-6, 1e-6)
        >>> hidden, cache, angles = torch.ones(1, 1, 8), torch.ones(1, 4, 1, 8), torch.zeros(1, 1, 8)
        >>> mask, lengths = torch.ones(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        >>> out = ck.decoder_layer(hidden, weights, angles, angles, cache, cache.clone(), mask, lengths)
        >>> torch.equal(out, hidden), cache[0, :, 0, 0].tolist()
        (True, [1.0, 1.0, 0.0, 1.0])
    """
    if type(weights) is not DecoderWeights or not all(type(weight) is PackedWeight for weight in weights[:4]):
        refuse(_OP, "weights", "a DecoderWeights of packed weights", type(weights).__name__)
    panels = [weight.panels for weight in weights[:4]]
    shapes = _shapes(weights, k_cache)
    if shapes is not None and (scale is None or type(scale) is float):
        q_heads, inner, head_dim = shapes
        inputs = (hidden, *panels, *weights[8:], *weights[4:8], q_heads, inner, cos, sin, k_cache, v_cache, mask)
        inputs = (*inputs, prefix_lens, block_table, head_dim**-0.5 if scale is None else scale)
        result = _operator.attempt(*inputs, backend=backend)
        if result is not REFUSED:
            return result
    _check(hidden, weights, cos, sin, k_cache, v_cache, mask, prefix_lens, block_table)
    scale = k_cache.shape[3] ** -0.5 if scale is None else scale
    check_number(_OP, "scale", scale)
    if not math.isfinite(scale):
        refuse(_OP, "scale", "finite", scale)
    q_heads, inner, _ = _shapes(weights, k_cache) or (0, 0, 0)
    inputs = (hidden, *panels, *weights[8:], *weights[4:8], q_heads, inner, cos, sin, k_cache, v_cache, mask)
    return _operator.call(*inputs, prefix_lens, block_table, scale, backend=backend)


def _shapes(weights: DecoderWeights, k_cache: Any) -> tuple[int, int, int] | None:
    """Query heads, inner width and head size, where the weights fit each other and the cache; else None."""
    if not isinstance(k_cache, torch.Tensor) or k_cache.ndim != 4:
        return None
    kv_heads, head_dim = k_cache.shape[2:]
    inner, width = weights.down.in_features, weights.qkv.in_features
    q_heads = weights.output.in_features // max(head_dim, 1)
    fits = (
        weights.qkv.out_features == (q_heads + 2 * kv_heads) * head_dim
        and weights.output.in_features == q_heads * head_dim
        and weights.gate_up.out_features == 2 * inner
        and weights.output.out_features == weights.gate_up.in_features == weights.down.out_features == width
    )
    return (q_heads, inner, head_dim) if fits else None


def _check(
    hidden: torch.Tensor,
    weights: DecoderWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor | None,
) -> None:
    check_tensor(_OP, "hidden", hidden, ndim=3, dtypes=FLOATS)
    batch, nodes, width = hidden.shape
    same: dict[str, Any] = {"dtypes": (hidden.dtype,), "device": hidden.device}
    if not hidden.is_contiguous():
        refuse(_OP, "hidden", "contiguous", f"strides {list(hidden.stride())}")
    rows = batch if block_table is None else None
    check_tensor(_OP, "k_cache", k_cache, ndim=4, shape=[rows, None, None, None], **same)
    check_tensor(_OP, "v_cache", v_cache, ndim=4, shape=k_cache.shape, **same)
    kv_heads, head_dim = k_cache.shape[2:]
    if head_dim % 8 or not 8 <= head_dim <= 256:
        refuse(_OP, "k_cache", "of a head size that is a multiple of 8 in [8, 256]", head_dim)
    shapes = _shapes(weights, k_cache)
    if shapes is None or weights.qkv.in_features != width:
        found = {name: list(weight[1:]) for name, weight in zip(DecoderWeights._fields, weights[:4], strict=False)}
        refuse(_OP, "weights", f"of products that fit hidden's {width} and k_cache's {kv_heads} x {head_dim}", found)
    if kv_heads == 0 or shapes[0] % kv_heads:
        refuse(_OP, "weights", f"of a query head count that is a multiple of k_cache's {kv_heads}", shapes[0])
    for name, weight in zip(DecoderWeights._fields, weights[:4], strict=False):
        check_tensor(_OP, name, weight.panels, ndim=3, **same)
        bias = getattr(weights, f"{name}_bias")
        if bias is not None:
            check_tensor(_OP, f"{name}_bias", bias, shape=[weight.out_features], **same)
    for name in ("input", "post"):
        check_tensor(_OP, f"{name}_norm", getattr(weights, f"{name}_norm"), shape=[width], **same)
        eps = getattr(weights, f"{name}_eps")
        check_number(_OP, f"{name}_eps", eps)
        if not eps >= 0:
            refuse(_OP, f"{name}_eps", ">= 0", eps)
    for name, angles in (("cos", cos), ("sin", sin)):
        check_tensor(_OP, name, angles, shape=[batch, nodes, head_dim], **same)
        if not angles.is_contiguous():
            refuse(_OP, name, "contiguous", f"strides {list(angles.stride())}")
    check_tensor(_OP, "mask", mask, ndim=(2, 3), dtypes=(torch.int32,), device=hidden.device)
    shape = [nodes, mask_words(nodes)]
    check_tensor(_OP, "mask", mask, shape=shape if mask.ndim == 2 else [batch, *shape])
    check_tensor(_OP, "prefix_lens", prefix_lens, dtypes=(torch.int32,), shape=[batch], device=hidden.device)
    if block_table is not None:
        check_tensor(_OP, "block_table", block_table, dtypes=(torch.int32,), shape=[batch, None], device=hidden.device)
