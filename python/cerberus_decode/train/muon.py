"""Muon: momentum whose every matrix is replaced by the nearest orthogonal one before it is applied.

Directions that the gradient hardly ever takes count as much as those it always takes, which suits training on little
text. After Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale of Liu et
al., "Muon is scalable for LLM training" (arXiv 2502.16982), by which learning rates compare with AdamW's. PyTorch's
own works in bfloat16, for which many CPUs have no fast product, and takes no stacks of matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# Coefficients of Jordan et al.: five steps bring singular values from (0, 1] to about 0.7 to 1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """The optimiser.

    Args:
        parameters: matrices ``[.., rows, columns]``; leading dimensions stack several.
        lr: learning rate, in AdamW's scale.
        momentum: share of the past in the momentum, which is Nesterov's.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float = 3e-3, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                past = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                update = orthogonal(parameter.grad.add(past, alpha=group["momentum"]))
                scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices ``[.., rows, columns]`` with the same singular vectors and singular values near 1."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide is matrices else x.mT
