"""One tolerance per dtype for results that are sums in another order; integers are compared exactly."""

from __future__ import annotations

import torch

# (relative, absolute): a few units in the last place of the output dtype after fp32 accumulation.
_TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """``rtol`` and ``atol`` for an output of ``dtype``."""
    relative, absolute = _TOLERANCES[dtype]
    return {"rtol": relative, "atol": absolute}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare by the table for ``expected``'s dtype; exactly for integers and booleans. NaN equals NaN."""
    if expected.dtype in _TOLERANCES:
        relative, absolute = _TOLERANCES[expected.dtype]
        torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute, equal_nan=True)
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
