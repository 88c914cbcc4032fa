"""One pool of threads: a torch matmul and an operator in turns take no longer than the two apart.

Both are small enough to stay in a cache together: else each would drive the other's inputs out of it.
"""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.bench_verify_tree import inputs as verify_inputs
from bench.conftest import same


@functools.lru_cache(maxsize=1)
def inputs(operator: str):
    generator = torch.Generator().manual_seed(0)
    if operator == "head_topk":
        matrices = torch.randn(256, 512, generator=generator), torch.randn(512, 512, generator=generator)
        arguments = (torch.randn(4, 512, generator=generator), torch.randn(2048, 512, generator=generator), 8)
    else:
        matrices = torch.randn(256, 256, generator=generator), torch.randn(256, 256, generator=generator)
        arguments = verify_inputs(1, 49152, "float32")
    return matrices, arguments


@pytest.mark.parametrize("case", ["torch_matmul", "native", "native_in_turns"])
@pytest.mark.parametrize("operator", ["head_topk", "verify_tree"])
def test_threads(compare, operator, case):
    (left, right), arguments = inputs(operator)
    run = functools.partial(getattr(ck, operator), *arguments)

    def product():
        return left @ right

    def both():
        return product(), run(backend="native")

    calls = {"torch_matmul": product, "native": functools.partial(run, backend="native"), "native_in_turns": both}
    product_right = (left.double() @ right.double()).float()

    def agree(found, truth):
        if case != "native":
            torch.testing.assert_close(
                found if case == "torch_matmul" else found[0], product_right, rtol=1e-4, atol=1e-3
            )
        if case != "torch_matmul":
            same(found if case == "native" else found[1], truth)

    group = f"threads {operator} and torch's matmul, threads={torch.get_num_threads()}"
    compare(group, calls, case, agree, expected=functools.partial(run, backend="reference"))
