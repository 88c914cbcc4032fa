"""verify_tree: native code and Triton against the specification, and native code's same bits everywhere."""

from __future__ import annotations

import pytest
import torch
from verify_cases import FLOATS, assert_same, int32, nearby_rows, random_case, some

import cerberus_kernels as ck
from cerberus_kernels.testing import NODE_COUNTS, available_isa_levels, isa_level, random_parents, tree_cases

SCHEMES = [
    ("greedy", None),
    ("typical", None),
    ("sample", None),
    ("rejection", "iid"),
    ("rejection", "without_replacement"),
]
IDS = ["greedy", "typical", "sample", "iid", "without_replacement"]


def way(scheme, logits, parents, dtype=torch.float32) -> dict:
    """Arguments of a mode, and of its drafting if it has one."""
    mode, drafting = scheme
    if drafting is None:
        return {"mode": mode}
    return {"mode": mode, "drafting": drafting, "draft_probs": nearby_rows(logits, parents, dtype)}


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize("num_nodes", NODE_COUNTS)
def test_native_agrees_with_reference(num_nodes, scheme):
    cases = list(tree_cases(num_nodes))
    for index, (_, parents) in enumerate(cases if num_nodes < 65 else cases[3:]):
        vocab_size, dtype = (1, 15, 97, 1031, 2051)[index], FLOATS[(index + num_nodes) % 3]
        logits, drafts = random_case(2, parents, vocab_size, dtype, seed=index)
        keywords = {**way(scheme, logits, parents, FLOATS[index % 3]), "seed": index, "position": 5 * index}
        expected = ck.verify_tree(logits, drafts, int32(parents), backend="reference", **keywords)
        assert_same(ck.verify_tree(logits, drafts, int32(parents), backend="native", **keywords), expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize("vocab_size", [3, 32, 33, 1000, 32003])
def test_triton_agrees_with_reference(interpreter, vocab_size, scheme):
    """Each vocabulary with another tree and dtype; the greatest is more than a chunk."""
    index = (3, 32, 33, 1000, 32003).index(vocab_size)
    parents = random_parents((65, 33, 257, 31, 9)[index], seed=index)
    logits, drafts = random_case(1, parents, vocab_size, FLOATS[index % 3], seed=index)
    keywords = {**way(scheme, logits, parents, FLOATS[index % 3]), "seed": index, "position": 2**33 + index}
    expected = ck.verify_tree(logits, drafts, int32(parents), backend="reference", **keywords)
    assert_same(ck.verify_tree(logits, drafts, int32(parents), backend="triton", **keywords), expected)


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


@pytest.mark.parametrize("scheme", SCHEMES[1:], ids=IDS[1:])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_native_agrees_with_reference_under_filters(filters, dtype, scheme):
    parents = random_parents(24, seed=2)
    for vocab_size in (7, 1024, 3001):
        logits, drafts = random_case(3, parents, vocab_size, dtype, seed=vocab_size)
        keywords = {**way(scheme, logits, parents, dtype), "seed": torch.arange(3), "position": 17, **filters}
        expected = ck.verify_tree(logits, drafts, int32(parents), backend="reference", **keywords)
        assert_same(ck.verify_tree(logits, drafts, int32(parents), backend="native", **keywords), expected)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_triton_agrees_with_reference_under_filters(interpreter, filters):
    """Each filter with two schemes and vocabularies, and a dtype."""
    index = FILTERS.index(filters)
    parents = random_parents(7, seed=index)
    for turn, vocab_size in enumerate((7, 3001)):
        scheme, dtype = SCHEMES[1:][(index + turn) % 4], FLOATS[index % 3]
        logits, drafts = random_case(1, parents, vocab_size, dtype, seed=vocab_size)
        keywords = {**way(scheme, logits, parents, dtype), "seed": torch.arange(1), "position": 17, **filters}
        expected = ck.verify_tree(logits, drafts, int32(parents), backend="reference", **keywords)
        assert_same(ck.verify_tree(logits, drafts, int32(parents), backend="triton", **keywords), expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.9, "top_k": 1000, "top_p": 0.95}], ids=["plain", "filters"])
def test_native_agrees_with_reference_on_a_real_vocabulary(filters, scheme):
    parents = [-1, 0, 0, 1, 1, 3]
    logits, drafts = random_case(4, parents, 128256, torch.bfloat16, seed=6)
    keywords = {**way(scheme, logits, parents, torch.bfloat16), "seed": 9, "position": torch.arange(4), **filters}
    expected = ck.verify_tree(logits, drafts, int32(parents), backend="reference", **keywords)
    assert_same(ck.verify_tree(logits, drafts, int32(parents), backend="native", **keywords), expected)


def mixed_call(requests: int, parents: list[int], vocab_size: int, dtype: torch.dtype) -> dict:
    """A batch in which every request has a mode and parameters of its own."""
    logits, drafts = random_case(requests, parents, vocab_size, dtype, seed=1)
    generator = torch.Generator().manual_seed(2)

    def one_of(values) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (requests,), generator=generator)]

    return {
        "logits": logits, "draft_tokens": drafts, "parents": int32(parents).expand(requests, -1),
        "draft_probs": nearby_rows(logits, parents, dtype), "drafting": "iid", "mode": one_of([0, 1, 2, 3]),
        "temperature": one_of([0.0, 0.5, 1.0, 1.6]), "top_k": one_of([0, 0, 3, 50]), "top_p": one_of([1.0, 1.0, 0.8]),
        "min_p": one_of([0.0, 0.0, 0.05]), "epsilon": one_of([0.05, 0.3]), "delta": one_of([0.2, 0.8]),
        "seed": torch.randint(-(2**62), 2**62, (requests,), generator=generator),
        "position": torch.randint(2**40, (requests,), generator=generator),
        "num_nodes": torch.randint(1, len(parents) + 1, (requests,), generator=generator).int(),
    }  # fmt: skip


def only(call: dict, rows) -> dict:
    """The call for some of its requests."""
    return {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in call.items()}


@pytest.mark.parametrize("dtype", FLOATS)
def test_requests_of_every_kind_in_one_batch(backend, dtype):
    """Order and company change no bit of a request, and the other backend gives the same."""
    requests = some(backend, 40, 8)
    call = mixed_call(requests, random_parents(12, seed=8), 611, dtype)
    expected = ck.verify_tree(**call, backend=backend)
    assert len(set(call["mode"].tolist())) == 4 and expected.num_accepted.max() >= some(backend, 2, 1)
    order = torch.randperm(requests)[: some(backend, requests, 3)]
    for field, permuted in zip(expected, ck.verify_tree(**only(call, order), backend=backend), strict=True):
        assert torch.equal(field[order], permuted)
    for b in range(some(backend, requests, 1)):
        for field, alone in zip(expected, ck.verify_tree(**only(call, [b]), backend=backend), strict=True):
            assert torch.equal(field[b : b + 1], alone)
    assert_same(ck.verify_tree(**call, backend="reference" if backend != "reference" else "native"), expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@pytest.mark.parametrize("filters", [{}, {"top_k": 5000, "top_p": 0.9, "min_p": 1e-4}], ids=["plain", "filters"])
def test_bits_do_not_depend_on_level_threads_or_batch(scheme, filters):
    parents = random_parents(6, seed=4)
    logits, drafts = random_case(3, parents, 300_007, torch.bfloat16)  # long enough to be shared among threads
    probs = nearby_rows(logits, parents, torch.bfloat16)
    mode, drafting = scheme
    keywords = {"mode": mode, "temperature": 1.5, "delta": 0.9, "backend": "native", **filters}

    def verify(rows) -> ck.Verdict:
        drawn = {} if drafting is None else {"drafting": drafting, "draft_probs": probs[rows]}
        seeds = torch.arange(3)[rows]
        return ck.verify_tree(logits[rows], drafts[rows], int32(parents), seed=seeds, **drawn, **keywords)

    expected = verify(slice(None))
    threads = torch.get_num_threads()
    try:
        for level in available_isa_levels():
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                with isa_level(level):
                    together = verify(slice(None))
                    alone = [verify(slice(b, b + 1)) for b in range(3)]
                for field, *fields in zip(expected, *alone, strict=True):
                    assert torch.equal(field, torch.cat(fields))
                assert all(torch.equal(a, b) for a, b in zip(together, expected, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_a_mixed_batch_does_not_depend_on_level_or_threads():
    call = mixed_call(64, random_parents(12, seed=8), 4099, torch.float16)  # requests side by side
    expected = ck.verify_tree(**call, backend="native")
    threads = torch.get_num_threads()
    try:
        for level in available_isa_levels():
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                with isa_level(level):
                    verdict = ck.verify_tree(**call, backend="native")
                assert all(torch.equal(a, b) for a, b in zip(verdict, expected, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", ["typical", "sample"])
def test_a_temperature_that_makes_all_scores_equal_leaves_filters_to_the_ids(backend, mode):
    """(row - max) / T underflows to 0 for every token, so top_k=1 keeps id 0, which is not the greatest entry."""
    logits = torch.zeros(1, 1, 16)
    logits[0, 0, 12] = 1e-30
    for seed in range(5):
        verdict = ck.verify_tree(
            logits, int32([[0]]), int32([-1]), mode=mode, temperature=1e30, top_k=1, seed=seed, backend=backend
        )
        assert verdict.tokens.tolist() == [[0]]
