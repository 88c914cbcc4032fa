"""gate: does drafting pay at this step?"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._checks import FLOATS, check_integer, check_number, check_tensor, refuse
from ..._dispatch import REFUSED, LazyTriton, Operator
from . import native, reference


class GateWeights(NamedTuple):
    """Parameters of the learned gate, all of one dtype: fp32, bf16 or fp16.

    Attributes:
        w1: ``[M, H]``.
        b1: ``[M]``.
        w2: ``[M]``.
        b2: ``[1]``.
    """

    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor


class GateDecision(NamedTuple):
    """What the gate says of every request.

    Attributes:
        score: fp32 ``[B]``, entropy in nats or a probability.
        open: bool ``[B]``, whether to draft.
    """

    score: torch.Tensor
    open: torch.Tensor


def _fake(
    hidden: torch.Tensor | None,
    entropy: torch.Tensor | None,
    logits: torch.Tensor | None,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    given = next(tensor for tensor in (entropy, logits, hidden) if tensor is not None)
    batch = given.shape[0]
    return given.new_empty(batch, dtype=torch.float32), given.new_empty(batch, dtype=torch.bool)


_operator = Operator(
    "gate",
    "(Tensor? hidden, Tensor? entropy, Tensor? logits, Tensor? thresholds, Tensor? w1, Tensor? b1, Tensor? w2, "
    'Tensor? b2, str kind, float threshold, int vocab_size, float eps, *, str backend="auto") -> (Tensor, Tensor)',
    {"reference": reference.gate, "native": native.gate, "triton": LazyTriton("gate")},
    _fake,
)


def _keep_for_backward(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    hidden, entropy, logits, _, w1, b1, w2, b2, ctx.kind, _, ctx.vocab_size, ctx.eps = inputs
    ctx.entropy_given = entropy is not None
    ctx.save_for_backward(hidden, logits, w1, b1, w2, b2)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    hidden, logits, w1, b1, w2, b2 = ctx.saved_tensors
    d_hidden = d_entropy = d_logits = None
    d_weights: tuple[torch.Tensor | None, ...] = (None,) * 4
    if ctx.kind == "learned":
        d_hidden, *exact = reference.probability_gradients(hidden, w1, b1, w2, b2, ctx.eps, gradient)
        d_hidden = d_hidden.to(hidden.dtype)
        d_weights = tuple(grad.to(weight.dtype) for grad, weight in zip(exact, (w1, b1, w2, b2), strict=True))
    elif ctx.kind == "hidden_entropy":
        d_hidden = reference.entropy_gradient(hidden, gradient).to(hidden.dtype)
    elif ctx.entropy_given:
        d_entropy = gradient
    else:
        used = reference.entropy_gradient(logits[:, : ctx.vocab_size], gradient).to(logits.dtype)
        d_logits = torch.nn.functional.pad(used, (0, logits.shape[1] - ctx.vocab_size))
    return d_hidden, d_entropy, d_logits, None, *d_weights, None, None, None, None


_operator.differentiate(_backward, _keep_for_backward)


def gate(
    hidden: torch.Tensor | None,
    *,
    entropy: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    kind: str = "entropy",
    threshold: float | torch.Tensor,
    weights: GateWeights | None = None,
    vocab_size: int | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> GateDecision:
    """Score every request and decide whether it drafts.

    ``"entropy"`` scores by the next-token distribution's entropy over the vocabulary and ``"hidden_entropy"`` by the
    entropy of ``softmax(hidden)``, both in nats; they open iff ``score < threshold``, so equality stays closed,
    ``-inf`` never opens and ``inf`` always does. ``"learned"`` scores by the probability
    ``sigmoid(w2 · SiLU(W1 · rms_norm(hidden) + b1) + b2)`` that drafting pays and opens iff ``score >= threshold``.
    The comparison is made in fp32. A NaN score (a NaN or +inf in the row, or a row of only -inf) never opens, whatever
    the threshold. The score is differentiable. The entropy gate is that of Cerberus (arXiv 2410.13344).

    Args:
        hidden: fp32, bf16 or fp16 ``[B, H]``, the last hidden state; for kind ``"entropy"`` not used, None will do.
        entropy: fp32 ``[B]`` in nats, as ``verify_tree`` returns it; kind ``"entropy"`` only.
        logits: fp32, bf16 or fp16 ``[B, V']`` to take the entropy of, instead of ``entropy``; a logit of -inf counts
            as probability zero.
        kind: ``"entropy"``, ``"hidden_entropy"`` or ``"learned"``.
        threshold: one number, or fp32 ``[B]``.
        weights: :class:`GateWeights`, kind ``"learned"`` only; their dtype need not be ``hidden``'s.
        vocab_size: columns of ``logits`` in use, by default all; columns past it are never read.
        eps: added to the mean square in ``rms_norm``.
        backend: ``"auto"``, ``"reference"``, ``"native"`` or ``"triton"``.

    Returns:
        :class:`GateDecision` ``(score fp32 [B], open bool [B])``.

    Raises:
        ValueError: an unknown kind, an input that the kind lacks or does not take, or wrong dtypes or shapes.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> logits = torch.tensor([[1.0, 1.0, -torch.inf], [5.0, -torch.inf, -torch.inf]])
        >>> score, is_open = ck.gate(None, logits=logits, threshold=0.5)
        >>> [round(value, 4) for value in score.tolist()], is_open.tolist()
        ([0.6931, 0.0], [False, True])
    """
    op = "gate"
    if kind == "entropy" and entropy is not None and logits is None and weights is None and vocab_size is None:
        thresholds = threshold if isinstance(threshold, torch.Tensor) else None
        number = 0.0 if thresholds is not None else threshold
        inputs = (None, entropy, None, thresholds, None, None, None, None, kind, number, 0, eps)
        found = _operator.attempt(*inputs, backend=backend)
        if found is not REFUSED:
            return GateDecision(*found)
    if kind not in reference.KINDS:
        refuse(op, "kind", f"one of {', '.join(reference.KINDS)}", repr(kind))
    _check_inputs(hidden, entropy, logits, kind, weights, vocab_size)
    given = entropy if entropy is not None else logits if kind == "entropy" else hidden
    assert given is not None
    columns = 0
    if logits is not None:
        columns = logits.shape[1] if vocab_size is None else vocab_size
        check_integer(op, "vocab_size", columns)
        if not 1 <= columns <= logits.shape[1]:
            refuse(op, "vocab_size", f"in [1, {logits.shape[1]}]", columns)
    thresholds = None
    check_number(op, "eps", eps)
    if not isinstance(threshold, torch.Tensor):
        check_number(op, "threshold", threshold)
    else:
        thresholds, threshold = threshold, 0.0
        check_tensor(op, "threshold", thresholds, dtypes=(torch.float32,), shape=[given.shape[0]], device=given.device)
    w1, b1, w2, b2 = weights or (None,) * 4
    score, is_open = _operator.call(
        hidden if kind != "entropy" else None,
        entropy,
        logits,
        thresholds,
        w1,
        b1,
        w2,
        b2,
        kind,
        float(threshold),
        columns,
        float(eps),
        backend=backend,
    )
    return GateDecision(score, is_open)


def _check_inputs(
    hidden: torch.Tensor | None,
    entropy: torch.Tensor | None,
    logits: torch.Tensor | None,
    kind: str,
    weights: GateWeights | None,
    vocab_size: int | None,
) -> None:
    op = "gate"
    if kind == "entropy":
        if (entropy is None) == (logits is None):
            refuse(op, "entropy", "given, or logits in its place", "both" if entropy is not None else "neither")
        if entropy is not None:
            check_tensor(op, "entropy", entropy, ndim=1, dtypes=(torch.float32,))
        else:
            check_tensor(op, "logits", logits, ndim=2, dtypes=FLOATS)
    else:
        for name, tensor in (("entropy", entropy), ("logits", logits)):
            if tensor is not None:
                refuse(op, name, f"None for kind {kind!r}", f"shape {list(tensor.shape)}")
        check_tensor(op, "hidden", hidden, ndim=2, dtypes=FLOATS)
        assert hidden is not None
        if hidden.shape[1] < 1:
            refuse(op, "hidden", "of width >= 1", f"shape {list(hidden.shape)}")
    if vocab_size is not None and logits is None:
        refuse(op, "vocab_size", "None without logits", vocab_size)
    if kind != "learned":
        if weights is not None:
            refuse(op, "weights", f"None for kind {kind!r}", type(weights).__name__)
        return
    if weights is None:
        refuse(op, "weights", "GateWeights(w1, b1, w2, b2) for kind 'learned'", "None")
    w1, b1, w2, b2 = weights
    assert hidden is not None
    check_tensor(op, "weights.w1", w1, dtypes=FLOATS, shape=[None, hidden.shape[1]], device=hidden.device)
    for name, tensor, size in (("b1", b1, w1.shape[0]), ("w2", w2, w1.shape[0]), ("b2", b2, 1)):
        check_tensor(op, f"weights.{name}", tensor, dtypes=(w1.dtype,), shape=[size], device=hidden.device)
