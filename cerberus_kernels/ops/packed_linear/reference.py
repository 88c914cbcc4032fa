"""Specification of packed_linear and of the layout of its weight.

    out[t, o] = round(sum_i x[t, i] * weight[o, i] + bias[o]), summed in fp32, rounded once

Before the product x may go through a SiLU gate (its first half gates its second) and RMS normalisation, after it a
residual may be added; each of these steps rounds where the layers of a Llama model round.

The weight ``[out, in]`` is cut into panels of PANEL_WIDTH outputs, and each panel is stored along ``in``, two inputs
(a step) at a time, so that a kernel reads it once from front to back. Within a step, 16-bit brain floats lie as
``[PANEL_WIDTH, 2]``: the two inputs of one output share a 32-bit word, and a shift or a mask turns a vector of words
into fp32. The other dtypes lie as ``[2, PANEL_WIDTH]``. What is missing from the last panel and the last step is zero.
"""

from __future__ import annotations

import torch

PANEL_WIDTH = 48
STEP_DEPTH = 2


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> panels [ceil(out / 48), ceil(in / 2), 96]."""
    out_features, in_features = weight.shape
    missing = (-in_features % STEP_DEPTH, -out_features % PANEL_WIDTH)
    if any(missing):
        weight = torch.nn.functional.pad(weight, (0, missing[0], 0, missing[1]))
    rows = weight.contiguous().view(-1, PANEL_WIDTH, weight.shape[1] // STEP_DEPTH, STEP_DEPTH)
    if weight.dtype == torch.bfloat16:
        words = rows.view(torch.int32)  # [panels, PANEL_WIDTH, steps, 1]
        return words.squeeze(-1).transpose(1, 2).contiguous().view(torch.bfloat16)
    return rows.permute(0, 2, 3, 1).contiguous().flatten(2)


def unpack(panels: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The weight [out, in] that :func:`pack` was given, bit for bit."""
    num_panels, steps, _ = panels.shape
    if panels.dtype == torch.bfloat16:
        rows = panels.view(torch.int32).transpose(1, 2).contiguous().view(torch.bfloat16)  # [panels, WIDTH, 2 * steps]
    else:
        rows = panels.view(num_panels, steps * STEP_DEPTH, PANEL_WIDTH).transpose(1, 2)
    return rows.reshape(num_panels * PANEL_WIDTH, steps * STEP_DEPTH)[:out_features, :in_features].contiguous()


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
    """x [.., in] or, gated, [.., 2 in]; panels of a weight [out, in], bias [out] or None -> [.., out] in out_dtype.

    out_dtype is x's by default. norm_weight [in] of x's dtype, residual [.., out] of x's dtype.
    """
    if gated:
        gate, value = x.chunk(2, -1)
        x = torch.nn.functional.silu(gate.float()).to(x.dtype) * value
    if norm_weight is not None:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        x = (x.float() * scale).to(x.dtype) * norm_weight
    weight = unpack(panels, out_features, x.shape[-1]).float()
    product = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
    product = product.to(out_dtype or x.dtype)
    return product if residual is None else residual + product
