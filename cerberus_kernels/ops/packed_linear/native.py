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
) -> torch.Tensor:
    """x [.., in], panels of a weight [out, in], bias [out] or None -> [.., out] in out_dtype, by default x's."""
    out = x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype or x.dtype)
    if x.ndim > 2 and not x.is_contiguous():
        x = x.contiguous()
    function("packed_linear")(x, panels, bias, out)
    return out
