"""packed_linear through the native library."""

from __future__ import annotations

import torch

from ..._native import function


def packed_linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as the reference's."""
    out = x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype or x.dtype)
    if x.ndim > 2 and not x.is_contiguous():
        x = x.contiguous()
    function("packed_linear")(x, panels, bias, norm_weight, eps, gated, residual, out)
    return out
