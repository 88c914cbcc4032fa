"""Refusals in one form: ``<op>: <argument> must be <constraint>, got <value>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def refuse(op: str, argument: str, constraint: str, got: object) -> NoReturn:
    """Raise the ValueError that every refused argument ends in."""
    raise ValueError(f"{op}: {argument} must be {constraint}, got {got}")


def check_integer(op: str, argument: str, value: object) -> None:
    """Refuse ``value`` unless it is an integer."""
    if not isinstance(value, (int, torch.SymInt)):
        refuse(op, argument, "an integer", repr(value))


def check_number(op: str, argument: str, value: object) -> None:
    """Refuse ``value`` unless it is an integer or a float."""
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        refuse(op, argument, "a number", repr(value))


def check_tensor(
    op: str,
    argument: str,
    value: object,
    *,
    ndim: int | Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    shape: Sequence[int | None] | None = None,
    last_contiguous: bool = True,
) -> None:
    """Refuse ``value`` unless it is a tensor with the given properties.

    Args:
        op: operator's name for the message.
        argument: argument's name for the message.
        value: what the caller passed.
        ndim: allowed number or numbers of dimensions.
        dtypes: allowed element types.
        device: required device.
        shape: required sizes, None where any will do.
        last_contiguous: whether the last dimension must have stride 1.
    """
    if not isinstance(value, torch.Tensor):
        refuse(op, argument, "a torch.Tensor", type(value).__name__)
    if ndim is not None:
        allowed = (ndim,) if isinstance(ndim, int) else tuple(ndim)
        if value.ndim not in allowed:
            refuse(op, argument, f"{' or '.join(map(str, allowed))}-dimensional", f"shape {list(value.shape)}")
    if dtypes is not None and value.dtype not in dtypes:
        refuse(op, argument, f"of dtype {' or '.join(map(_name, dtypes))}", _name(value.dtype))
    if shape is not None:
        fits = len(shape) == value.ndim
        for want, have in zip(shape, value.shape, strict=False):
            fits = fits and (want is None or want == have)
        if not fits:
            wanted = "[" + ", ".join("any" if want is None else str(want) for want in shape) + "]"
            refuse(op, argument, f"of shape {wanted}", list(value.shape))
    if device is not None and value.device != device:
        refuse(op, argument, f"on {device}", value.device)
    if last_contiguous and value.ndim > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        refuse(op, argument, "contiguous in its last dimension", f"strides {list(value.stride())}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
