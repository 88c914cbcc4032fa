"""What a call of each operator costs before any work: the smallest inputs, new outputs and ``out=``, against 5 us."""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.measure import Work

NODES, WIDTH, VOCAB = 2, 8, 16
WITH_OUT = {"tree_attention", "verify_tree"}


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def problems() -> dict[str, tuple]:
    """Operator -> its function's arguments, then keywords."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    parents, lens, cache = int32([-1, 0]), int32([1]), normal(1, 4, 1, WIDTH)
    hidden, vocab_weight = normal(1, WIDTH), normal(VOCAB, WIDTH)
    return {
        "tree_mask": (parents,),
        "tree_attention": (normal(1, NODES, 1, WIDTH), cache, cache, ck.tree_mask(parents), lens),
        "head_states": (hidden, normal(1, 1, WIDTH, WIDTH), normal(1, 1, WIDTH)),
        "head_topk": (hidden, vocab_weight, 2),
        "head_loss": (normal(2, 1, WIDTH), vocab_weight, torch.tensor([[1], [2]])),
        "gate": (hidden, {"entropy": torch.tensor([1.0]), "threshold": 2.0}),
        "grow_tree": (normal(1, 2, 3).log_softmax(-1).sort(descending=True).values, 4),
        "verify_tree": (normal(1, NODES, VOCAB), torch.tensor([[1, 2]]), parents),
        "commit_kv": (cache[None], cache[None].clone(), int32([[0, 1]]), lens, lens),
        "packed_linear": (hidden, ck.pack_linear(vocab_weight)),
    }


CASES = [(name, case) for name in problems() for case in ("native", "reference")]
CASES += [(name, "native_out") for name in sorted(WITH_OUT)]


@pytest.mark.parametrize(("operator", "case"), sorted(CASES), ids=["-".join(case) for case in sorted(CASES)])
def test_overhead(compare, operator, case):
    arguments = problems()[operator]
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    call = functools.partial(getattr(ck, operator), *[a for a in arguments if not isinstance(a, dict)], **options)
    calls = {
        "native": lambda: call(backend="native"),
        "reference": lambda: call(backend="reference"),
    }
    if operator in WITH_OUT:
        out = call(backend="native")
        calls["native_out"] = lambda: call(backend="native", out=out)
    compare(f"{operator} overhead", calls, case, work=Work(0))
