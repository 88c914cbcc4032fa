"""verify_tree: hand-worked values, rows that are no distribution, tokens that are no ids."""

from __future__ import annotations

import math

import pytest
import torch
from verify_cases import FLOATS, MODES, assert_same, expecting, int32, log_rows, one_hot_rows, random_case, rule, some

import cerberus_kernels as ck
from cerberus_kernels.testing import T5

NAN, INF = math.nan, math.inf


# Hand-worked values


def test_first_draft_is_judged_by_the_root_row(backend):  # VER-07
    rows = one_hot_rows([5, 2], 8)
    rejected = ck.verify_tree(rows, int32([[1, 3]]), int32([-1, 0]), backend=backend)
    assert rejected.num_accepted.tolist() == [0]
    assert rejected.tokens.tolist() == [[5, -1]]
    accepted = ck.verify_tree(rows, int32([[1, 5]]), int32([-1, 0]), backend=backend)
    assert accepted.num_accepted.tolist() == [1]
    assert accepted.tokens.tolist() == [[5, 2]]


@pytest.mark.parametrize("mode", MODES)
def test_matches_below_a_rejected_node_do_not_count(backend, mode):  # VER-08
    rows, drafts = one_hot_rows([5, 9, 2, 4, 11], 12) * 4, int32([[7, 3, 5, 9, 2]])
    verdict = ck.verify_tree(rows, drafts, int32(T5), **rule(mode, drafts, 12), backend=backend)
    assert verdict.path.tolist() == [[0, 2, 4, -1, -1]]
    assert verdict.tokens.tolist() == [[5, 2, 11, -1, -1]]
    rows, drafts = one_hot_rows([1, 2, 3, 4, 5, 6], 8) * 4, int32([[0, 1, 2, 7, 4, 5]])
    chain = ck.verify_tree(rows, drafts, int32([-1, 0, 1, 2, 3, 4]), **rule(mode, drafts, 8), backend=backend)
    assert chain.num_accepted.tolist() == [2]
    assert chain.tokens.tolist() == [[1, 2, 3, -1, -1, -1]]


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_go_to_the_lowest_id_in_every_batch(backend, dtype, mode):  # VER-09
    row = torch.full((9,), 1.0)
    row[[2, 6]] = 3.25
    requests = {"native": 1000, "reference": 40}.get(backend, 6 if dtype == torch.float32 else 2)
    logits = row.expand(requests, 2, 9).to(dtype)
    drafts, parents = int32([[0, 6], [0, 2]]).repeat(requests // 2, 1), int32([-1, 0])
    keys = {**rule(mode, drafts, 9), "top_p": 0.9, "seed": torch.arange(requests), "backend": backend}
    cold = ck.verify_tree(logits, drafts, parents, temperature=0.0, **keys)
    assert (cold.tokens[:, 0] == 2).all()
    assert cold.num_accepted.tolist() == [0, 1] * (requests // 2)
    mixed = ck.verify_tree(logits, drafts, parents, temperature=torch.tensor([0.0, 0.8]).repeat(requests // 2), **keys)
    assert (mixed.tokens[::2, 0] == 2).all()
    if requests > 2:
        assert ({2} if mode == "typical" else {2, 6}) <= set(mixed.tokens[1::2, 0].tolist())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-6, 1e-4])
@pytest.mark.parametrize("mode", MODES[1:])
def test_tiny_temperatures_are_greedy(backend, mode, dtype, temperature):  # VER-10
    spread = torch.linspace(-60, 60, 33)
    extreme = torch.zeros(33)
    extreme[3], extreme[7] = 6e4, -6e4
    logits = torch.stack([spread, extreme, spread.flip(0)]).unsqueeze(0).to(dtype)
    drafts, parents = int32([[0, 32, 3]]), int32([-1, 0, 1])
    verdict = ck.verify_tree(
        logits, drafts, parents, temperature=temperature, **rule(mode, drafts, 33), backend=backend
    )
    assert_same(verdict, ck.verify_tree(logits, drafts, parents, backend=backend))
    assert verdict.tokens.tolist() == [[32, 3, 0]]


@pytest.mark.parametrize("mode", MODES[2:])
def test_the_temperature_is_not_ignored(backend, mode):  # VER-13
    logits = torch.randn(3, 5, 257, generator=torch.Generator().manual_seed(1))
    drafts = torch.randint(257, (3, 5), generator=torch.Generator().manual_seed(2))
    drafts[:, 1] = logits[:, 0].argmax(-1)
    keys = {**rule(mode, drafts, 257), "seed": torch.tensor([3, 4, 5]), "backend": backend}
    cold = ck.verify_tree(logits, drafts, int32(T5), temperature=0.0, **keys)
    warm = ck.verify_tree(logits, drafts, int32(T5), temperature=1.5, **keys)
    mixed = ck.verify_tree(logits, drafts, int32(T5), temperature=torch.tensor([0.0, 1.5, 0.0]), **keys)
    assert warm.tokens[1, 0] != cold.tokens[1, 0]
    assert cold.tokens[:, 0].tolist() == logits[:, 0].argmax(-1).tolist()
    for field, *sources in zip(mixed, cold, warm, strict=True):
        assert torch.equal(field, torch.stack([sources[0][0], sources[1][1], sources[0][2]]))
    other = ck.verify_tree(logits, drafts, int32(T5), temperature=1.5, **{**keys, "backend": "native"})
    assert_same(warm, other)


@pytest.mark.parametrize("mode", MODES)
def test_a_rejection_still_emits_the_models_token(backend, mode):  # VER-11
    rows, parents = one_hot_rows([1, 2, 3, 4, 5], 8) * 4, int32([-1, 0, 1, 2, 3])
    for drafts, tokens in (([0, 1, 2, 7, 4], [1, 2, 3, -1, -1]), ([0, 7, 2, 3, 4], [1, -1, -1, -1, -1])):
        drafts = int32([drafts])
        verdict = ck.verify_tree(rows, drafts, parents, **rule(mode, drafts, 8), backend=backend)
        assert verdict.tokens.tolist() == [tokens]


@pytest.mark.parametrize(
    ("row", "accepted"),
    [
        ([0, 0, 1, 0], [2]),
        ([1 / 32000] * 32000, [0, 1, 17, 31999]),
        ([0.38, 0.28, 0.20, 0.08, 0.06], [0, 1, 2, 3]),
        ([0, 0.5, 0.5], [1, 2]),
    ],
)
def test_typical_accept_sets(backend, row, accepted):  # VER-12
    ids = range(len(row)) if len(row) < 100 else (0, 1, 17, 31999)[: some(backend, 4, 1)]
    for token in ids:
        verdict = ck.verify_tree(
            log_rows(row, row), int32([[0, token]]), int32([-1, 0]), mode="typical", backend=backend
        )
        assert verdict.num_accepted.tolist() == [int(token in accepted)]
        assert verdict.tokens[0, 0] in accepted or len(row) > 100
        probs = torch.tensor(row, dtype=torch.float64)
        assert verdict.entropy.item() == pytest.approx(torch.special.entr(probs).sum().item(), abs=1e-5)


def test_typical_takes_the_longest_then_likeliest_then_first(backend):
    parents = int32([-1, 0, 0, 1, 2])
    row = [0.5, 0.3, 0.2]
    likelier = ck.verify_tree(
        log_rows(row, row, row, row, row), int32([[0, 2, 1, 0, 0]]), parents, mode="typical", backend=backend
    )
    assert likelier.path[0, :3].tolist() == [0, 2, 4]
    equal = ck.verify_tree(
        log_rows(row, row, row, row, row), int32([[0, 1, 1, 0, 0]]), parents, mode="typical", backend=backend
    )
    assert equal.path[0, :3].tolist() == [0, 1, 3]
    longer = ck.verify_tree(
        log_rows(row, row, row, row, row), int32([[0, 0, 2, -1, 2]]), parents, mode="typical", backend=backend
    )
    assert longer.path[0, :3].tolist() == [0, 2, 4]


# Rows that are no distribution, tokens that are no ids


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", MODES)
def test_nan_and_empty_rows_fall_back_to_a_token(backend, mode, dtype):  # VER-01
    vocab_size, parents = 32003 if dtype == torch.bfloat16 else some(backend, 32003, 33), int32(T5)
    drafts = int32([[7, 3, 5, 9, 2]])
    keys = {**rule(mode, drafts, vocab_size), "backend": backend}
    logits = torch.randn(1, 5, vocab_size).to(dtype)
    logits[0, 0] = NAN
    verdict = ck.verify_tree(logits, drafts, parents, **keys)
    assert verdict.tokens.tolist() == [[0, -1, -1, -1, -1]]
    assert verdict.status.tolist() == [ck.VerifyStatus.NAN_ROW | ck.VerifyStatus.NO_FINITE_ENTRY]
    assert verdict.entropy.isnan().all()
    logits[0, 0] = -INF
    empty = ck.verify_tree(logits, drafts, parents, **keys)
    assert empty.tokens.tolist() == [[0, -1, -1, -1, -1]]
    assert empty.status.tolist() == [ck.VerifyStatus.NO_FINITE_ENTRY]
    logits[0, 0], logits[0, 0, 5], logits[0, 0, 9], logits[0, 0, -1] = -1.0, 50.0, 50.0, NAN
    partial = ck.verify_tree(logits, drafts, parents, **keys)
    assert partial.tokens.tolist() == [[5, -1, -1, -1, -1]]  # child 2 holds 5, and is not accepted
    assert partial.num_accepted.tolist() == [0]
    assert partial.status.tolist() == [ck.VerifyStatus.NAN_ROW]
    logits[0, 0], logits[0, 0, 5], logits[0, 2], logits[0, 2, 9] = -20.0, 20.0, INF, -INF
    below = ck.verify_tree(logits, drafts, parents, **keys)
    assert below.tokens.tolist() == [[5, 0, -1, -1, -1]]  # node 2 is accepted, its row is all but infinite
    assert below.status.tolist() == [ck.VerifyStatus.NO_FINITE_ENTRY]
    assert below.entropy.isnan().all()


@pytest.mark.parametrize("mode", MODES)
def test_infinite_entries(backend, mode):
    drafts, parents = int32([[0, 6]]), int32([-1, 0])
    keys = {**rule(mode, drafts, 8), "backend": backend}
    logits = one_hot_rows([4, 2], 8) * 4
    logits[0, 0, :3] = -INF
    logits[0, 0, 6] = INF
    verdict = ck.verify_tree(logits, drafts, parents, epsilon=0.6, delta=0.9, **keys)
    assert verdict.tokens.tolist() == [[6, 2]]
    assert verdict.status.tolist() == [0]
    logits[0, 1] = 0.0
    logits[0, 1, [5, 7]] = INF
    tokens = set()
    for seed in range(some(backend, 20, 6)):
        verdict = ck.verify_tree(logits, drafts, parents, seed=seed, **keys)
        tokens.add(verdict.tokens[0, 1].item())
        assert verdict.entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    assert tokens == ({5} if mode == "greedy" else {5, 7})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_rows_off_the_path_do_not_matter(backend, mode, poison):  # T9
    logits, drafts = (one_hot_rows([5, 9, 2, 4, 11], 12) * 4).to(torch.float16), int32([[7, 3, 5, 9, 2]])
    keys = {**rule(mode, drafts, 12), "backend": backend}
    expected = ck.verify_tree(logits, drafts, int32(T5), **{**keys, "backend": expecting(backend)})
    assert expected.path[0, :3].tolist() == [0, 2, 4]
    logits[0, [1, 3]] = poison
    assert_same(ck.verify_tree(logits, drafts, int32(T5), **keys), expected)


@pytest.mark.parametrize("mode", MODES)
def test_padding_drafts_are_never_matched(backend, mode):  # VER-15, DEC-08
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 6, 8, generator=generator) * 4
    logits[0, 4:] = 0.0
    logits[0, :4] = one_hot_rows([5, 2, 5, 1], 8)[0] * 4
    drafts = int32([[3, 5, 2, 5, -1, -1], [3, 5, 2, 5, 1, 1]])
    parents = int32([-1, 0, 1, 2, 3, 4])
    keys = rule(mode, drafts, 8)
    if mode == "rejection":
        keys["draft_probs"][0, 4:] = 0.0
    alone = {**keys, "draft_probs": keys["draft_probs"][1:]} if mode == "rejection" else keys
    for seed in range({"native": 1000, "reference": 20}.get(backend, 2)):
        both = ck.verify_tree(logits, drafts, parents, **keys, seed=seed, backend=backend)
        assert both.tokens[0].tolist() == [5, 2, 5, 1, -1, -1]
        assert both.status[0] == 0
        if seed < 20:
            assert_same(
                ck.verify_tree(logits[1:], drafts[1:], parents, **alone, seed=seed, backend=backend), both, slice(1, 2)
            )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_drafts_outside_the_vocabulary(backend, mode, dtype):
    outside = [-2, 12, 2**31 - 1, -(2**31)] + ([2**32 + 5, -(2**63)] if dtype == torch.int64 else [])
    rows = one_hot_rows([5] * (len(outside) + 1), 16) * 4
    drafts = torch.tensor([[-9, *outside]], dtype=dtype)
    parents = int32([-1] + [0] * len(outside))
    keys = rule(mode, drafts, 12, columns=14)
    verdict = ck.verify_tree(rows, drafts, parents, vocab_size=12, **keys, backend=backend)
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.tokens[0, 0] == 5
    assert verdict.status.tolist() == [ck.VerifyStatus.TOKEN_OUT_OF_RANGE]


def test_a_token_zero_after_a_short_leaf_is_not_accepted(backend):  # T1
    rows = one_hot_rows([5, 0, 0, 3, 0], 8)  # the best token below the leaf is id 0
    drafts = int32([[0, 5, 2, 4, 0]])
    parents = int32([-1, 0, 0, 2, 3])  # node 1 is a leaf of depth 1, the deepest path has depth 3
    verdict = ck.verify_tree(rows, drafts, parents, backend=backend)
    assert verdict.tokens.tolist() == [[5, 0, -1, -1, -1]]
    assert verdict.num_accepted.tolist() == [1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_padded_vocabulary_is_ignored(backend, mode, dtype):  # HED-02
    vocab_size = some(backend, 49155, 1027)
    batch = some(backend, 2, 1)
    logits, drafts = random_case(batch, list(T5), vocab_size, dtype)
    padded = torch.full((batch, 5, vocab_size + 61), 50.0, dtype=dtype)
    padded[..., :vocab_size] = logits
    expected = ck.verify_tree(logits, drafts, int32(T5), **rule(mode, drafts, vocab_size), backend=expecting(backend))
    assert (expected.tokens < vocab_size).all()
    keys = {**rule(mode, drafts, vocab_size, columns=vocab_size + 45), "vocab_size": vocab_size, "backend": backend}
    assert_same(ck.verify_tree(padded, drafts, int32(T5), **keys), expected)
    padded[..., vocab_size:] = NAN
    assert_same(ck.verify_tree(padded, drafts, int32(T5), **keys), expected)
