"""verify_tree's tokens over many seeds and positions, by chi-square tests at fixed seeds."""

from __future__ import annotations

import pytest
import torch
from verify_cases import int32

import cerberus_kernels as ck

LEAST_P_VALUE = 1e-3
TREE = int32([-1, 0, 0, 0, 1, 1, 2, 2])  # three children, of which two have two each
DEPTHS = [0, 1, 1, 1, 2, 2, 2, 2]
FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "filters": {"temperature": 1.4, "top_k": 200, "top_p": 0.9, "min_p": 0.02},
}


# The reference takes a Python loop's time per request, Triton's interpreter a tenth of a second.
DRAWS = {"native": 100_000, "reference": 200, "triton": 8}


def cases(*vocab_sizes: int) -> pytest.MarkDecorator:
    """Sizes with filters on the native backend; one case on the reference, which is enumerated elsewhere."""
    every = [("native", vocab_size, name) for vocab_size in vocab_sizes for name in FILTERS]
    more = [("native", 1000, "filters"), ("reference", 32, "filters")]
    return pytest.mark.parametrize(("backend", "vocab_size", "filters"), every + more)


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Chance of counts at least as far from ``probs``; bins that expect less than 5 are one."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    expected = probs / probs.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token of probability zero came"
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    if expected[-1] < 5:  # too little for a bin of its own
        counts[-2], expected[-2] = counts[-2:].sum(), expected[-2:].sum()
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def assert_distributed(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Tokens [n] are draws from ``probs`` [V]."""
    counts = torch.bincount(tokens.flatten(), minlength=len(probs))
    assert len(counts) == len(probs)
    assert chi_square_p_value(counts, probs) > LEAST_P_VALUE


def assert_independent(first: torch.Tensor, second: torch.Tensor, probs: torch.Tensor, then: torch.Tensor) -> None:
    """Pairs of tokens are draws from the product of the two distributions."""
    counts = torch.bincount(first.long() * len(then) + second, minlength=len(probs) * len(then))
    assert chi_square_p_value(counts, torch.outer(probs, then)) > LEAST_P_VALUE


def rows_by_depth(vocab_size: int, seed: int) -> torch.Tensor:
    """Logits [3, V], one row per depth, spread so that some tokens are likely."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, vocab_size, generator=generator) * 1.5


def filtered(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Float64 [V], the distribution that is left, by sorting."""
    probs, order = torch.softmax(logits.double() / temperature, -1).sort(descending=True, stable=True)
    kept = probs >= min_p * probs[0]
    if top_k:
        kept[top_k:] = False
        probs[top_k:] = 0.0
    kept &= probs.cumsum(-1) - probs < top_p * probs.sum()
    result = torch.zeros_like(probs)
    result[order] = torch.where(kept, probs, 0.0)
    return result / result.sum()


def test_the_p_value_is_that_of_the_tables():
    """5 % and 0.1 % points of chi-square with 3 and 9 degrees of freedom."""
    for cells, statistic, p_value in ((4, 7.8147, 0.05), (4, 16.266, 0.001), (10, 16.919, 0.05), (10, 27.877, 0.001)):
        shift = (statistic * 1000 / 2) ** 0.5  # two cells off by it add up to the statistic
        counts = torch.full((cells,), 1000.0, dtype=torch.float64)
        counts[0] += shift
        counts[1] -= shift
        assert chi_square_p_value(counts, torch.ones(cells)) == pytest.approx(p_value, rel=1e-3)


@cases(3, 32)
def test_sample_draws_from_the_target(backend, vocab_size, filters):
    draws, parameters = DRAWS[backend], FILTERS[filters]
    rows = rows_by_depth(vocab_size, seed=vocab_size)
    target = [filtered(row, **parameters) for row in rows]
    best = [row.topk(3).indices.tolist() for row in rows]
    drafts = int32([0, best[0][0], best[0][1], best[0][0], *best[1][:2], *best[1][1:]])  # node 3 is a copy of node 1
    verdict = ck.verify_tree(
        rows[DEPTHS].expand(draws, -1, -1), drafts.expand(draws, -1), TREE, mode="sample",
        seed=torch.arange(draws) * 7 - 1000, position=2**33 + 5, max_depth=2, backend=backend, **parameters,
    )  # fmt: skip
    assert not verdict.status.any()
    assert_distributed(verdict.tokens[:, 0], target[0])
    deep = verdict.num_accepted >= 1
    assert_distributed(verdict.tokens[deep, 1], target[1])
    assert_distributed(verdict.tokens[verdict.num_accepted == 2, 2], target[2])
    under_first = verdict.path[:, 1] == 1
    accepted = target[1][best[1][:2]].sum()
    outcome = (verdict.num_accepted[under_first] == 2).long()
    assert chi_square_p_value(torch.bincount(outcome, minlength=2), torch.stack([1 - accepted, accepted])) > 1e-3


def drawn_drafts(rows: torch.Tensor, draws: int, drafting: str, seed: int) -> torch.Tensor:
    """int64 [draws, 8]: each family of siblings drawn from its depth's row of ``rows``, by a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.zeros(draws, 8, dtype=torch.int64)
    for siblings, depth in (([1, 2, 3], 0), ([4, 5], 1), ([6, 7], 1)):
        row = rows[depth]
        drawn = torch.multinomial(row, draws * len(siblings), replacement=True, generator=generator).view(draws, -1)
        if drafting == "without_replacement":
            for later in range(1, len(siblings)):
                while (again := (drawn[:, :later] == drawn[:, later : later + 1]).any(1)).any():
                    count = int(again.sum())
                    drawn[again, later] = torch.multinomial(row, count, replacement=True, generator=generator)
        drafts[:, siblings] = drawn
    return drafts


@pytest.mark.parametrize("drafting", ["iid", "without_replacement"])
@cases(4, 32)
def test_rejection_draws_from_the_target(backend, vocab_size, drafting, filters):
    draws, parameters = DRAWS[backend], FILTERS[filters]
    rows = rows_by_depth(vocab_size, seed=vocab_size)
    target = [filtered(row, **parameters) for row in rows]
    nearby = rows + torch.randn(rows.shape, generator=torch.Generator().manual_seed(9))
    draft_rows = torch.softmax(nearby, -1)
    drafts = drawn_drafts(draft_rows, draws, drafting, seed=vocab_size + 1)
    verdict = ck.verify_tree(
        rows[DEPTHS].expand(draws, -1, -1), drafts, TREE, mode="rejection", drafting=drafting,
        draft_probs=3.0 * draft_rows[[0, 0, 0, 0, 1, 1, 1, 1]].expand(draws, -1, -1),
        seed=torch.arange(draws), position=11, max_depth=2, backend=backend, **parameters,
    )  # fmt: skip
    assert not verdict.status.any()
    assert_distributed(verdict.tokens[:, 0], target[0])
    deep = verdict.num_accepted >= 1
    assert_distributed(verdict.tokens[deep, 1], target[1])
    assert_distributed(verdict.tokens[verdict.num_accepted == 2, 2], target[2])
    if vocab_size <= 32:
        assert_independent(verdict.tokens[deep, 0], verdict.tokens[deep, 1], *pair_given_acceptance(verdict, target))
    if vocab_size == 4 and not parameters:
        overlap = torch.minimum(target[0], draft_rows[0].double()).sum()
        first = (verdict.path[:, 1] == 1).long()
        assert chi_square_p_value(torch.bincount(first, minlength=2), torch.stack([1 - overlap, overlap])) > 1e-3


def pair_given_acceptance(verdict: ck.Verdict, target: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The accepted first tokens are no draws from p alone: take their own frequencies, and p for the second."""
    deep = verdict.num_accepted >= 1
    counts = torch.bincount(verdict.tokens[deep, 0], minlength=len(target[0])).double()
    return counts / counts.sum(), target[1]


def test_rejection_of_a_chain_of_one(backend):  # VER-03
    draws = 2 * DRAWS[backend]
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.8, 0.1, 0.05, 0.05])
    generator = torch.Generator().manual_seed(1)
    drafts = torch.zeros(draws, 2, dtype=torch.int64)
    drafts[:, 1] = torch.multinomial(q, draws, replacement=True, generator=generator)
    verdict = ck.verify_tree(
        p.log().expand(draws, 2, 4), drafts, int32([-1, 0]), mode="rejection", drafting="iid",
        draft_probs=q.expand(draws, 2, 4), seed=3, position=torch.arange(draws), backend=backend,
    )  # fmt: skip
    assert_distributed(verdict.tokens[:, 0], p)
    accepted = torch.bincount(verdict.num_accepted, minlength=2)
    assert chi_square_p_value(accepted, torch.tensor([0.3, 0.7])) > LEAST_P_VALUE
    assert (verdict.num_accepted[drafts[:, 1] > 0] == 1).all()
    assert (verdict.tokens[verdict.num_accepted == 0, 0] > 0).all()


def test_sample_with_two_fixed_siblings(backend):  # VER-04
    draws = 2 * DRAWS[backend]
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    verdict = ck.verify_tree(
        p.log().expand(draws, 3, 4), int32([0, 0, 1]).expand(draws, 3), int32([-1, 0, 0]), mode="sample",
        seed=torch.arange(draws), backend=backend,
    )  # fmt: skip
    assert_distributed(verdict.tokens[:, 0], p)
    not_first = verdict.path[:, 1] != 1
    second = torch.bincount((verdict.path[not_first, 1] == 2).long(), minlength=2)
    assert chi_square_p_value(second, torch.tensor([0.4, 0.6])) > LEAST_P_VALUE
    assert_distributed(verdict.tokens[verdict.num_accepted == 0, 0], torch.tensor([0, 0, 0.75, 0.25]))


def plain_draws(rows: torch.Tensor, **keys) -> torch.Tensor:
    """One token per request, without drafts."""
    draws = len(next(value for value in keys.values() if isinstance(value, torch.Tensor)))
    tree, drafts = int32([-1]), torch.zeros(draws, 1, dtype=torch.int32)
    return ck.verify_tree(
        rows.expand(draws, 1, -1), drafts, tree, mode="sample", backend="native", **keys
    ).tokens.flatten()  # fmt: skip


@pytest.mark.parametrize("vocab_size", [3, 32])
def test_neighbouring_positions_and_seeds_are_independent(vocab_size):
    draws = DRAWS["native"]
    row = rows_by_depth(vocab_size, seed=1)[0]
    target = torch.softmax(row.double(), -1)
    along_the_text = plain_draws(row, seed=99, position=torch.arange(draws))
    across_seeds = plain_draws(row, seed=torch.arange(draws), position=4)
    swapped = plain_draws(row, seed=4, position=torch.arange(draws))
    for tokens in (along_the_text, across_seeds):
        assert_distributed(tokens, target)
        assert_independent(tokens[0::2], tokens[1::2], target, target)
    assert_independent(along_the_text, swapped, target, target)  # two seeds at the same positions
    assert_independent(across_seeds, swapped, target, target)  # seed and position do not stand in for each other
    far = plain_draws(row, seed=99, position=torch.arange(draws) + 2**32)
    assert_independent(along_the_text, far, target, target)  # the upper word of a position counts
    high = plain_draws(row, seed=torch.arange(draws) + 2**32, position=4)
    assert_independent(across_seeds, high, target, target)  # and that of a seed


def test_tokens_of_one_row_get_independent_noise():
    """The best of one half of the vocabulary says nothing about the best of the other half."""
    draws, half = DRAWS["native"], 16
    row = rows_by_depth(2 * half, seed=2)[0]
    keys = {"seed": 5, "position": torch.arange(draws)}
    lower, upper = row.clone(), row.clone()
    lower[half:], upper[:half] = -torch.inf, -torch.inf
    first, second = plain_draws(lower, **keys), plain_draws(upper, **keys)
    target = torch.softmax(lower.double(), -1), torch.softmax(upper.double(), -1)
    assert_independent(first, second, *target)


def test_coins_are_independent_of_each_other_and_of_the_draw():
    """Three trials of known chances, then the bonus: all combinations come as often as the product says."""
    draws = DRAWS["native"]
    target = torch.tensor([0.1, 0.2, 0.3, 0.4])
    draft = torch.eye(4)[[0, 0, 1, 2]]  # each child is certain to be its token
    verdict = ck.verify_tree(
        target.log().expand(draws, 4, 4), int32([0, 0, 1, 2]).expand(draws, 4), int32([-1, 0, 0, 0]), mode="rejection",
        drafting="iid", draft_probs=draft.expand(draws, 4, 4), seed=8, position=torch.arange(draws), backend="native",
    )  # fmt: skip
    # a certain draft is accepted with p(x), and its rejection takes x out of p: the outcome is a draw from p
    assert_distributed(verdict.tokens[:, 0], target)
    taken = torch.where(verdict.num_accepted > 0, verdict.path[:, 1] - 1, 3)
    assert torch.equal(taken, verdict.tokens[:, 0])
    assert_independent(taken[0::2], taken[1::2], target, target)
