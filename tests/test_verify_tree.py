"""verify_tree: hand-worked values, faults reported elsewhere, shapes and memory."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from verify_cases import FLOATS, assert_same, int32, random_case

import cerberus_kernels as ck
from cerberus_kernels.testing import T5, random_parents

NAN, INF = math.nan, math.inf


def one_hot_rows(tokens, vocab_size: int) -> torch.Tensor:
    """logits [1, N, V] whose row i has its greatest entry at tokens[i]."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), vocab_size).float() * 8


def log_rows(*rows) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.float64).log().float()


# Hand-worked values


def test_first_draft_is_judged_by_the_root_row(backend):  # VER-07
    rows = one_hot_rows([5, 2], 8)
    rejected = ck.verify_tree(rows, int32([[1, 3]]), int32([-1, 0]), backend=backend)
    assert rejected.num_accepted.tolist() == [0]
    assert rejected.tokens.tolist() == [[5, -1]]
    accepted = ck.verify_tree(rows, int32([[1, 5]]), int32([-1, 0]), backend=backend)
    assert accepted.num_accepted.tolist() == [1]
    assert accepted.tokens.tolist() == [[5, 2]]


@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_matches_below_a_rejected_node_do_not_count(backend, mode):  # VER-08
    rows = one_hot_rows([5, 9, 2, 4, 11], 12)
    verdict = ck.verify_tree(rows, int32([[7, 3, 5, 9, 2]]), int32(T5), mode=mode, backend=backend)
    assert verdict.path.tolist() == [[0, 2, 4, -1, -1]]
    assert verdict.tokens.tolist() == [[5, 2, 11, -1, -1]]
    chain = ck.verify_tree(
        one_hot_rows([1, 2, 3, 4, 5, 6], 8), int32([[0, 1, 2, 7, 4, 5]]), int32([-1, 0, 1, 2, 3, 4]), mode=mode,
        backend=backend,
    )  # fmt: skip
    assert chain.num_accepted.tolist() == [2]
    assert chain.tokens.tolist() == [[1, 2, 3, -1, -1, -1]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_go_to_the_lowest_id_in_every_batch(backend, dtype):  # VER-09
    row = torch.full((9,), 1.0)
    row[[2, 6]] = 3.25
    logits = row.expand(2, 2, 9).to(dtype)
    drafts, parents = int32([[0, 6], [0, 2]]), int32([-1, 0])
    for seed in range(10):
        alone = ck.verify_tree(
            logits[:1], drafts[:1], parents, mode="typical", temperature=0.0, top_p=0.9, seed=seed, backend=backend
        )
        assert alone.tokens.tolist() == [[2, -1]]
        mixed = ck.verify_tree(
            logits, drafts, parents, mode="typical", temperature=torch.tensor([0.0, 0.8]), top_p=0.9, seed=seed,
            backend=backend,
        )  # fmt: skip
        assert mixed.tokens[0].tolist() == [2, -1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(backend, dtype, temperature):  # VER-10
    spread = torch.linspace(-60, 60, 33)
    extreme = torch.zeros(33)
    extreme[3], extreme[7] = 6e4, -6e4
    logits = torch.stack([spread, extreme, spread.flip(0)]).unsqueeze(0).to(dtype)
    drafts, parents = int32([[0, 32, 3]]), int32([-1, 0, 1])
    verdict = ck.verify_tree(logits, drafts, parents, mode="typical", temperature=temperature, backend=backend)
    assert_same(verdict, ck.verify_tree(logits, drafts, parents, backend=backend))
    assert verdict.tokens.tolist() == [[32, 3, 0]]


def test_a_rejection_still_emits_the_models_token(backend):  # VER-11
    rows = one_hot_rows([1, 2, 3, 4, 5], 8) * 4
    parents = int32([-1, 0, 1, 2, 3])
    third_fails = ck.verify_tree(rows, int32([[0, 1, 2, 7, 4]]), parents, mode="typical", backend=backend)
    assert third_fails.tokens.tolist() == [[1, 2, 3, -1, -1]]
    first_fails = ck.verify_tree(rows, int32([[0, 7, 2, 3, 4]]), parents, mode="typical", backend=backend)
    assert first_fails.tokens.tolist() == [[1, -1, -1, -1, -1]]


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
    ids = range(len(row)) if len(row) < 100 else (0, 1, 17, 31999)
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
@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_nan_and_empty_rows_fall_back_to_a_token(backend, mode, dtype):  # VER-01
    vocab_size, parents = 32003, int32(T5)
    drafts = int32([[7, 3, 5, 9, 2]])
    logits = torch.randn(1, 5, vocab_size).to(dtype)
    logits[0, 0] = NAN
    verdict = ck.verify_tree(logits, drafts, parents, mode=mode, backend=backend)
    assert verdict.tokens.tolist() == [[0, -1, -1, -1, -1]]
    assert verdict.status.tolist() == [ck.VerifyStatus.NAN_ROW | ck.VerifyStatus.NO_FINITE_ENTRY]
    assert verdict.entropy.isnan().all()
    logits[0, 0] = -INF
    empty = ck.verify_tree(logits, drafts, parents, mode=mode, backend=backend)
    assert empty.tokens.tolist() == [[0, -1, -1, -1, -1]]
    assert empty.status.tolist() == [ck.VerifyStatus.NO_FINITE_ENTRY]
    logits[0, 0], logits[0, 0, 5], logits[0, 0, 9], logits[0, 0, 32002] = -1.0, 50.0, 50.0, NAN
    partial = ck.verify_tree(logits, drafts, parents, mode=mode, backend=backend)
    assert partial.tokens.tolist() == [[5, -1, -1, -1, -1]]  # child 2 holds 5, and is not accepted
    assert partial.num_accepted.tolist() == [0]
    assert partial.status.tolist() == [ck.VerifyStatus.NAN_ROW]


@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_infinite_entries(backend, mode):
    logits = one_hot_rows([4, 2], 8)
    logits[0, 0, :3] = -INF
    logits[0, 0, 6] = INF
    verdict = ck.verify_tree(
        logits, int32([[0, 6]]), int32([-1, 0]), mode=mode, epsilon=0.6, delta=0.9, backend=backend
    )
    assert verdict.tokens.tolist() == [[6, 2]]
    assert verdict.status.tolist() == [0]
    logits[0, 1] = 0.0
    logits[0, 1, [5, 7]] = INF
    verdict = ck.verify_tree(logits, int32([[0, 6]]), int32([-1, 0]), mode=mode, backend=backend)
    assert verdict.tokens[0, 1] in ((5,) if mode == "greedy" else (5, 7))
    assert verdict.entropy.item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("mode", ["greedy", "typical"])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_rows_off_the_path_do_not_matter(backend, mode, poison):  # T9
    logits = one_hot_rows([5, 9, 2, 4, 11], 12).to(torch.float16)
    drafts, parents = int32([[7, 3, 5, 9, 2]]), int32(T5)
    expected = ck.verify_tree(logits, drafts, parents, mode=mode, backend=backend)
    logits[0, [1, 3]] = poison
    assert_same(ck.verify_tree(logits, drafts, parents, mode=mode, backend=backend), expected)


@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_padding_drafts_are_never_matched(backend, mode):  # VER-15, DEC-08
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 6, 8, generator=generator) * 4
    logits[0, 4:] = 0.0
    logits[0, :4] = one_hot_rows([5, 2, 5, 1], 8)[0] * 4
    drafts = int32([[3, 5, 2, 5, -1, -1], [3, 5, 2, 5, 1, 1]])
    parents = int32([-1, 0, 1, 2, 3, 4])
    for seed in range(20):
        both = ck.verify_tree(logits, drafts, parents, mode=mode, seed=seed, backend=backend)
        assert both.tokens[0].tolist() == [5, 2, 5, 1, -1, -1]
        alone = ck.verify_tree(logits[1:], drafts[1:], parents, mode=mode, seed=seed, backend=backend)
        assert_same(alone, both, slice(1, 2))


@pytest.mark.parametrize("mode", ["greedy", "typical"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_drafts_outside_the_vocabulary(backend, mode, dtype):
    outside = [-2, 12, 2**31 - 1, -(2**31)] + ([2**32 + 5, -(2**63)] if dtype == torch.int64 else [])
    rows = one_hot_rows([5] * (len(outside) + 1), 16)
    drafts = torch.tensor([[-9, *outside]], dtype=dtype)
    parents = int32([-1] + [0] * len(outside))
    verdict = ck.verify_tree(rows, drafts, parents, mode=mode, vocab_size=12, backend=backend)
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


@pytest.mark.parametrize("mode", ["greedy", "typical"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_padded_vocabulary_is_ignored(backend, mode, dtype):  # HED-02
    logits, drafts = random_case(2, list(T5), 49155, dtype)
    padded = torch.full((2, 5, 49216), 50.0, dtype=dtype)
    padded[..., :49155] = logits
    verdict = ck.verify_tree(padded, drafts, int32(T5), mode=mode, vocab_size=49155, backend=backend)
    assert_same(verdict, ck.verify_tree(logits, drafts, int32(T5), mode=mode, backend=backend))
    padded[..., 49155:] = NAN
    assert_same(ck.verify_tree(padded, drafts, int32(T5), mode=mode, vocab_size=49155, backend=backend), verdict)


# Shapes and memory


@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_root_only_rows(backend, mode):
    rows = one_hot_rows([5], 8) * 4
    verdict = ck.verify_tree(rows, int32([[1]]), int32([-1]), mode=mode, backend=backend)
    assert verdict.tokens.tolist() == [[5]]
    assert verdict.path.tolist() == [[0]]
    assert verdict.num_accepted.tolist() == [0]


@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_max_depth_cuts_the_path(backend, mode):
    rows = one_hot_rows([1, 2, 3, 4], 8) * 4
    drafts, parents = int32([[0, 1, 2, 3]]), int32([-1, 0, 1, 2])
    for depth, tokens in ((0, [1]), (2, [1, 2, 3]), (5, [1, 2, 3, 4, -1, -1])):
        verdict = ck.verify_tree(rows, drafts, parents, mode=mode, max_depth=depth, backend=backend)
        assert verdict.tokens.tolist() == [tokens]


def test_empty_batch(backend):
    verdict = ck.verify_tree(torch.empty(0, 4, 7), int32([]).reshape(0, 4), int32([-1, 0, 0, 1]), backend=backend)
    assert verdict.tokens.shape == (0, 4)
    assert verdict.status.shape == (0,)
    ragged = ck.verify_tree(torch.empty(0, 7), int32([]), int32([]), cu_nodes=int32([0]), max_depth=2, backend=backend)
    assert ragged.path.shape == (0, 3)


@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_dense_padded_and_ragged_forms_agree(backend, mode):
    counts = [1, 5, 13, 32]
    trees = [random_parents(count, seed=count) for count in counts]
    cases = [random_case(1, tree, 101, torch.float32, seed) for seed, tree in enumerate(trees)]
    seeds, positions = torch.tensor([4, -5, 6, 2**62]), torch.tensor([0, 9, 2**33, 7])
    solo = [
        ck.verify_tree(
            logits, drafts, int32(tree), mode=mode, seed=int(seeds[b]), position=int(positions[b]), max_depth=9,
            backend=backend,
        )
        for b, ((logits, drafts), tree) in enumerate(zip(cases, trees, strict=True))
    ]  # fmt: skip
    logits = torch.full((4, 40, 110), NAN)
    drafts, parents = torch.full((4, 40), 10**9), torch.full((4, 40), 10**9, dtype=torch.int32)
    for b, ((rows, tokens), tree) in enumerate(zip(cases, trees, strict=True)):
        logits[b, : counts[b], :101], drafts[b, : counts[b]], parents[b, : counts[b]] = rows, tokens, int32(tree)
    keywords = {"mode": mode, "seed": seeds, "position": positions, "max_depth": 9, "vocab_size": 101}
    padded = ck.verify_tree(logits, drafts, parents, num_nodes=int32(counts), backend=backend, **keywords)
    used = torch.arange(40) < int32(counts).unsqueeze(1)
    spare = torch.full((3, 110), NAN)
    ragged = ck.verify_tree(
        torch.cat([logits[used], spare]), torch.cat([drafts[used], torch.zeros(3, dtype=torch.int64)]),
        torch.cat([parents[used], int32([9, 9, 9])]), cu_nodes=int32([0, 1, 6, 19, 51]), backend=backend, **keywords,
    )  # fmt: skip
    for b, expected in enumerate(solo):
        assert_same(ck.Verdict(*(field[b : b + 1] for field in padded)), expected)
        assert_same(ck.Verdict(*(field[b : b + 1] for field in ragged)), expected)


def test_strided_rows_and_broadcast_trees(backend):
    logits, drafts = random_case(3, list(T5), 50, torch.bfloat16)
    wide = torch.full((3, 5, 2, 64), NAN, dtype=torch.bfloat16)
    wide[:, :, 1, 3:53] = logits
    wide_drafts = torch.full((3, 9), 77)
    wide_drafts[:, 2:7] = drafts
    expected = ck.verify_tree(logits, drafts, int32(T5), backend=backend)
    trees = int32(T5).expand(3, 5)
    assert_same(ck.verify_tree(wide[:, :, 1, 3:53], wide_drafts[:, 2:7], trees, backend=backend), expected)


def test_one_tree_with_a_count_per_request(backend):
    logits, drafts = random_case(3, [-1, 0, 1, 2, 3], 50, torch.float32)
    parents = int32([-1, 0, 1, 2, 3])
    drafts[:, 1:] = logits.argmax(-1)[:, :-1]
    verdict = ck.verify_tree(logits, drafts, parents, num_nodes=int32([1, 3, 5]), backend=backend)
    assert verdict.num_accepted.tolist() == [0, 2, 4]


@pytest.mark.parametrize("mode", ["greedy", "typical"])
def test_out_is_filled_and_its_surroundings_are_not(backend, mode):
    logits, drafts = random_case(2, list(T5), 50, torch.float32)
    expected = ck.verify_tree(logits, drafts, int32(T5), mode=mode, backend=backend)
    memory = [torch.full((4, *field.shape[1:]), 99, dtype=field.dtype) for field in expected]
    out = ck.Verdict(*(field[1:3] for field in memory))
    assert ck.verify_tree(logits, drafts, int32(T5), mode=mode, backend=backend, out=out) is out
    assert_same(out, expected)
    assert all((field[0] == 99).all() and (field[3] == 99).all() for field in memory)


@pytest.mark.parametrize("parents", [[-1, 0, 9, 1, 2], [-1, 2, 1], [0], [-1, -1, 0], [-1, 0, 1, 3]])
def test_malformed_trees_are_refused_and_nothing_is_written(backend, parents):  # MSK-02
    rows = torch.zeros(2, 5, 8)
    drafts = torch.zeros(2, 5, dtype=torch.int32)
    count = len(parents)
    with pytest.raises(ValueError, match="verify_tree: parents must be -1 for the root"):
        ck.verify_tree(rows[:1, :count], drafts[:1, :count], int32(parents), backend=backend)
    batch = torch.zeros((2, 5), dtype=torch.int32)
    batch[0] = int32(T5)
    batch[1, :count] = int32(parents)
    out = ck.Verdict(
        torch.full((2, 5), 99, dtype=torch.int32), torch.full((2,), 99, dtype=torch.int32),
        torch.full((2, 5), 99, dtype=torch.int32), torch.full((2,), 99.0), torch.full((2,), 99, dtype=torch.uint8),
    )  # fmt: skip
    with pytest.raises(ValueError, match="in row 1"):
        ck.verify_tree(rows, drafts, batch, num_nodes=int32([5, count]), backend=backend, out=out)
    assert all((field == 99).all() for field in out)
    flat = torch.cat([int32(T5), int32(parents)])
    with pytest.raises(ValueError, match="in row 1"):
        ck.verify_tree(
            torch.zeros(5 + count, 8), torch.zeros(5 + count, dtype=torch.int32), flat,
            cu_nodes=int32([0, 5, 5 + count]), max_depth=3, backend=backend,
        )  # fmt: skip


def test_offsets_past_32_bits(backend):
    """Two rows 2**31 entries apart in memory that is reserved and, but for those rows, never touched."""
    memory = mmap.mmap(-1, 2 * (2**31 + 8))
    logits = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((1, 2, 8), (0, 2**31, 1))
    logits[0, 0, 5] = logits[0, 1, 2] = 9.0
    verdict = ck.verify_tree(logits, int32([[1, 5]]), int32([-1, 0]), backend=backend)
    assert verdict.tokens.tolist() == [[5, 2]]
