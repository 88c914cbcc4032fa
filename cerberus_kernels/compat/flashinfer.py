"""FlashInfer's chain of drafts (flashinfer.sampling): same positional arguments, counters and results."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import refuse
from ..ops.verify_tree.philox import philox4x32
from ._walk import draw, greatest_entry
from .links import INTEGERS, check

__all__ = ["chain_speculative_sampling"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WORD = 0xFFFFFFFF
_FIRST_ROW_KIND = 1 << 31  # counters that verify_tree never uses


def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    *,
    uniform_samples: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192) of one chain of n drafts per request.

    With q and p the target's and the draft's row, draft x is accepted iff ``coin * p(x) < q(x)``. At the first draft
    that is not, the token is drawn from ``max(q - p, 0)``, normalised; after the last, from the target's row n. Every
    emitted token has exactly the target's distribution if x was drawn from p.

    Different on purpose: an id outside ``[0, V)``, such as the padding -1, or one that its own row gives no mass is
    never accepted nor looked up, and the token after it is drawn from q whole, since nothing was tried; a coin may be 0
    and the comparison is strict, so no token of probability zero is accepted or drawn; where ``max(q - p, 0)`` is zero
    everywhere the token is drawn from q, and where that is too, or NaN, it is q's greatest entry (the lowest of equals,
    0 if all are NaN), never an id outside the vocabulary; a NaN among other entries counts as 0; the counter of
    accepted drafts judges each by one coin, where FlashInfer tosses again for the rejected one; both counters may be
    int64; ``seed`` and ``offset`` may hold one number per request, and then a request's coins do not depend on its
    place in the batch. The coins are not FlashInfer's.

    Args:
        draft_probs: fp32, bf16 or fp16 ``[B, n, V]``, the rows that drafts were drawn from.
        draft_token_ids: int32 or int64 ``[B, n]``.
        target_probs: fp32, bf16 or fp16 ``[B, n + 1, V]``.
        maybe_output_accepted_token_num: int32 or int64 ``[B]`` or None for zeros. Added in place: drafts that pass
            their own test, those behind a rejected one too.
        maybe_output_emitted_draft_token_num: int32 or int64 ``[B]`` or None for zeros. Added in place: drafts emitted.
        deterministic: unused; the result is always a function of the arguments and the coins.
        generator: source of the coins without ``seed``; None is torch's own of the device.
        seed: key of the coins; a number, or an integer tensor ``[1]`` or ``[B]``.
        offset: with ``seed``, an advancing counter, such as the position in the text; None is 0.
        uniform_samples: floating ``[B, n + 1]`` in [0, 1) or None: the coins themselves, the last for the drawn token.

    Returns:
        ``(token_ids, accepted, emitted)``: int32 ``[B, n + 1]``, the emitted drafts, the drawn token, then -1; and the
        two counters.

    Raises:
        ValueError: wrong dtype, shape or device.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import flashinfer
        >>> p, q = torch.tensor([[[0.8, 0.1, 0.1]]]), torch.tensor([[[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]])
        >>> coins = torch.tensor([[0.65, 0.5]])  # 0.65 * 0.8 >= 0.5; then of [0, 0.2, 0.1] the middle of the mass
        >>> ids, accepted, emitted = flashinfer.chain_speculative_sampling(
        ...     p, torch.tensor([[0]]), q, uniform_samples=coins)
        >>> ids.tolist(), accepted.tolist(), emitted.tolist()
        ([[1, -1]], [0], [0])
    """
    op = "chain_speculative_sampling"
    check(op, "draft_token_ids", draft_token_ids, ndim=2, dtypes=INTEGERS)
    (batch, drafts), device = draft_token_ids.shape, draft_token_ids.device
    check(op, "target_probs", target_probs, dtypes=_FLOATS, shape=(batch, drafts + 1, None), device=device)
    vocab_size = target_probs.shape[2]
    check(op, "draft_probs", draft_probs, dtypes=_FLOATS, shape=(batch, drafts, vocab_size), device=device)
    if vocab_size < 1:
        refuse(op, "target_probs", "of shape [B, n + 1, V] with V >= 1", list(target_probs.shape))
    counters = []
    for name, counter in (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    ):
        if counter is None:
            counter = torch.zeros(batch, dtype=torch.int32, device=device)
        check(op, name, counter, dtypes=INTEGERS, shape=(batch,), device=device)
        counters.append(counter)
    if uniform_samples is not None:
        check(op, "uniform_samples", uniform_samples, dtypes=_FLOATS, shape=(batch, drafts + 1), device=device)
        coins = uniform_samples.double()
    elif seed is not None:
        coins = _coins(op, seed, 0 if offset is None else offset, batch, drafts + 1, device)
    else:
        coins = torch.rand(batch, drafts + 1, dtype=torch.float64, device=device, generator=generator)

    known = (draft_token_ids >= 0) & (draft_token_ids < vocab_size)
    tokens = torch.where(known, draft_token_ids, 0).long()
    p = draft_probs.gather(2, tokens.unsqueeze(2)).squeeze(2).double()
    q = target_probs[:, :drafts].gather(2, tokens.unsqueeze(2)).squeeze(2).double()
    tried = known & (p > 0) & (p < torch.inf)
    accepts = tried & (q < torch.inf) & (coins[:, :drafts] * p < q)
    emitted = accepts.long().cumprod(1).sum(1)

    request = torch.arange(batch, device=device)
    target_row = target_probs[request, emitted].double()  # [B, V]
    weights = torch.where((target_row > 0) & (target_row < torch.inf), target_row, 0.0)
    if drafts:
        here = emitted.clamp(max=drafts - 1)
        draft_row = draft_probs[request, here].double().nan_to_num(nan=0.0)
        was_tried = tried.gather(1, here.unsqueeze(1)) & (emitted < drafts).unsqueeze(1)
        residual = torch.where(was_tried, weights - draft_row, weights).clamp(min=0)
        weights = torch.where((residual > 0).any(1, keepdim=True), residual, weights)
    drawn = draw(weights, coins[:, drafts], greatest_entry(target_row))

    place, count = torch.arange(drafts + 1, device=device), emitted.unsqueeze(1)
    ids = torch.nn.functional.pad(tokens, (0, 1))
    ids = torch.where(place < count, ids, torch.where(place == count, drawn.unsqueeze(1), -1))
    counters[0] += accepts.sum(1)
    counters[1] += emitted
    return ids.to(torch.int32), counters[0], counters[1]


def _coins(
    op: str, seed: int | torch.Tensor, offset: int | torch.Tensor, batch: int, count: int, device: torch.device
) -> torch.Tensor:
    """Uniform float64 [B, count] in [0, 1), multiples of 2**-53, from Philox4x32-10.

    Key: the words of the seed. Counter: (place, 2**31 + request, low and high word of the offset), where the request is
    0 if each has a seed of its own.
    """
    words = []
    for name, value in (("seed", seed), ("offset", offset)):
        if not isinstance(value, torch.Tensor):
            value = torch.full((1,), value, dtype=torch.int64, device=device)
        check(op, name, value, ndim=1, dtypes=INTEGERS, device=device)
        if value.shape[0] not in (1, batch):
            refuse(op, name, f"a number or a tensor of shape [1] or [{batch}]", list(value.shape))
        value = value.long().expand(batch).unsqueeze(1)
        words += [value & _WORD, (value >> 32) & _WORD]
    own = isinstance(seed, torch.Tensor) and seed.shape[0] == batch
    request = torch.zeros(batch, dtype=torch.int64, device=device) if own else torch.arange(batch, device=device)
    place = torch.arange(count, device=device)
    counter = torch.broadcast_tensors(place, request.unsqueeze(1) + _FIRST_ROW_KIND, words[2], words[3])
    key: Any = (words[0], words[1])  # one key per request
    block = philox4x32(torch.stack(counter, dim=-1), key)
    # 32 bits of the first word and 21 of the second
    return ((block[..., 0] << 21) | (block[..., 1] >> 11)).double() * 2.0**-53
