"""head_topk: the draft heads' best tokens and their log-probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._checks import FLOATS, check_integer, check_tensor, refuse
from ..._dispatch import REFUSED, LazyTriton, Operator
from . import native, reference


class Candidates(NamedTuple):
    """Best tokens of every head, in descending order of probability.

    Attributes:
        tokens: int32 ``[.., k]``.
        log_probs: fp32 ``[.., k]``, natural logarithms of the probabilities over the (trimmed) vocabulary.
        lse: fp32 ``[..]``, log-sum-exp of the row's logits, so ``logit = log_prob + lse``.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    lse: torch.Tensor


def _fake(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    k: int,
    vocab_size: int,
    token_map: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = states.shape[0]
    return (
        states.new_empty(rows, k, dtype=torch.int32),
        states.new_empty(rows, k, dtype=torch.float32),
        states.new_empty(rows, dtype=torch.float32),
    )


_operator = Operator(
    "head_topk",
    "(Tensor states, Tensor vocab_weight, int k, int vocab_size, Tensor? token_map=None, *, "
    'str backend="auto") -> (Tensor, Tensor, Tensor)',
    {"reference": reference.head_topk, "native": native.head_topk, "triton": LazyTriton("head_topk")},
    _fake,
)


def head_topk(
    states: torch.Tensor,
    vocab_weight: torch.Tensor,
    k: int,
    *,
    token_map: torch.Tensor | None = None,
    vocab_size: int | None = None,
    backend: str = "auto",
) -> Candidates:
    """Vocabulary projection, log-sum-exp and top-k in one pass over the weight.

    The ``[.., V]`` logits are never written to memory as a whole. Products are summed in fp32. A row's result depends
    on that row and the weight alone, neither on the other rows nor on the number of threads. Equal logits go to the
    lowest row of ``vocab_weight`` (with a ``token_map`` too: not to the lowest mapped token), so top-k is a prefix of
    top-(k+1). Not differentiable; for training see ``head_loss``.

    Args:
        states: fp32, bf16 or fp16 ``[.., H]``, one row per head.
        vocab_weight: same dtype ``[V', H]``, any row stride; a padded ``V'`` needs ``vocab_size``.
        k: candidates per row, in ``[1, vocab_size]``.
        token_map: int32 ``[V]`` for a trimmed draft vocabulary: the token that row ``v`` of the weight stands for.
        vocab_size: rows of the weight in use; by default the length of ``token_map``, else ``V'``. Rows past it are
            never read.
        backend: ``"auto"``, ``"reference"``, ``"native"`` or ``"triton"``, which gives up to 2048 candidates.

    Returns:
        :class:`Candidates` ``(tokens int32 [.., k], log_probs fp32 [.., k], lse fp32 [..])``. A row whose
        log-sum-exp is not finite (a NaN or +inf logit, or all of them -inf) gets the rows ``0 .. k-1`` (mapped, if
        there is a map) and NaN in ``log_probs`` and ``lse``; other rows are untouched by it.

    Raises:
        ValueError: wrong dtype, shape, device or stride, mixed dtypes, or a ``k`` or ``vocab_size`` out of range.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> tokens, log_probs, lse = ck.head_topk(torch.tensor([2.0, 0.0]), weight, 2)
        >>> tokens.tolist(), [round(value, 4) for value in log_probs.tolist()], round(lse.item(), 4)
        ([0, 2], [-0.7586, -0.7586], 2.7586)
    """
    op = "head_topk"
    found = _attempt(states, vocab_weight, k, token_map, vocab_size, backend)
    if found is not None:
        return found
    check_tensor(op, "states", states, dtypes=FLOATS)
    if states.ndim < 1 or states.shape[-1] < 1:
        refuse(op, "states", "at least 1-dimensional with a last size >= 1", f"shape {list(states.shape)}")
    width = states.shape[-1]
    check_tensor(
        op, "vocab_weight", vocab_weight, ndim=2, dtypes=(states.dtype,), device=states.device, shape=[None, width]
    )
    if token_map is not None:
        check_tensor(op, "token_map", token_map, ndim=1, dtypes=(torch.int32,), device=states.device)
        if vocab_size is not None and token_map.shape[0] != vocab_size:
            refuse(op, "token_map", f"of length vocab_size ({vocab_size})", token_map.shape[0])
        if token_map.shape[0] > vocab_weight.shape[0]:
            longest = f"at most {vocab_weight.shape[0]} long, the rows of vocab_weight"
            refuse(op, "token_map", longest, token_map.shape[0])
        vocab_size = token_map.shape[0]
    if vocab_size is None:
        vocab_size = vocab_weight.shape[0]
    check_integer(op, "vocab_size", vocab_size)
    check_integer(op, "k", k)
    if not 1 <= vocab_size <= vocab_weight.shape[0]:
        refuse(op, "vocab_size", f"in [1, {vocab_weight.shape[0]}]", vocab_size)
    if not 1 <= k <= vocab_size:
        refuse(op, "k", f"in [1, {vocab_size}]", k)
    leading = states.shape[:-1]
    tokens, log_probs, lse = _operator.call(
        states.reshape(-1, width), vocab_weight, k, vocab_size, token_map, backend=backend
    )
    return Candidates(tokens.view(*leading, k), log_probs.view(*leading, k), lse.view(leading))


def _attempt(
    states: Any, vocab_weight: Any, k: int, token_map: Any, vocab_size: int | None, backend: str
) -> Candidates | None:
    """The call as it is, where the native function takes it."""
    given = (states, vocab_weight) if token_map is None else (states, vocab_weight, token_map)
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim for tensor in given) or not states.numel():
        return None
    if type(k) is not int or states.layout != torch.strided or not (states.ndim == 2 or states.is_contiguous()):
        return None
    if vocab_size is None:
        vocab_size = (vocab_weight if token_map is None else token_map).shape[0]
    rows = states if states.ndim == 2 else states.reshape(-1, states.shape[-1])
    leading = list(states.shape[:-1])
    found = _operator.attempt(rows, vocab_weight, k, vocab_size, token_map, leading, backend=backend)
    return None if found is REFUSED else Candidates(*found)
