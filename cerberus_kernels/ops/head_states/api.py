"""head_states: the hidden states from which each draft head predicts its token."""

from __future__ import annotations

from typing import Any

import torch

from ..._checks import FLOATS, check_tensor, refuse
from ..._dispatch import REFUSED, LazyTriton, Operator
from . import native, reference


def _fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    root_embedding: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape[0], weight.shape[1], hidden.shape[1])


def _contiguous(*args: Any) -> torch.Tensor:
    return reference.head_states(*args).contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs_weight = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    return reference.head_states_gradients(gradient, *ctx.saved_tensors, needs_weight=needs_weight)


_operator = Operator(
    "head_states",
    '(Tensor hidden, Tensor weight, Tensor bias, Tensor? root_embedding=None, *, str backend="auto") -> Tensor',
    {"reference": _contiguous, "native": native.head_states, "triton": LazyTriton("head_states")},
    _fake,
)
_operator.differentiate(_backward, _save)


def head_states(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    root_embedding: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Run the draft heads' residual blocks on the base model's last hidden state.

    With ``x_0[i] = hidden`` for heads i = 1..K, and ``c = root_embedding`` if given, else ``hidden``::

        x_l[i] = x_{l-1}[i] + SiLU(W_l[i] · concat(x_{l-1}[i], x_{l-1}[i-1]) + b_l[i]),   x_l[0] = c for every l

    so that a head sees what its left neighbour holds one block earlier (Cerberus, arXiv 2410.13344) while all K heads
    of a block remain one batched product. A square ``weight`` drops the link and gives Medusa's heads
    (arXiv 2401.10774). Zero weight and bias give the identity. Without ``root_embedding`` the first block's link
    carries nothing new: every ``x_0`` is the same vector.

    Sums are accumulated in fp32, bias included, and the states between blocks stay in fp32; the result is rounded
    once. A row of the batch never influences another one.

    Args:
        hidden: ``[B, H]``, fp32, bf16 or fp16, rows at any stride.
        weight: ``[L, K, H, 2H]`` (linked) or ``[L, K, H, H]`` (Medusa), L blocks of K heads, contiguous in its last
            dimension. Any of the three dtypes, as for the other arguments.
        bias: ``[L, K, H]``.
        root_embedding: ``[B, H]``, embedding of the newest token, brought to the magnitude of ``hidden`` by the caller;
            only for linked weights.
        backend: ``"auto"``, ``"reference"``, ``"native"`` or ``"triton"``.

    Returns:
        ``[B, K, H]`` in the dtype of ``hidden``; differentiable with respect to all four tensors, once.

    Raises:
        ValueError: wrong dtype, shape, stride or device.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> hidden = torch.tensor([[1.0, -2.0]])
        >>> weight, bias = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2)
        >>> ck.head_states(hidden, weight, bias).tolist()
        [[[1.0, -2.0], [1.0, -2.0], [1.0, -2.0]]]
    """
    if isinstance(weight, torch.Tensor) and weight.numel() and (root_embedding is None or _is_linked(weight)):
        states = _operator.attempt(hidden, weight, bias, root_embedding, backend=backend)
        if states is not REFUSED:
            return states
    check_tensor("head_states", "hidden", hidden, ndim=2, dtypes=FLOATS)
    check_tensor("head_states", "weight", weight, ndim=4, dtypes=FLOATS, device=hidden.device)
    blocks, heads, rows, columns = weight.shape
    width = hidden.shape[1]
    if rows != width or columns not in (width, 2 * width):
        wanted = f"of shape [any, any, {width}, {2 * width}] or [any, any, {width}, {width}]"
        refuse("head_states", "weight", wanted, list(weight.shape))
    if heads == 0:
        refuse("head_states", "weight", "of at least one head", list(weight.shape))
    check_tensor("head_states", "bias", bias, dtypes=FLOATS, device=hidden.device, shape=[blocks, heads, width])
    if root_embedding is not None:
        if columns == width:
            refuse("head_states", "root_embedding", "None for weights without links", list(root_embedding.shape))
        check_tensor(
            "head_states",
            "root_embedding",
            root_embedding,
            dtypes=FLOATS,
            device=hidden.device,
            shape=list(hidden.shape),
        )
    return _operator.call(hidden, weight, bias, root_embedding, backend=backend)


def _is_linked(weight: torch.Tensor) -> bool:
    return weight.ndim == 4 and weight.shape[3] == 2 * weight.shape[2]
