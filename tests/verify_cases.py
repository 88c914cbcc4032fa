"""Inputs and comparison that the tests of verify_tree share."""

from __future__ import annotations

import torch

import cerberus_kernels as ck

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


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


def assert_same(verdict: ck.Verdict, expected: ck.Verdict, rows=slice(None)) -> None:
    for name in ("tokens", "num_accepted", "path", "status"):
        torch.testing.assert_close(getattr(verdict, name), getattr(expected, name)[rows], rtol=0, atol=0)
    torch.testing.assert_close(verdict.entropy, expected.entropy[rows], rtol=2e-5, atol=2e-5, equal_nan=True)
