"""verify_tree: which drafts of a tree the model agrees with, and the token that follows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._checks import FLOATS, check_integer, check_tensor, refuse
from ..._dispatch import LazyTriton, Operator
from . import native, reference
from .parameters import (
    DRAFTING_CODES,
    MODE_CODES,
    OP,
    PARAMETERS,
    Mode,
    check_rejection,
    drafting_code,
    mode_code,
    split,
    with_defaults,
    without_defaults,
)
from .reference import VerifyStatus

__all__ = ["Verdict", "VerifyStatus", "verify_tree"]

_TOKEN_DTYPES = (torch.int32, torch.int64)


class Verdict(NamedTuple):
    """What a step emits. D is ``max_depth``; every request emits ``num_accepted + 1 >= 1`` tokens.

    Attributes:
        tokens: int32 ``[B, D + 1]``, the accepted draft tokens, then the bonus token, then -1.
        num_accepted: int32 ``[B]``, accepted drafts, the root and the bonus not counted.
        path: int32 ``[B, D + 1]``, accepted nodes from the root (0), ids within the request's tree, then -1.
        entropy: fp32 ``[B]``, entropy in nats of softmax(row) over vocab_size at the last accepted node, at temperature
            1 and without filters whatever the mode, so that a gate's threshold means the same in all; NaN where that
            row holds NaN or no finite entry.
        status: uint8 ``[B]``, bits of :class:`VerifyStatus`.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    path: torch.Tensor
    entropy: torch.Tensor
    status: torch.Tensor


_OUT_DTYPES = (torch.int32, torch.int32, torch.int32, torch.float32, torch.uint8)


def _new_verdict(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor | None,
    cu_nodes: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    vocab_size: int,
    max_depth: int,
    *rest: Any,
    **keywords: Any,
) -> Verdict:
    """Unwritten outputs for the schema's arguments."""
    batch = logits.shape[0] if cu_nodes is None else cu_nodes.shape[0] - 1
    device, wide, narrow = logits.device, (batch, max_depth + 1), (batch,)
    return Verdict(
        torch.empty(wide, dtype=torch.int32, device=device),
        torch.empty(narrow, dtype=torch.int32, device=device),
        torch.empty(wide, dtype=torch.int32, device=device),
        torch.empty(narrow, dtype=torch.float32, device=device),
        torch.empty(narrow, dtype=torch.uint8, device=device),
    )


def _filling(run: Callable[..., None]) -> Callable[..., None]:
    """A backend's form for the schema with outputs: all arguments by place."""

    def fill(*args: Any, **outputs: torch.Tensor) -> None:
        run(*with_defaults(args), *(outputs[name] for name in Verdict._fields))

    return fill


def _allocating(run: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A backend's form for the schema that returns new outputs."""

    def allocate_and_fill(*args: Any) -> tuple[torch.Tensor, ...]:
        verdict = _new_verdict(*args)
        run(*with_defaults(args), *verdict)
        return tuple(verdict)

    return allocate_and_fill


def _fake(*args: Any, backend: str = "auto") -> tuple[torch.Tensor, ...]:
    return tuple(_new_verdict(*args))


def _fake_out(*args: Any, **outputs: Any) -> None:
    return None


_INPUTS = (
    "Tensor logits, Tensor draft_tokens, Tensor parents, Tensor? num_nodes, Tensor? cu_nodes, Tensor? draft_probs, "
    "SymInt vocab_size, SymInt max_depth, int drafting, "
    + ", ".join(f"{parameter.kind.__name__} {parameter.name}_value={parameter.default}" for parameter in PARAMETERS)
    + ", "
    + ", ".join(f"Tensor? {parameter.name}_rows=None" for parameter in PARAMETERS)
)
_OUTPUTS = ", ".join(f"Tensor({alias}!) {name}" for alias, name in zip("abcde", Verdict._fields, strict=True))
_BACKENDS: dict[str, Callable[..., None]] = {
    "reference": reference.verify_tree_out,
    "native": native.verify_tree_out,
    "triton": LazyTriton(OP),
}
_operator = Operator(
    OP,
    f'({_INPUTS}, *, str backend="auto") -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    {name: _allocating(run) for name, run in _BACKENDS.items()},
    _fake,
)
_out_operator = Operator(
    f"{OP}_out",
    f'({_INPUTS}, *, {_OUTPUTS}, str backend="auto") -> ()',
    {name: _filling(run) for name, run in _BACKENDS.items()},
    _fake_out,
)


def verify_tree(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    *,
    mode: str | Sequence[str] | torch.Tensor = "greedy",
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    epsilon: float | torch.Tensor = 0.09,
    delta: float | torch.Tensor = 0.3,
    drafting: str = "deterministic",
    draft_probs: torch.Tensor | None = None,
    seed: int | torch.Tensor = 0,
    position: int | torch.Tensor | None = None,
    num_nodes: torch.Tensor | None = None,
    cu_nodes: torch.Tensor | None = None,
    vocab_size: int | None = None,
    max_depth: int | None = None,
    backend: str = "auto",
    out: Verdict | None = None,
) -> Verdict:
    """Keep the longest good path of each draft tree, and give the token that follows it.

    Row i of ``logits`` is the target's distribution of the token after node i. Node 0, the root, is the newest token,
    already emitted. Raw logits go in; nothing of size ``[B, N, V]`` is made, and only rows that matter are read: in
    typical mode those of accepted nodes with a child to judge and the last one, in the other modes those on the path.
    docs/verify.md derives the rules and says which is exact when. With p = softmax(row / temperature) after filters:

    - ``"greedy"`` (code 0): step to the first child whose token is the row's greatest entry (the lowest id of equals);
      the bonus is the greatest entry of the last row.
    - ``"typical"`` (code 1; Medusa, arXiv 2401.10774, "Typical Acceptance"): with H the entropy of p in nats, accept a
      child with token x iff ``p(x) > min(epsilon, delta * exp(-H))`` and its parent is accepted. Of all accepted paths
      take the longest, then the one with the greatest sum of ln p, then the one that ends in the lowest node. The bonus
      is drawn from the tokens that pass the same test at the last row, in proportion to p; if none passes, which needs
      ``epsilon`` or ``delta`` near 1 or more, it is the row's greatest entry.
    - ``"sample"`` (code 2): draw a token from p at each row, step to the first child that holds it; the bonus is the
      draw that no child holds. Distributed as p for every tree of deterministic drafts, and the same text as sampling
      without drafts at the same seed and positions.
    - ``"rejection"`` (code 3; SpecInfer, arXiv 2305.09781, and Sequoia, arXiv 2402.12374): try the children in order.
      Child x with draft row q is accepted with probability ``min(1, p(x) / q(x))``; if not, p becomes
      ``max(p - q, 0)``, normalised, for the next child and, after the last, for the bonus. Distributed as p if each
      child was drawn from its row as ``drafting`` says.

    Temperature 0 is greedy in every mode.

    The filters apply in the order top_k, top_p, min_p, on ``(row - max) / temperature`` in fp32: the ``top_k`` most
    likely tokens; of these the smallest set of the most likely that holds ``top_p`` of their mass, with the token that
    crosses; of these the ones with at least ``min_p`` times the greatest probability. Of equals the lowest id stays.
    A token with a probability below ``exp(-87)`` times the greatest counts as impossible.

    A draw is the argmax of ``ln p(v) + g(v)`` (the lowest id of equals), with g standard Gumbel noise from
    Philox4x32-10, keyed by ``seed``, the absolute position ``position + depth`` of the drawn token, and v. Rejection
    mode's coins are uniform in [0, 1), keyed by seed, position and the child's place among its siblings. Nothing
    depends on the other requests of the batch. ``ops/verify_tree/philox.py`` holds the layout of the counters.

    A row's entries may be infinite: all that equal a maximum of +inf share its probability. A row with NaN, or without
    a finite entry, sets a status bit, accepts nothing below it, and its token is its greatest entry that is not NaN
    (lowest id of equals; 0 if there is none).

    Tokens and paths of greedy mode are the same bits on every backend. In the other modes backends may differ where
    p(x) lies within a relative 1e-5 of its threshold, two paths' sums of ln p or two perturbed log-probabilities within
    an absolute 1e-4, or a filter's border within as little of a token's.

    Args:
        logits: fp32, bf16 or fp16 ``[B, N, V']``, or ragged ``[T, V']`` with ``cu_nodes``; any strides but the last.
        draft_tokens: int32 or int64 ``[B, N]`` or ``[T]``. The root's entry is not read. A token outside
            ``[0, vocab_size)``, such as the padding -1, matches nothing.
        parents: int32 ``[N]`` (one tree for all), ``[B, N]`` or ``[T]`` (ids within the request): -1 for the root, else
            in ``[0, node)``.
        mode: a name, or per request a list of names or a uint8, int32 or int64 tensor ``[B]`` of codes.
        temperature: >= 0; a number or fp32 ``[B]``. Unused, like the rest of the sampling parameters, in greedy mode.
        top_k: >= 0, 0 keeps all; a number or an int32 or int64 tensor ``[B]``.
        top_p: in (0, 1]; a number or fp32 ``[B]``.
        min_p: in [0, 1]; a number or fp32 ``[B]``.
        epsilon: in [0, 1]; a number or fp32 ``[B]``. Numbers are rounded to fp32 as tensors are.
        delta: >= 0; a number or fp32 ``[B]``.
        drafting: how siblings were made. ``"iid"``: each drawn from its row; every one is a trial, duplicates too.
            ``"without_replacement"``: each drawn from its row less the tokens of the siblings before it, which are
            taken out and the row renormalised here. ``"deterministic"``: not drawn; rejection mode refuses it.
        draft_probs: for rejection mode, fp32, bf16 or fp16 ``[B, N, V'']`` or ``[T, V'']`` with V'' >= vocab_size, any
            strides but the last: in node i's row the distribution that node i was drawn from, non-negative and here
            normalised. Only rows of children that are tried are read. A child whose row gives its token no mass, or
            holds a NaN, infinite or negative entry, is passed over, and a status bit says so.
        seed: any int64; a number or int64 ``[B]``.
        position: absolute index in the text of the token that follows the root, >= 0; a number or an int32 or int64
            tensor ``[B]``. None is 0 for all: then draw with another seed each step, or the noise repeats.
        num_nodes: int32 ``[B]``, nodes in use per request in ``[1, N]``; nothing past them is read. Not with cu_nodes.
        cu_nodes: int32 ``[B + 1]``, first node of each request in ragged input, rising from 0 to at most T.
        vocab_size: columns of ``logits`` that are tokens, by default all V'; the padding past it is not read.
        max_depth: D, the most drafts to accept, >= 0; by default N - 1. Required with cu_nodes.
        backend: ``"auto"``, ``"reference"``, ``"native"`` or ``"triton"``.
        out: a Verdict of contiguous tensors to fill and return, every element of which is written.

    Returns:
        A :class:`Verdict`.

    Raises:
        ValueError: wrong dtype, shape, stride or range, a malformed tree, or rejection mode without what it needs;
            nothing has been written to ``out``.

    Example:
        >>> import torch, cerberus_kernels as ck
        >>> parents = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)
        >>> drafts = torch.tensor([[7, 3, 5, 9, 2]])
        >>> logits = torch.nn.functional.one_hot(torch.tensor([[5, 9, 2, 4, 11]]), 12).float()
        >>> verdict = ck.verify_tree(logits, drafts, parents)
        >>> verdict.tokens.tolist(), verdict.num_accepted.tolist(), verdict.path.tolist()
        ([[5, 2, 11, -1, -1]], [2], [[0, 2, 4, -1, -1]])
    """
    first = 0 if position is None else position
    given = (mode, temperature, top_k, top_p, min_p, epsilon, delta, seed, first)
    if not torch.compiler.is_compiling() and _operator.goes_native(
        (logits, draft_tokens, parents, num_nodes, cu_nodes, draft_probs, vocab_size, max_depth, *given[1:]), backend
    ):
        inputs = (logits, draft_tokens, parents, num_nodes, cu_nodes, draft_probs)
        verdict = _run_native(inputs, vocab_size, max_depth, drafting, given, out)
        if verdict is not None:
            return verdict
    batch, max_depth = _check_tree(logits, draft_tokens, parents, num_nodes, cu_nodes, max_depth)
    columns = logits.shape[-1]
    if vocab_size is None:
        vocab_size = columns
    check_integer(OP, "vocab_size", vocab_size)
    if not 1 <= vocab_size <= columns:
        refuse(OP, "vocab_size", f"in [1, {columns}], the columns of logits", vocab_size)
    device = logits.device
    _check_drafts(mode, drafting, draft_probs, logits, vocab_size)
    given = (mode_code(mode, device), *given[1:])
    pairs = [split(parameter, value, batch, device) for parameter, value in zip(PARAMETERS, given, strict=True)]
    parameters = without_defaults((*(pair[0] for pair in pairs), *(pair[1] for pair in pairs)))
    inputs = (
        logits, draft_tokens, parents, num_nodes, cu_nodes, draft_probs, vocab_size, max_depth, drafting_code(drafting),
        *parameters,
    )  # fmt: skip
    if out is None:
        return Verdict(*_operator.call(*inputs, backend=backend))
    _check_out(out, batch, max_depth, device)
    _out_operator.call(*inputs, **out._asdict(), backend=backend)
    return out


def _run_native(
    inputs: tuple[Any, ...],
    vocab_size: int | None,
    max_depth: int | None,
    drafting: Any,
    given: tuple[Any, ...],
    out: Verdict | None,
) -> Verdict | None:
    """A call that needs no word said about it; None if an argument is refused, or has a form for the longer way."""
    logits, cu_nodes, draft_probs = inputs[0], inputs[4], inputs[5]
    mode = given[0]
    try:
        if type(mode) is str:
            mode = MODE_CODES[mode]
            if draft_probs is not None and mode != Mode.REJECTION:
                return None
        elif not isinstance(mode, torch.Tensor):
            return None
        if max_depth is None:
            if cu_nodes is not None:
                return None
            max_depth = logits.shape[1] - 1
        if vocab_size is None:
            vocab_size = logits.shape[-1]
        if out is None:
            out = _new_verdict(*inputs, vocab_size, max_depth)
        native.verify_tree_of_values(*inputs, vocab_size, max_depth, DRAFTING_CODES[drafting], mode, *given[1:], *out)
    except Exception:  # the checks of the longer way find the right words
        return None
    return out


def _check_tree(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor | None,
    cu_nodes: torch.Tensor | None,
    max_depth: int | None,
) -> tuple[int, int]:
    """Refuse tensors that do not fit each other; the batch size and the greatest depth."""
    check_tensor(OP, "logits", logits, ndim=3 if cu_nodes is None else 2, dtypes=FLOATS)
    device, nodes = logits.device, logits.shape[-2]
    shape = tuple(logits.shape[:-1])
    if cu_nodes is not None:
        check_tensor(OP, "cu_nodes", cu_nodes, ndim=1, dtypes=(torch.int32,), device=device)
        if cu_nodes.shape[0] < 1:
            refuse(OP, "cu_nodes", "of shape [B + 1]", list(cu_nodes.shape))
        if num_nodes is not None:
            refuse(OP, "num_nodes", "None with cu_nodes", f"shape {list(num_nodes.shape)}")
        if max_depth is None:
            refuse(OP, "max_depth", "given with cu_nodes", None)
        batch = cu_nodes.shape[0] - 1
    else:
        batch = shape[0]
        if nodes < 1:
            refuse(OP, "logits", "of shape [B, N, V'] with N >= 1", list(logits.shape))
        if num_nodes is not None:
            check_tensor(OP, "num_nodes", num_nodes, dtypes=(torch.int32,), shape=(batch,), device=device)
    check_tensor(OP, "draft_tokens", draft_tokens, dtypes=_TOKEN_DTYPES, shape=shape, device=device)
    check_tensor(
        OP, "parents", parents, ndim=(1, 2) if cu_nodes is None else (1,), dtypes=(torch.int32,), device=device
    )
    check_tensor(OP, "parents", parents, shape=(nodes,) if parents.ndim == 1 else shape)
    if max_depth is None:
        max_depth = nodes - 1
    check_integer(OP, "max_depth", max_depth)
    if max_depth < 0:
        refuse(OP, "max_depth", ">= 0", max_depth)
    return batch, max_depth


def _check_drafts(
    mode: Any, drafting: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, vocab_size: int
) -> None:
    """Refuse draft rows that do not fit, and modes known here that do not go with them."""
    scheme = drafting_code(drafting)
    if draft_probs is not None:
        shape = (*logits.shape[:-1], None)
        check_tensor(OP, "draft_probs", draft_probs, dtypes=FLOATS, shape=shape, device=logits.device)
        if draft_probs.shape[-1] < vocab_size:
            refuse(OP, "draft_probs", f"at least vocab_size = {vocab_size} wide", list(draft_probs.shape))
    if isinstance(mode, (str, list, tuple)):
        names = (mode,) if isinstance(mode, str) else mode
        check_rejection([Mode.REJECTION] if "rejection" in names else [], scheme, draft_probs)
        if draft_probs is not None and "rejection" not in names:
            refuse(OP, "draft_probs", "None unless mode is 'rejection'", f"mode {mode!r}")


def _check_out(out: Verdict, batch: int, max_depth: int, device: torch.device) -> None:
    shapes = ((batch, max_depth + 1), (batch,), (batch, max_depth + 1), (batch,), (batch,))
    for name, tensor, shape, dtype in zip(Verdict._fields, out, shapes, _OUT_DTYPES, strict=True):
        check_tensor(OP, f"out.{name}", tensor, dtypes=(dtype,), shape=shape, device=device)
        if not tensor.is_contiguous():
            refuse(OP, f"out.{name}", "contiguous", f"strides {list(tensor.stride())}")
