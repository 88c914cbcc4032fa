"""One pool of threads: a torch matmul and an operator in turns take no longer than the two apart."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck


@pytest.mark.parametrize("order", ["matmul alone", "operator alone", "in turns"])
def test_threads(benchmark, order):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1024, generator=generator)
    weight = torch.randn(1024, 1024, generator=generator)
    states = torch.randn(4, 512, generator=generator)
    vocab_weight = torch.randn(8192, 512, generator=generator)

    def run():
        for _ in range(4):
            if order != "operator alone":
                torch.mm(x, weight)
            if order != "matmul alone":
                ck.head_topk(states, vocab_weight, 8, backend="native")

    benchmark.group = f"threads={torch.get_num_threads()}: torch matmul and head_topk"
    benchmark.pedantic(run, rounds=20, iterations=1, warmup_rounds=2)
