"""verify_tree: the native code against the specification, and its promise of the same bits everywhere."""

from __future__ import annotations

import pytest
import torch
from verify_cases import FLOATS, assert_same, int32, random_case

import cerberus_kernels as ck
from cerberus_kernels.testing import NODE_COUNTS, available_isa_levels, isa_level, random_parents, tree_cases


@pytest.mark.parametrize("mode", ["greedy", "typical"])
@pytest.mark.parametrize("num_nodes", NODE_COUNTS)
def test_native_agrees_with_reference(num_nodes, mode):
    cases = list(tree_cases(num_nodes))
    for index, (_, parents) in enumerate(cases if num_nodes < 65 else cases[3:]):
        vocab_size, dtype = (1, 15, 97, 1031, 2051)[index], FLOATS[(index + num_nodes) % 3]
        logits, drafts = random_case(2, parents, vocab_size, dtype, seed=index)
        keywords = {"mode": mode, "seed": index, "position": 5 * index}
        expected = ck.verify_tree(logits, drafts, int32(parents), backend="reference", **keywords)
        assert_same(ck.verify_tree(logits, drafts, int32(parents), backend="native", **keywords), expected)


FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.7, "top_k": 5},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.95, "temperature": 1.3},
    {"min_p": 0.05},
    {"top_k": 400, "top_p": 0.9, "min_p": 0.02, "temperature": 2.0},
    {"epsilon": 0.0, "top_k": 3},
    {"epsilon": 0.0, "delta": 0.0, "temperature": 3.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_native_agrees_with_reference_under_filters(filters, dtype):
    parents = random_parents(24, seed=2)
    for vocab_size in (7, 1024, 3001):
        logits, drafts = random_case(3, parents, vocab_size, dtype, seed=vocab_size)
        keywords = {"mode": "typical", "seed": torch.arange(3), "position": 17, **filters}
        expected = ck.verify_tree(logits, drafts, int32(parents), backend="reference", **keywords)
        assert_same(ck.verify_tree(logits, drafts, int32(parents), backend="native", **keywords), expected)


@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_bits_do_not_depend_on_level_threads_or_batch(mode):
    parents = random_parents(6, seed=4)
    logits, drafts = random_case(3, parents, 300_007, torch.bfloat16)  # long enough to be shared among threads
    keywords = {"mode": mode, "temperature": 1.5, "top_p": 0.9, "delta": 0.9, "backend": "native"}
    seeds = torch.arange(3)
    expected = ck.verify_tree(logits, drafts, int32(parents), seed=seeds, **keywords)
    threads = torch.get_num_threads()
    try:
        for level in available_isa_levels():
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                with isa_level(level):
                    together = ck.verify_tree(logits, drafts, int32(parents), seed=seeds, **keywords)
                    alone = [
                        ck.verify_tree(logits[b : b + 1], drafts[b : b + 1], int32(parents), seed=b, **keywords)
                        for b in range(3)
                    ]
                for field, *fields in zip(expected, *alone, strict=True):
                    assert torch.equal(field, torch.cat(fields))
                assert all(torch.equal(a, b) for a, b in zip(together, expected, strict=True))
    finally:
        torch.set_num_threads(threads)
