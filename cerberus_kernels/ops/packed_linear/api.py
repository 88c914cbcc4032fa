"""pack_linear and packed_linear: a linear layer whose cost hardly grows over the first rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._checks import FLOATS, check_number, check_tensor, refuse
from ..._dispatch import REFUSED, Operator
from . import native, reference


class PackedWeight(NamedTuple):
    """A linear layer's weight in the layout that :func:`packed_linear` reads; made by :func:`pack_linear`.

    Attributes:
        panels: ``[ceil(out_features / 48), ceil(in_features / 2), 96]``, the weight's values in another order.
        out_features: rows of the weight.
        in_features: columns of the weight.
    """

    panels: torch.Tensor
    out_features: int
    in_features: int


def _fake(
    x: torch.Tensor,
    panels: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *rest: Any,
    **keywords: Any,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype or x.dtype)


_operator = Operator(
    "packed_linear",
    "(Tensor x, Tensor panels, SymInt out_features, Tensor? bias=None, ScalarType? out_dtype=None, "
    'Tensor? norm_weight=None, float eps=1e-6, bool gated=False, Tensor? residual=None, *, str backend="auto") '
    "-> Tensor",
    {"reference": reference.packed_linear, "native": native.packed_linear},
    _fake,
)


def pack_linear(weight: torch.Tensor) -> PackedWeight:
    """Reorder a linear layer's weight for :func:`packed_linear`; exact, and done once per weight.

    Args:
        weight: fp32, bf16 or fp16 ``[out, in]``, any strides.

    Returns:
        The packed weight: a copy, padded to a multiple of 48 outputs and 2 inputs.

    Raises:
        ValueError: wrong dtype or shape.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> packed = ck.pack_linear(torch.eye(3))
        >>> tuple(packed.panels.shape), packed.out_features, packed.in_features
        ((1, 2, 96), 3, 3)
    """
    check_tensor("pack_linear", "weight", weight, ndim=2, dtypes=FLOATS, last_contiguous=False)
    if weight.numel() == 0:
        refuse("pack_linear", "weight", "non-empty", list(weight.shape))
    return PackedWeight(reference.pack(weight.detach()), *weight.shape)


def unpack_linear(weight: PackedWeight) -> torch.Tensor:
    """The ``[out, in]`` weight that :func:`pack_linear` was given, bit for bit.

    Args:
        weight: a packed weight.

    Returns:
        A new tensor ``[out_features, in_features]`` in the weight's dtype.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> ck.unpack_linear(ck.pack_linear(torch.tensor([[1.0, 2.0]]))).tolist()
        [[1.0, 2.0]]
    """
    return reference.unpack(*weight)


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``x @ weight.T + bias`` for few rows, accumulated in fp32, rounded once, with what surrounds it in a layer.

    A pass over a weight costs the reading of it; verifying a draft tree of T nodes should cost no more. This kernel
    reads the weight once for all rows. On the native backend a row's result does not depend on the other rows, on
    their number, or on the number of threads: a node of a tree gets the bits that it would get alone.
    For inference only: no gradient is defined.

    A transformer's layer surrounds its products with small steps that cost more in calls than in work. They can ride
    along: ``gated`` takes SiLU of a row's first half times its second half as x, ``norm_weight`` normalises x by its
    root mean square, ``residual`` is added to the product. Each step rounds to x's dtype where a Llama layer does.

    Args:
        x: fp32, bf16 or fp16 ``[.., in]``, or ``[.., 2 * in]`` if ``gated``; the last dimension contiguous.
        weight: from :func:`pack_linear`, of ``x``'s dtype and device.
        bias: ``[out]`` in the same dtype, added before the rounding.
        norm_weight: ``[in]`` in the same dtype: x becomes ``norm_weight * x / sqrt(mean(x ** 2) + eps)``. Not with
            ``gated``.
        eps: >= 0, of the normalisation.
        gated: whether x comes as gate and value side by side, ``silu(gate) * value``.
        residual: ``[.., out]`` in the same dtype, contiguous, added to the rounded product; not with ``out_dtype``.
        out_dtype: ``x``'s dtype (the default) or fp32, which keeps the accumulator unrounded.
        backend: ``"auto"``, ``"reference"`` or ``"native"``.

    Returns:
        ``[.., out]``, contiguous.

    Raises:
        ValueError: wrong dtype, shape, stride or device, or an ``x`` that asks for gradients.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> weight = ck.pack_linear(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> ck.packed_linear(torch.tensor([[1.0, 1.0]]), weight, bias=torch.tensor([0.5, 0.0])).tolist()
        [[3.5, 7.0]]
    """
    around = (norm_weight, eps, gated, residual)
    known = type(weight) is PackedWeight and type(gated) is bool
    if known and isinstance(x, torch.Tensor) and x.shape[-1:] == (weight.in_features * (1 + gated),):
        inputs = (x, weight.panels, weight.out_features, bias, out_dtype, *around)
        result = _operator.attempt(*inputs, backend=backend)
        if result is not REFUSED:
            return result
    _check(x, weight, bias, out_dtype, *around)
    return _operator.call(x, weight.panels, weight.out_features, bias, out_dtype, *around, backend=backend)


def _check(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    gated: bool,
    residual: torch.Tensor | None,
) -> None:
    op = "packed_linear"
    if not isinstance(weight, PackedWeight):
        refuse(op, "weight", "a PackedWeight from pack_linear", type(weight).__name__)
    panels = weight.panels
    check_tensor(op, "x", x, dtypes=(panels.dtype,), device=panels.device)
    if not isinstance(gated, bool):
        refuse(op, "gated", "True or False", repr(gated))
    width = weight.in_features * (2 if gated else 1)
    if x.ndim == 0 or x.shape[-1] != width:
        refuse(op, "x", f"of shape [.., {width}]", list(x.shape))
    check_number(op, "eps", eps)
    if not eps >= 0:
        refuse(op, "eps", ">= 0", eps)
    if norm_weight is not None:
        if gated:
            refuse(op, "norm_weight", "None with gated", f"shape {list(norm_weight.shape)}")
        shape = [weight.in_features]
        check_tensor(op, "norm_weight", norm_weight, dtypes=(x.dtype,), shape=shape, device=x.device)
    if residual is not None:
        shape = [*x.shape[:-1], weight.out_features]
        check_tensor(op, "residual", residual, dtypes=(x.dtype,), shape=shape, device=x.device)
        if not residual.is_contiguous():
            refuse(op, "residual", "contiguous", f"strides {list(residual.stride())}")
        if out_dtype not in (None, x.dtype):
            refuse(op, "out_dtype", "x's dtype with a residual", str(out_dtype).removeprefix("torch."))
    if x.requires_grad and torch.is_grad_enabled():
        refuse(op, "x", "free of gradients (call under torch.no_grad())", "requires_grad=True")
    if bias is not None:
        check_tensor(op, "bias", bias, dtypes=(x.dtype,), shape=[weight.out_features], device=x.device)
    if out_dtype not in (None, x.dtype, torch.float32):
        refuse(op, "out_dtype", "x's dtype or float32", str(out_dtype).removeprefix("torch."))
