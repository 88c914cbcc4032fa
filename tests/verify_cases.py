"""Inputs and comparison that the tests of verify_tree share."""

from __future__ import annotations

import torch

import cerberus_kernels as ck

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MODES = ("greedy", "typical", "sample", "rejection")


def some(backend: str, count: int, few: int) -> int:
    """How many cases to go through: few under Triton's interpreter, where a request takes a tenth of a second."""
    return few if backend == "triton" else count


def expecting(backend: str) -> str:
    """The backend that says what another call of ``backend`` must give: itself, unless it is the interpreter."""
    return "native" if backend == "triton" else backend


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def one_hot_rows(tokens, vocab_size: int) -> torch.Tensor:
    """logits [1, N, V] whose row i has its greatest entry at tokens[i]."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), vocab_size).float() * 8


def log_rows(*rows) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.float64).log().float()


def rule(mode: str, drafts: torch.Tensor, vocab_size: int, columns: int | None = None) -> dict:
    """Arguments that name the mode. Rejection gets rows that put half of their mass on the draft.

    Columns past the vocabulary and rows of tokens outside it are NaN; the root's is too.
    """
    if mode != "rejection":
        return {"mode": mode}
    probs = torch.full((*drafts.shape, columns or vocab_size), torch.nan)
    probs[..., :vocab_size] = 0.5 / vocab_size
    token = drafts.long().unsqueeze(-1)
    inside = (token >= 0) & (token < vocab_size)
    probs.scatter_add_(-1, token.clamp(0, vocab_size - 1), torch.full(token.shape, 0.5))
    probs = torch.where(inside, probs, torch.nan)
    probs[..., 0, :] = torch.nan
    return {"mode": mode, "drafting": "iid", "draft_probs": probs}


def random_case(batch: int, parents: list[int], vocab_size: int, dtype: torch.dtype, seed: int = 0):
    """Logits and drafts of which a good part is accepted: some drafts are made the row's best token."""
    generator = torch.Generator().manual_seed(seed)
    nodes = len(parents)
    logits = torch.randn(batch, nodes, vocab_size, generator=generator).mul(3).to(dtype)
    drafts = torch.randint(vocab_size, (batch, nodes), generator=generator)
    best = logits.float().argmax(-1)
    for node in range(1, nodes):
        copy = torch.rand(batch, generator=generator) < 0.7
        drafts[copy, node] = best[copy, parents[node]]
    return logits, drafts


def nearby_rows(logits: torch.Tensor, parents: list[int], dtype: torch.dtype = torch.float32, seed: int = 0):
    """Draft rows [B, N, V] that are like the target's at each node's parent; the root's is NaN."""
    generator = torch.Generator().manual_seed(seed)
    above = logits[:, [max(parent, 0) for parent in parents]].float()
    probs = torch.softmax(above + torch.randn(above.shape, generator=generator), -1)
    probs[:, 0] = torch.nan
    return probs.to(dtype)


def assert_same(verdict: ck.Verdict, expected: ck.Verdict, rows=slice(None)) -> None:
    for name in ("tokens", "num_accepted", "path", "status"):
        torch.testing.assert_close(getattr(verdict, name), getattr(expected, name)[rows], rtol=0, atol=0)
    torch.testing.assert_close(verdict.entropy, expected.entropy[rows], rtol=2e-5, atol=2e-5, equal_nan=True)
