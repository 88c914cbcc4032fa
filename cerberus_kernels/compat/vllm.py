"""vLLM's rejection sampling of ragged chains from logits (model runner V2): same positional arguments and results."""

from __future__ import annotations

import torch

from .. import verify_tree
from .._checks import FLOATS, refuse
from .links import INTEGERS, check

__all__ = ["rejection_sample"]


def rejection_sample(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the start of each request's chain of drafts, and sample the token behind it.

    R requests have L rows together; S is ``num_speculative_steps``. A request's rows are those of its newest token and
    its drafts. With draft logits this is ``verify_tree`` in rejection mode (arXiv 2211.17192), without them its mode
    ``"sample"``: the same distribution as rejecting one-hot drafts, and at one seed the same text as without drafts.
    Logits are taken as they are: temperature and filters have been applied, and ``temperature`` says only which
    requests are greedy (0).

    Different on purpose: a row that holds NaN or no finite entry gives its greatest entry (the lowest of equals, 0 if
    all are NaN), never an id outside the vocabulary; a draft that its own row gives no mass is never accepted; entries
    past the sampled tokens are -1; the coins, from Philox keyed by seed and position, are not vLLM's. Synthetic
    acceptance rates and block verification are refused.

    Args:
        target_logits: fp32, bf16 or fp16 ``[L, V]``, any strides but the last.
        draft_logits: floating ``[M, S, V'']`` or None: in ``[slot, i]`` what draft i was sampled from. With V'' below V
            tokens from V'' on are not emitted, as in vLLM.
        draft_sampled: int32 or int64 ``[L]``: per request the newest token (not read), then its drafts; -1 is padding
            that ends the chain.
        cu_num_logits: int32 or int64 ``[R + 1]``, first row of each request, rising from 0; every request has a row.
        pos: int32 or int64 ``[L]``, position in the text of each row's token. Coins for the token that follows the
            newest one are keyed by its position + 1.
        idx_mapping: int32 or int64 ``[R]``, slot of each request in ``temperature``, ``seed`` and ``draft_logits``.
        expanded_idx_mapping: int32 or int64 ``[L]``, the same for each row.
        expanded_local_pos: int32 or int64 ``[L]``, number of the row within its request, from 0.
        temperature: floating ``[M]``, >= 0.
        seed: int64 ``[M]``.
        num_speculative_steps: S, the most drafts to accept.
        synthetic_conditional_rates: None.
        use_fp64: unused.
        use_block_verification: False.
        backend: as in :func:`cerberus_kernels.verify_tree`.

    Returns:
        ``(sampled, num_sampled)``: int64 ``[R, S + 1]``, the accepted drafts, the token behind them, then -1; int32
        ``[R]``, their number, so at least 1.

    Raises:
        ValueError: wrong dtype, shape or device, an option that is refused, or what ``verify_tree`` refuses.

    Example:
        >>> import torch
        >>> from cerberus_kernels.compat import vllm
        >>> logits = torch.nn.functional.one_hot(torch.tensor([5, 2, 8, 6]), 9).float()  # two drafts, then none
        >>> rows = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0])
        >>> sampled, num_sampled = vllm.rejection_sample(
        ...     logits, None, torch.tensor([7, 5, 3, 4]), torch.tensor([0, 3, 4]), torch.tensor([10, 11, 12, 20]),
        ...     torch.tensor([0, 1]), *rows, torch.zeros(2), torch.zeros(2, dtype=torch.int64), 2)
        >>> sampled.tolist(), num_sampled.tolist()
        ([[5, 2, -1], [6, -1, -1]], [2, 1])
    """
    op = "rejection_sample"
    if synthetic_conditional_rates is not None:
        refuse(op, "synthetic_conditional_rates", "None: drafts are never accepted at made-up rates", "a tensor")
    if use_block_verification:
        refuse(op, "use_block_verification", "False: each draft is judged by itself", True)
    if num_speculative_steps < 0:
        refuse(op, "num_speculative_steps", ">= 0", num_speculative_steps)
    check(op, "target_logits", target_logits, ndim=2, dtypes=FLOATS)
    (rows, vocab_size), device = target_logits.shape, target_logits.device
    check(op, "cu_num_logits", cu_num_logits, ndim=1, dtypes=INTEGERS, device=device)
    if cu_num_logits.shape[0] < 1:
        refuse(op, "cu_num_logits", "of shape [R + 1]", list(cu_num_logits.shape))
    per_row = {"draft_sampled": draft_sampled, "pos": pos, "expanded_idx_mapping": expanded_idx_mapping}
    for name, tensor in {**per_row, "expanded_local_pos": expanded_local_pos}.items():
        check(op, name, tensor, dtypes=INTEGERS, shape=(rows,), device=device)
    requests = cu_num_logits.shape[0] - 1
    check(op, "idx_mapping", idx_mapping, dtypes=INTEGERS, shape=(requests,), device=device)
    check(op, "temperature", temperature, ndim=1, dtypes=(*FLOATS, torch.float64), device=device)
    check(op, "seed", seed, dtypes=(torch.int64,), shape=temperature.shape, device=device)

    draft_probs = None
    if draft_logits is not None:
        shape = (temperature.shape[0], None, None)
        check(op, "draft_logits", draft_logits, dtypes=FLOATS, shape=shape, device=device)
        if draft_logits.shape[1] < num_speculative_steps:
            refuse(op, "draft_logits", f"of at least {num_speculative_steps} steps", list(draft_logits.shape))
        vocab_size = min(vocab_size, draft_logits.shape[2])
        if num_speculative_steps > 0:
            # row i holds what draft i was sampled from; the newest token's own row is not read
            step = (expanded_local_pos.long() - 1).clamp(0, draft_logits.shape[1] - 1)
            drawn_from = draft_logits[expanded_idx_mapping.long(), step, :vocab_size]
            draft_probs = torch.softmax(drawn_from, 1, dtype=torch.float32)
    slot = idx_mapping.long()
    greedy = temperature[slot] == 0
    if device.type == "cpu" and not bool((temperature[slot] >= 0).all()):
        refuse(op, "temperature", ">= 0", temperature[slot].tolist())
    verdict = verify_tree(
        target_logits,
        draft_sampled,
        (expanded_local_pos - 1).to(torch.int32),
        mode="sample" if draft_probs is None else "rejection",
        temperature=(~greedy).to(torch.float32),
        drafting="deterministic" if draft_probs is None else "iid",
        draft_probs=draft_probs,
        seed=seed[slot],
        position=pos[cu_num_logits[:-1].long()].long() + 1,
        cu_nodes=cu_num_logits.to(torch.int32),
        vocab_size=vocab_size,
        max_depth=num_speculative_steps,
        backend=backend,
    )
    return verdict.tokens.long(), verdict.num_accepted + 1
