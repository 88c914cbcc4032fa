"""What the native operators cost as one size grows: a curve and its exponent per operator and size.

The inputs of the longer curves lie in caches at their small end and in memory at their large one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cerberus_kernels as ck
from bench.bench_tree_attention import inputs as attention_inputs
from bench.measure import Work
from cerberus_kernels.testing import binary, random_parents

Problem = tuple[Callable[[str], object], Work]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def attention(nodes: int, prefix: int) -> Problem:
    arguments = attention_inputs.__wrapped__(nodes, prefix, 9, 3, 64, torch.bfloat16)
    moved = (2 * (prefix + nodes) * 3 + 2 * nodes * 9) * 64 * 2
    # About the pairs of a random tree: the prefix, and as many ancestors as the logarithm of the nodes.
    pairs = nodes * (prefix + nodes.bit_length())
    return lambda backend: ck.tree_attention(*arguments, backend=backend), Work(moved, 4 * 9 * 64 * pairs)


def topk(vocab: int, width: int, rows: int = 4) -> Problem:
    states, weight = normal(rows, width), normal(vocab, width)
    # Log-probabilities alone: equal bf16 products in another order may swap two tokens.
    return (
        lambda backend: ck.head_topk(states, weight, 10, backend=backend)[1:],
        Work(2 * vocab * width, 2 * rows * vocab * width),
    )


def verify(batch: int, nodes: int, vocab: int) -> Problem:
    logits = normal(batch, nodes, vocab)
    drafts = torch.zeros(batch, nodes, dtype=torch.int64)
    parents = torch.tensor(binary(nodes), dtype=torch.int32)
    # The first child of the root is right, and no other.
    logits[:, 0, 1] = 30.0
    drafts[:, 1:2] = 1
    logits[:, 1, 2] = 30.0
    return (
        lambda backend: ck.verify_tree(logits, drafts, parents, max_depth=8, backend=backend),
        Work(2 * batch * vocab * 2),
    )


def mask(nodes: int) -> Problem:
    parents = torch.tensor(random_parents(nodes, 0), dtype=torch.int32)
    words = nodes * ((nodes + 31) // 32)
    return lambda backend: ck.tree_mask(parents, backend=backend), Work(4 * (nodes + words))


def states(batch: int, width: int) -> Problem:
    hidden, weight, bias = normal(batch, width), normal(1, 4, width, 2 * width) / width, normal(1, 4, width)
    return (
        lambda backend: ck.head_states(hidden, weight, bias, root_embedding=hidden, backend=backend),
        Work(2 * weight.numel(), 2 * batch * weight.numel()),
    )


def commit(batch: int) -> Problem:
    caches = [normal(8, batch, 64, 3, 64) for _ in range(2)]
    path = torch.tensor([[0, 4, 9, 11]] * batch, dtype=torch.int32)
    accepted, prefix = (torch.full((batch,), value, dtype=torch.int32) for value in (3, 40))
    moved = 2 * 8 * batch * 3 * 3 * 64 * 2

    def run(backend: str):
        """Sources lie past the targets: a repeated call does the same again."""
        lens = ck.commit_kv(*caches, path, accepted, prefix, backend=backend)
        return lens, *(cache[:, :, 41:44] for cache in caches)

    return run, Work(2 * moved)


def linear(rows: int) -> Problem:
    x, packed = normal(rows, 576), ck.pack_linear(normal(1536, 576) / 24)
    return lambda backend: ck.packed_linear(x, packed, backend=backend), Work(2 * 1536 * 576, 2 * rows * 1536 * 576)


def gate(vocab: int) -> Problem:
    logits = normal(1, vocab)
    return lambda backend: ck.gate(None, logits=logits, threshold=2.0, backend=backend).score, Work(2 * vocab)


SWEEPS: dict[tuple[str, str], tuple[tuple[int, ...], Callable[[int], Problem]]] = {
    ("tree_attention, S = 1024", "N"): ((1, 4, 16, 64, 256), lambda n: attention(n, 1024)),
    ("tree_attention, N = 32", "S"): ((256, 1024, 4096, 16384), lambda s: attention(32, s)),
    ("head_topk, H = 576, R = 4", "V"): ((8192, 32768, 131072), lambda v: topk(v, 576)),
    ("head_topk, V = 16384, R = 4", "H"): ((256, 1024, 4096), lambda h: topk(16384, h)),
    ("head_topk, V = 16384, H = 576", "R"): ((1, 4, 16, 64), lambda r: topk(16384, 576, r)),
    ("verify_tree greedy, B = 1, N = 32", "V"): ((8192, 32768, 131072), lambda v: verify(1, 32, v)),
    ("verify_tree greedy, B = 1, V = 32768", "N"): ((4, 16, 64, 256), lambda n: verify(1, n, 32768)),
    ("verify_tree greedy, N = 32, V = 32768", "B"): ((1, 4, 16), lambda b: verify(b, 32, 32768)),
    ("tree_mask, B = 1", "N"): ((32, 128, 512, 2048), mask),
    ("head_states, L = 1, K = 4, B = 1", "H"): ((256, 512, 1024, 2048), lambda h: states(1, h)),
    ("head_states, L = 1, K = 4, H = 576", "B"): ((1, 4, 16), lambda b: states(b, 576)),
    ("commit_kv, 8 layers", "B"): ((1, 4, 16, 64), commit),
    ("packed_linear, 1536 x 576", "T"): ((1, 4, 16, 64, 256), linear),
    ("gate entropy of logits, B = 1", "V"): ((8192, 32768, 131072), gate),
}
POINTS = [(name, variable, size) for (name, variable), (sizes, _) in SWEEPS.items() for size in sizes]


@pytest.mark.parametrize(("name", "variable", "size"), POINTS, ids=lambda value: str(value).replace(" ", ""))
def test_scaling(compare, name, variable, size):
    run, work = SWEEPS[name, variable][1](size)
    calls = {"native": lambda: run("native"), "reference": lambda: run("reference")}
    compare(f"{name}, over {variable}", calls, "native", work=work, sweep=(name, variable, size))
