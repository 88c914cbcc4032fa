"""verify_tree in Triton: all four modes in one launch, one program per request, rows read as the walk comes to them."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton

from ....tree import first_malformed_node
from .. import reference
from ..parameters import PARAMETERS, Mode, check_rejection, check_rows
from .walks import verify_tree_kernel

_COUNT = len(PARAMETERS)
_PER_REQUEST = -1


def verify_tree(*args: Any) -> None:
    """The schema's arguments, then a Verdict's fields to fill.

    On a GPU nothing is read back: a malformed tree gives a status bit and the verdict of its root alone, and values of
    tensors are not checked. ``CERBERUS_VALIDATE=1`` checks them as on CPU tensors, at the cost of a host sync.
    """
    logits = args[0]
    if logits.device.type == "cpu" or os.environ.get("CERBERUS_VALIDATE") == "1":
        _check(*args)
    unchecked_verify_tree(*args)


def _check(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor | None,
    cu_nodes: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    vocab_size: int,
    max_depth: int,
    drafting: int,
    *rest: Any,
) -> None:
    """Refuse what the reference refuses, in its words; rows of logits are not read for it."""
    for b, nodes in enumerate(reference.node_ranges(logits, num_nodes, cu_nodes)):
        tree = parents[nodes if parents.ndim == len(nodes) else nodes[-1]].tolist()
        bad = first_malformed_node(tree)
        if bad >= 0:
            reference.refuse_tree(tree, bad, b)
    rows = rest[_COUNT : 2 * _COUNT]
    check_rows(rows)
    check_rejection([rest[0]] if rows[0] is None else rows[0].tolist(), drafting, draft_probs)


def unchecked_verify_tree(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor | None,
    cu_nodes: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    vocab_size: int,
    max_depth: int,
    drafting: int,
    *rest: Any,
) -> None:
    """What :func:`verify_tree` launches."""
    scalars, rows, outputs = rest[:_COUNT], rest[_COUNT : 2 * _COUNT], rest[2 * _COUNT :]
    batch, nodes = outputs[1].shape[0], logits.shape[-2]
    if batch == 0:
        return
    ragged = cu_nodes is not None
    mode = _PER_REQUEST if rows[0] is not None else scalars[0]
    if rows[1] is None and scalars[1] == 0:
        mode = Mode.GREEDY
    if mode not in (_PER_REQUEST, Mode.REJECTION):
        draft_probs = None
    places = (nodes,) if ragged else (batch, nodes)

    def workspace(used: bool, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return torch.empty(shape, dtype=dtype, device=logits.device) if used else None

    judges = mode in (_PER_REQUEST, Mode.TYPICAL)
    parameters = [entry for pair in zip(scalars, rows, strict=True) for entry in _parameter(*pair)]
    constants, num_warps = launch_parameters(vocab_size, nodes)
    verify_tree_kernel[(batch,)](
        logits, draft_tokens, parents, num_nodes, cu_nodes, draft_probs, *parameters[1:], *outputs,
        workspace(judges, places, torch.int32), workspace(judges, places, torch.float64),
        workspace(draft_probs is not None, places, torch.int32),
        workspace(draft_probs is not None, (batch, vocab_size), torch.float32),
        nodes, vocab_size, max_depth, 0 if ragged else logits.stride(0), logits.stride(-2),
        0 if ragged else draft_tokens.stride(0), parents.stride(0) if parents.ndim == 2 else 0,
        0 if ragged or draft_probs is None else draft_probs.stride(0),
        0 if draft_probs is None else draft_probs.stride(-2),
        MODE=int(mode), DRAFTING=drafting, SELECTS=_selects(scalars, rows), **constants, num_warps=num_warps,
        enable_fp_fusion=False,  # noise as the CPU's to the bit
        **({} if torch.version.hip else {"maxnreg": 128}),  # all that 512 threads can have; left alone sm_80 takes half
    )  # fmt: skip


def _parameter(value: Any, rows: torch.Tensor | None) -> tuple[Any, torch.Tensor | None, int]:
    return value, rows, 0 if rows is None else rows.stride(0)


def _selects(scalars: tuple[Any, ...], rows: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether a request may have top_k or top_p, to go by what the host knows."""
    names = [parameter.name for parameter in PARAMETERS]
    top_k, top_p = names.index("top_k"), names.index("top_p")
    return rows[top_k] is not None or rows[top_p] is not None or scalars[top_k] > 0 or scalars[top_p] < 1


def launch_parameters(vocab_size: int, nodes: int) -> tuple[dict[str, int], int]:
    """Tokens a program takes at a time (a multiple of 256, the tile of the noise), nodes at a time, and warps.

    A request is one program, so it gets many warps: 4096 tokens are 16 for each of 256 threads, with 16-byte loads
    two in flight, and what a pass keeps per token still fits their registers.
    """
    chunk = max(256, min(4096, triton.next_power_of_2(vocab_size)))
    node_block = max(16, min(256, triton.next_power_of_2(nodes)))
    return {"CHUNK": chunk, "NODE_BLOCK": node_block}, 16 if chunk == 4096 else 4
