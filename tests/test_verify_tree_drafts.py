"""verify_tree's rejection mode: what it takes from draft rows, and what it makes of bad ones."""

from __future__ import annotations

import math

import pytest
import torch
from verify_cases import FLOATS, assert_same, expecting, int32, log_rows, random_case, some

import cerberus_kernels as ck
from cerberus_kernels.ops.verify_tree import philox
from cerberus_kernels.testing import T5

NAN, INF = math.nan, math.inf
NO_MASS = int(ck.VerifyStatus.NO_DRAFT_MASS)
SCHEMES = ("iid", "without_replacement")


def call(logits, drafts, parents, probs, backend, drafting="iid", **keywords) -> ck.Verdict:
    return ck.verify_tree(
        logits, drafts, int32(parents), mode="rejection", drafting=drafting, draft_probs=probs, backend=backend,
        **keywords,
    )  # fmt: skip


def coin_seed(trial: int, low: float, high: float, position: int = 0) -> int:
    """A seed whose coin for a trial lies between two bounds."""
    return next(seed for seed in range(10_000) if low < philox.coin(seed, position, trial) < high)


def test_acceptance_by_hand(backend):  # VER-03
    p, q = log_rows([0.5, 0.3, 0.15, 0.05], [0.25] * 4), torch.tensor([0.8, 0.1, 0.05, 0.05])
    probs = torch.stack([q * NAN, q]).unsqueeze(0)
    below, above = coin_seed(0, 0.58, 0.62), coin_seed(0, 0.63, 0.67)  # p / q of token 0 is .625
    assert call(p, int32([[9, 0]]), [-1, 0], probs, backend, seed=below).num_accepted.tolist() == [1]
    rejected = call(p, int32([[9, 0]]), [-1, 0], probs, backend, seed=above)
    assert rejected.num_accepted.tolist() == [0]
    assert rejected.tokens[0, 0] in (1, 2)  # the residual is [0, 2/3, 1/3, 0]
    for seed in (below, above, *range(some(backend, 20, 2))):
        assert call(p, int32([[9, 1]]), [-1, 0], probs, backend, seed=seed).num_accepted.tolist() == [1]


def test_each_trial_has_a_coin_of_its_own(backend):
    """Three certain drafts: the first is accepted with .2, the second with .3 / .8, the third with .1 / .5."""
    p = log_rows(*[[0.2, 0.3, 0.1, 0.4]] * 4)
    probs = torch.eye(4)[[3, 0, 1, 2]].unsqueeze(0)
    drafts, parents = int32([[0, 0, 1, 2]]), [-1, 0, 0, 0]
    seen = set()
    for seed in range(60):
        coins = [philox.coin(seed, 6, trial) for trial in range(3)]
        accepted = [coin < chance for coin, chance in zip(coins, (0.2, 0.375, 0.2), strict=True)]
        expected = accepted.index(True) if True in accepted else 3
        if expected in seen and seed >= some(backend, 60, 0):
            continue
        seen.add(expected)
        verdict = call(p, drafts, parents, probs, backend, seed=seed, position=6)
        assert verdict.tokens[0, 0] == expected
        assert verdict.path[0, 1] == (expected + 1 if expected < 3 else -1)
    assert seen == {0, 1, 2, 3}


BAD_ROWS = {
    "no mass at all": [0.0] * 6,
    "no mass for the token": [0.2, 0.2, 0.2, 0.0, 0.2, 0.2],
    "nan": [0.2, NAN, 0.2, 0.2, 0.2, 0.2],
    "nan at the token": [0.2, 0.2, 0.2, NAN, 0.2, 0.2],
    "inf": [0.2, 0.2, 0.2, 0.2, INF, 0.2],
    "inf at the token": [0.2, 0.2, 0.2, INF, 0.2, 0.2],
    "negative": [0.2, 0.2, 0.2, 0.2, 0.2, -0.1],
    "negative at the token": [0.2, 0.2, 0.2, -0.2, 0.2, 0.2],
    "minus inf": [-INF, 0.2, 0.2, 0.2, 0.2, 0.2],
}


@pytest.mark.parametrize("drafting", SCHEMES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_bad_row_is_no_trial(backend, bad, dtype, drafting):
    """Everything but the status is as if the child held the padding -1; the siblings keep their coins."""
    p = log_rows(*[[0.1, 0.2, 0.3, 0.1, 0.2, 0.1]] * 4)
    probs = torch.full((1, 4, 6), 1 / 6)
    probs[0, 2] = torch.tensor(BAD_ROWS[bad])
    probs = probs.to(dtype)
    for seed in range(some(backend, 30, 1)):
        keys = {"drafting": drafting, "seed": seed, "position": 4}
        verdict = call(p, int32([[0, 0, 3, 4]]), [-1, 0, 0, 0], probs, backend, **keys)
        expected = call(p, int32([[0, 0, -1, 4]]), [-1, 0, 0, 0], probs, expecting(backend), **keys)
        tried = expected.path[0, 1] != 1  # an accepted first child leaves the second alone
        assert expected.status.tolist() == [0]
        assert verdict.status.tolist() == [NO_MASS if tried else 0]
        assert_same(verdict._replace(status=expected.status), expected)


def test_tokens_outside_the_vocabulary_have_no_row_to_read(backend):
    p, probs = log_rows([0.25] * 4, *[[0.25] * 4] * 3), torch.full((1, 4, 5), 0.25)
    probs[0, 1:3] = NAN
    probs[..., 4] = NAN  # past the vocabulary
    for first, status in ((-1, 0), (4, ck.VerifyStatus.TOKEN_OUT_OF_RANGE), (2**40, 4), (-7, 4)):
        drafts = torch.tensor([[0, first, -1, 2]])
        verdict = call(p, drafts, [-1, 0, 0, 0], probs, backend)
        assert verdict.status.tolist() == [int(status)]
        assert verdict.path[0, 1] == 3  # p equals q: always accepted


@pytest.mark.parametrize("drafting", SCHEMES)
def test_rows_that_are_not_tried_may_hold_anything(backend, drafting):
    batch, parents = some(backend, 40, 4), [-1, 0, 0, 0, 1, 1, 2, 3]
    logits, drafts = random_case(batch, parents, 20, torch.float32, seed=3)
    probs = torch.softmax(torch.randn(batch, 8, 20), -1)
    seeds = torch.arange(batch)
    expected = call(logits, drafts, parents, probs, expecting(backend), drafting, seed=seeds)
    for b in range(batch):
        path = expected.path[b].tolist()
        for node in range(8):
            if node == 0 or parents[node] not in path or any(n in path for n in range(1, node) if siblings(n, node)):
                probs[b, node] = (NAN, INF, -1.0)[node % 3]
    assert_same(call(logits, drafts, parents, probs, backend, drafting, seed=seeds), expected)
    assert (expected.num_accepted >= 1).sum() > batch // 4


def siblings(a: int, b: int, parents=(-1, 0, 0, 0, 1, 1, 2, 3)) -> bool:
    return parents[a] == parents[b]


def test_duplicates_are_trials_of_independent_drafts_only(backend):
    p = log_rows([0.2, 0.5, 0.3], *[[0.2, 0.5, 0.3]] * 2)
    q = torch.tensor([0.6, 0.3, 0.1])
    probs, drafts = q.expand(1, 3, 3), int32([[0, 0, 0]])
    rejected = coin_seed(0, 0.4, 0.9)  # of the first: p / q is 1/3; then nothing of token 0 is left
    for seed in (rejected, *range(some(backend, 50, 2))):
        iid = call(p, drafts, [-1, 0, 0], probs, backend, "iid", seed=seed)
        assert iid.status.tolist() == [0]
        assert iid.path[0, 1] in (-1, 1)
        without = call(p, drafts, [-1, 0, 0], probs, backend, "without_replacement", seed=seed)
        assert without.status.tolist() == [NO_MASS if without.num_accepted == 0 else 0]
        assert without.path[0, 1] == iid.path[0, 1]
    # A second trial of token 1 does change what is left: .5 < .6 of [.5, .5, 0] against [.6, .4, 0]
    p = log_rows([0.5, 0.5, 0.0], *[[0.5, 0.5, 0.0]] * 2)
    tail = torch.tensor([0.6, 0.2, 0.2]).expand(1, 3, 3)
    again = int32([[0, 0, 1]])
    seed = coin_seed(0, 0.9, 1.0)
    verdict = call(p, again, [-1, 0, 0], tail, backend, "iid", seed=seed)
    assert verdict.tokens[0, 0] == 1  # the residual is token 1 alone
    assert verdict.path[0, 1] == 2  # so its trial is certain


def test_without_replacement_takes_the_tried_out_of_the_row(backend):
    """q = [.5, .3, .2]; after token 0 is rejected, token 1 was drawn with .6, against a residual of [0, .5, .5]."""
    p, probs = log_rows(*[[0.0, 0.4, 0.6]] * 3), torch.tensor([0.5, 0.3, 0.2]).expand(1, 3, 3)
    drafts = int32([[0, 0, 1]])
    # residual: max(p - q, 0) = [0, .1, .4] -> [0, .2, .8]; token 1 is accepted with .2 / .6, or .2 / .3 if q stayed
    for low, high, accepted in ((0.0, 0.32, 1), (0.35, 0.65, 0), (0.68, 1.0, 0)):
        seed = coin_seed(1, low, high)
        verdict = call(p, drafts, [-1, 0, 0], probs, backend, "without_replacement", seed=seed)
        assert verdict.num_accepted.tolist() == [accepted]
        assert verdict.tokens[0, 0] == (1 if accepted else 2)
        independent = call(p, drafts, [-1, 0, 0], probs, backend, "iid", seed=seed)
        assert independent.num_accepted.tolist() == [int(high < 0.66)]


def test_a_row_whose_mass_was_all_tried(backend):
    p, probs = log_rows(*[[0.0, 0.5, 0.5]] * 3), torch.tensor([[[1.0, 0.0, 0.0]] * 3])
    verdict = call(p, int32([[0, 0, 1]]), [-1, 0, 0], probs, backend, "without_replacement")
    assert verdict.status.tolist() == [NO_MASS]
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.tokens[0, 0] in (1, 2)


@pytest.mark.parametrize("drafting", SCHEMES)
@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-20, 4.0, 2.0**120])
def test_rows_need_not_sum_to_one(backend, scale, drafting):
    batch = some(backend, 20, 1)
    logits, drafts = random_case(batch, list(T5), 33, torch.float32)
    probs = torch.softmax(torch.randn(batch, 5, 33), -1)
    keys = {"seed": torch.arange(batch), "temperature": 2.0}
    expected = call(logits, drafts, T5, probs, expecting(backend), drafting, **keys)
    assert_same(call(logits, drafts, T5, probs * scale, backend, drafting, **keys), expected)


@pytest.mark.parametrize("drafting", SCHEMES)
@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-126, 3e38])
def test_sums_and_their_inverses_may_leave_single_precision(scale, drafting):
    """Rows of subnormal numbers, and rows whose sum is past the greatest float."""
    logits, drafts = torch.randn(100, 4, 33), torch.randint(33, (100, 4))
    probs = torch.rand(100, 4, 33)
    probs = torch.where(probs > 0.3, probs, 0.0) * scale
    results = [
        call(logits, drafts, [-1, 0, 0, 0], probs, backend, drafting, seed=torch.arange(100))
        for backend in ("native", "reference")
    ]
    assert_same(*results)
    assert 10 < (results[0].num_accepted == 0).sum() < 90


@pytest.mark.parametrize("drafting", SCHEMES)
def test_strided_expanded_and_narrow_rows(backend, drafting):
    batch = some(backend, 20, 1)
    logits, drafts = random_case(batch, list(T5), 33, torch.float32)
    row = torch.softmax(torch.randn(33), -1)
    keys = {"drafting": drafting, "seed": torch.arange(batch), "temperature": 2.0}
    expected = call(logits, drafts, T5, row.repeat(batch, 5, 1), expecting(backend), **keys)
    assert_same(call(logits, drafts, T5, row.expand(batch, 5, 33), backend, **keys), expected)
    wide = torch.full((5, batch, 70), NAN)
    wide[..., 4:37] = row
    assert_same(call(logits, drafts, T5, wide.transpose(0, 1)[..., 4:40], backend, **keys), expected)
    ragged = ck.verify_tree(
        logits.flatten(0, 1), drafts.flatten(), int32(T5 * batch), mode="rejection",
        draft_probs=row.expand(5 * batch, 33), cu_nodes=int32(range(0, 5 * batch + 1, 5)), max_depth=4,
        backend=backend, **keys,
    )  # fmt: skip
    assert_same(ragged, expected)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = row.to(dtype)
        same = call(logits, drafts, T5, narrow.float().expand(batch, 5, 33), expecting(backend), **keys)
        assert_same(call(logits, drafts, T5, narrow.expand(batch, 5, 33), backend, **keys), same)


def test_draft_rows_equal_to_the_target_are_always_accepted(backend):
    batch = some(backend, 50, 2)
    logits = torch.randn(batch, 4, 100)
    drafts, parents = torch.randint(100, (batch, 4)), [-1, 0, 1, 2]
    probs = torch.full((batch, 4, 100), NAN)
    probs[:, 1:] = torch.softmax(logits[:, :3], -1)
    verdict = call(logits, drafts, parents, probs, backend, seed=torch.arange(batch))
    assert (verdict.num_accepted == 3).all()


def test_draft_rows_are_not_read_where_the_rule_has_no_use_for_them(backend):
    logits, drafts = random_case(4, list(T5), 33, torch.float32)
    poison = torch.full((4, 5, 33), NAN)
    modes = int32([0, 1, 2, 3])
    verdict = ck.verify_tree(
        logits, drafts, int32(T5), mode=modes, drafting="iid", draft_probs=poison, seed=5, backend=backend,
        temperature=torch.tensor([1.0, 1.0, 1.0, 0.0]),
    )  # fmt: skip
    assert verdict.status.tolist() == [0] * 4
    for b, mode in enumerate(("greedy", "typical", "sample", "greedy")):
        alone = ck.verify_tree(
            logits[b : b + 1], drafts[b : b + 1], int32(T5), mode=mode, seed=5, backend=backend
        )  # fmt: skip
        assert_same(alone, verdict, slice(b, b + 1))
