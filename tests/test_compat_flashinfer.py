"""compat.flashinfer against values worked out by hand, enumeration of coins, and compat.sglang on the same coins."""

from __future__ import annotations

import pytest
import torch
from compat_cases import chi_square

from cerberus_kernels.compat import sglang
from cerberus_kernels.compat.flashinfer import chain_speculative_sampling

NAN = float("nan")


def chain(p, drafts, q, coins, **keywords):
    """One request: its ids and its two counts."""
    ids, accepted, emitted = chain_speculative_sampling(
        torch.tensor([p]).view(1, len(drafts), len(q[0])),
        torch.tensor([drafts]).view(1, len(drafts)).long(),
        torch.tensor([q]),
        uniform_samples=torch.tensor([coins], dtype=torch.float64),
        **keywords,
    )
    return ids[0].tolist(), int(accepted), int(emitted)


VER_03 = ([[0.8, 0.1, 0.05, 0.05]], [[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]])


def test_ver_03_by_hand():
    p, q = VER_03
    assert chain(p, [0], q, [0.60, 0.5]) == ([0, 2], 1, 1)  # .6 * .8 = .48 < .5; then .5 is where token 2 begins
    assert chain(p, [0], q, [0.65, 0.5]) == ([1, -1], 0, 0)  # .52 >= .5; of [0, .2, .1, 0] the middle is token 1
    assert chain(p, [0], q, [0.65, 0.7]) == ([2, -1], 0, 0)  # .7 > 2/3
    for coin in (0.0, 0.5, 0.999999):
        assert chain(p, [1], q, [coin, 0.0]) == ([1, 0], 1, 1)  # q / p = 3


def enumerated(p, q, grid, final_grid):
    """Distribution of the first token over drafts from p and all coins of two grids of interval centres."""
    vocab_size, batch = len(q), grid * final_grid
    share = torch.zeros(vocab_size, dtype=torch.float64)
    coins = (torch.arange(grid, dtype=torch.float64) + 0.5).div(grid).repeat_interleave(final_grid)
    final = (torch.arange(final_grid, dtype=torch.float64) + 0.5).div(final_grid).repeat(grid)
    p, q = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    for draft in range(vocab_size):
        ids, _, _ = chain_speculative_sampling(
            p.expand(batch, 1, -1),
            torch.full((batch, 1), draft),
            q.expand(batch, 2, -1),
            uniform_samples=torch.stack([coins, final], 1),
        )
        share += p[draft] * torch.bincount(ids[:, 0], minlength=vocab_size) / batch
    return share


@pytest.mark.parametrize(
    ("p", "q", "grid", "final_grid"),
    [
        # acceptance .5 / .8 = 5/8 of draft 0 and 1 of the rest; residual [0, 2/3, 1/3, 0]
        ([0.8, 0.1, 0.05, 0.05], [0.5, 0.3, 0.15, 0.05], 8, 3),
        # 1/3 of draft 0, 1 of the rest; residual [0, 1/2, 1/2]
        ([0.6, 0.3, 0.1], [0.2, 0.5, 0.3], 3, 2),
        ([1.0, 0.0, 0.0], [0.25, 0.5, 0.25], 4, 3),
    ],
)
def test_ver_03_the_distribution_is_exact(p, q, grid, final_grid):
    share = enumerated(p, q, grid, final_grid)
    torch.testing.assert_close(share, torch.tensor(q, dtype=torch.float64), rtol=0, atol=1e-12)


def test_random_drafts_and_coins_give_the_target_distribution():
    batch = 100_000
    p, q = (torch.softmax(torch.randn(n, 8), -1) for n in (2, 3))
    drafts = torch.multinomial(p, batch, replacement=True).T
    ids, accepted, emitted = chain_speculative_sampling(
        p.expand(batch, 2, 8), drafts, q.expand(batch, 3, 8), seed=torch.arange(batch)
    )
    # chi-square with 7 degrees of freedom exceeds 24.3 with probability 0.001
    for place in range(3):
        tokens = ids[:, place][ids[:, place] >= 0]
        assert len(tokens) > 1000
        assert chi_square(torch.bincount(tokens, minlength=8), q[place]) < 24.3
    overlap = torch.minimum(p, q[:2]).sum(1)
    assert accepted.double().mean().sub(overlap.sum()).abs() < 0.01
    assert emitted.double().mean().sub(overlap[0] + overlap[0] * overlap[1]).abs() < 0.01


def test_borders_belong_to_the_upper_side():
    p, q = [[0.5, 0.5, 0.0]], [[0.25, 0.25, 0.5], [0.5, 0.0, 0.5]]
    assert chain(p, [0], q, [0.49999, 0.0]) == ([0, 0], 1, 1)
    assert chain(p, [0], q, [0.5, 0.0]) == ([2, -1], 0, 0)  # .5 * .5 = q(0): rejected; only 2 has residual mass
    assert chain(p, [0], q, [0.0, 0.49999]) == ([0, 0], 1, 1)
    assert chain(p, [0], q, [0.0, 0.5]) == ([0, 2], 1, 1)  # token 1 has none


def test_a_token_of_probability_zero_is_never_accepted_nor_drawn():
    p, q = [[0.0, 0.5, 0.5]], [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    assert chain(p, [1], q, [0.0, 0.0]) == ([0, -1], 0, 0)  # q(1) = 0 at coin 0
    assert chain(p, [1], q, [0.0, 0.9999999])[0] == [0, -1]  # residual [.5, 0, 0]
    # p(0) = 0: no such draft can be drawn, so nothing was tried and the token comes from q whole
    assert chain(p, [0], q, [0.0, 0.0]) == ([0, -1], 0, 0)
    assert chain(p, [0], q, [0.0, 0.75]) == ([2, -1], 0, 0)


def test_accepted_counts_past_the_rejection_and_emitted_does_not():
    p = [[0.5, 0.5]] * 3
    q = [[0.5, 0.5], [0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]
    # draft 0 passes, draft 0 has q = 0, draft 0 would pass
    assert chain(p, [0, 0, 0], q, [0.9, 0.0, 0.9, 0.1]) == ([0, 1, -1, -1], 2, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counters_are_added_in_place(dtype):
    p, q = (torch.tensor(rows).expand(2, -1, -1) for rows in VER_03)
    accepted, emitted = torch.tensor([10, 20], dtype=dtype), torch.tensor([30, 40], dtype=dtype)
    results = chain_speculative_sampling(
        p, torch.tensor([[0], [0]], dtype=dtype), q, accepted, emitted, True, None, 3, 7,
        uniform_samples=torch.tensor([[0.6, 0.5], [0.65, 0.5]]),
    )  # fmt: skip
    assert results[1] is accepted and results[2] is emitted
    assert (accepted.tolist(), emitted.tolist()) == ([11, 20], [31, 40])
    assert results[0].dtype == torch.int32


def test_ver_15_padding_is_neither_matched_nor_looked_up():
    batch = 10_000  # seeds
    p, q = torch.softmax(torch.randn(5, 8), -1), torch.softmax(torch.randn(6, 8), -1)
    padded = p.clone()
    padded[3:] = 0
    drafts, full = torch.tensor([5, 2, 5, -1, -1]), torch.tensor([1, 4, 2, 0, 7])
    seeds = torch.arange(2 * batch)
    ids, accepted, emitted = chain_speculative_sampling(
        torch.stack([padded, p]).repeat(batch, 1, 1),
        torch.stack([drafts, full]).repeat(batch, 1),
        q.expand(2 * batch, 6, 8),
        seed=seeds,
    )
    assert emitted[::2].max() == 3
    assert accepted[::2].max() == 3
    assert (ids[::2] >= 0).sum(1).max() == 4
    assert torch.equal((ids >= 0).sum(1), emitted + 1)
    assert ids.max() < 8
    reached = ids[::2][emitted[::2] == 3][:, 3]  # nothing was tried at the padding: drawn from q whole
    assert chi_square(torch.bincount(reached, minlength=8), q[3]) < 24.3
    alone, _, _ = chain_speculative_sampling(
        p.expand(batch, 5, 8), full.expand(batch, 5), q.expand(batch, 6, 8), seed=seeds[1::2]
    )
    assert torch.equal(ids[1::2], alone)


def test_rows_of_nan_and_without_mass():
    ones = [0.25] * 4
    assert chain([[NAN] * 4], [1], [ones, ones], [0.0, 0.6]) == ([2, -1], 0, 0)  # the draft row is none: from q whole
    assert chain([ones], [1], [[NAN] * 4, ones], [0.0, 0.6]) == ([0, -1], 0, 0)
    assert chain([ones], [1], [[0.0, NAN, 0.5, 0.5], ones], [0.0, 0.6]) == ([3, -1], 0, 0)
    assert chain([ones], [1], [[0.0] * 4, ones], [0.0, 0.6]) == ([0, -1], 0, 0)
    assert chain([ones], [1], [[0.0, NAN, 0.0, 0.0], ones], [0.0, 0.6]) == ([0, -1], 0, 0)
    # .6 * .5 >= .25: of [0, .25, .25, 0], with the NaN of p as 0, three quarters lie in token 2
    assert chain([[0.5, 0.0, NAN, 0.5]], [0], [ones, ones], [0.6, 0.75]) == ([2, -1], 0, 0)
    # q below p everywhere, by rounding, and a coin that rejects: the residual is empty and q stays
    assert chain([ones], [1], [[0.2] * 4, ones], [0.9, 0.6]) == ([2, -1], 0, 0)
    assert chain([ones], [7], [ones, ones], [0.0, 0.6]) == ([2, -1], 0, 0)
    assert chain([], [], [ones], [0.6]) == ([2], 0, 0)


def test_ver_13_one_hot_drafts_and_the_target_only_rule_agree_on_the_same_coins():
    # With p one-hot both accept iff coin < q(x) and draw from q without x. Row 1's coins reject the greedy token.
    batch, drafts, vocab_size = 3, 4, 257
    logits = torch.zeros(batch, drafts + 1, vocab_size)
    logits[:, :, 17] = 8.0
    q = torch.softmax(logits / 1.5, -1)  # token 17 holds 0.447
    tokens = torch.full((batch, drafts), 17)
    coins = torch.tensor([0.2, 0.99, 0.44]).unsqueeze(1).repeat(1, drafts + 1)
    coins[2, 2], coins[:, drafts] = 0.6, torch.tensor([0.1, 0.5, 0.9])
    p = torch.nn.functional.one_hot(tokens, vocab_size).float()
    ids, _, emitted = chain_speculative_sampling(p, tokens, q, uniform_samples=coins)
    chain_links = torch.tensor([[1, 2, 3, 4, -1]]).expand(batch, -1)
    predicts, index = torch.zeros(batch * 5, dtype=torch.int32), torch.zeros(batch, 5, dtype=torch.int32)
    count = torch.zeros(batch, dtype=torch.int32)
    sglang.tree_speculative_sampling_target_only(
        predicts, index, count, torch.nn.functional.pad(tokens, (1, 0)), torch.arange(15).view(3, 5), chain_links,
        torch.full((batch, 5), -1), coins, coins[:, drafts], q,
    )  # fmt: skip
    assert emitted.tolist() == count.tolist() == [4, 0, 2]
    for b, accepted in enumerate(count.tolist()):
        assert ids[b, : accepted + 1].tolist() == predicts[5 * b : 5 * b + accepted + 1].tolist()
    assert ids[1, 0] != 17  # the greedy token


def test_seeds():
    p, q = torch.softmax(torch.randn(6, 3, 50), -1), torch.softmax(torch.randn(6, 4, 50), -1)
    drafts = torch.randint(0, 50, (6, 3))

    def run(rows=slice(None), **keywords):
        return chain_speculative_sampling(p[rows], drafts[rows], q[rows], **keywords)[0].tolist()

    seeds, offsets = torch.tensor([3, 1, 4, 1, 5, -9]), torch.tensor([2, 7, 1, 8, 2, 8])
    together = run(seed=seeds, offset=offsets)
    for b in range(6):  # a request's own seed: its place and its neighbours do not matter
        assert together[b] == run(slice(b, b + 1), seed=seeds[b : b + 1], offset=offsets[b : b + 1])[0]
    assert together == run(seed=seeds.int(), offset=offsets.int())
    one = run(seed=3, offset=2)
    assert one == run(seed=torch.tensor([3]), offset=torch.tensor([2]))
    assert one[0] == together[0]
    assert run(seed=3) == run(seed=3, offset=0) != run(seed=3, offset=1)
    assert run(seed=4) != run(seed=3)
    same = chain_speculative_sampling(
        p[:1].expand(64, -1, -1), drafts[:1].expand(64, -1), q[:1].expand(64, -1, -1), seed=3
    )
    assert len({tuple(row) for row in same[0].tolist()}) > 8  # one seed for all: rows still differ
    generator = torch.Generator().manual_seed(5)
    first, second = run(generator=generator), run(generator=generator)
    assert first != second
    assert first == run(generator=torch.Generator().manual_seed(5))


def test_coins_are_uniform_and_not_repeated():
    ids, _, _ = chain_speculative_sampling(
        torch.empty(50_000, 0, 16),
        torch.empty(50_000, 0, dtype=torch.int64),
        torch.full((50_000, 1, 16), 1 / 16),
        seed=11,
    )
    # chi-square with 15 degrees of freedom exceeds 37.7 with probability 0.001
    assert chi_square(torch.bincount(ids[:, 0], minlength=16), torch.full((16,), 1 / 16)) < 37.7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_token_ids": torch.zeros(2, 3)}, "draft_token_ids must be of dtype int32 or int64, got float32"),
        ({"target_probs": torch.zeros(2, 3, 5)}, r"target_probs must be of shape \[2, 4, any\], got \[2, 3, 5\]"),
        ({"draft_probs": torch.zeros(2, 3, 4)}, r"draft_probs must be of shape \[2, 3, 5\], got \[2, 3, 4\]"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, r"seed must be a number or a tensor of shape \[1\] or \[2\]"),
        ({"uniform_samples": torch.zeros(2, 3)}, r"uniform_samples must be of shape \[2, 4\], got \[2, 3\]"),
        (
            {"maybe_output_accepted_token_num": torch.zeros(2)},
            "maybe_output_accepted_token_num must be of dtype int32 or int64, got float32",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"draft_probs": torch.ones(2, 3, 5), "draft_token_ids": torch.zeros(2, 3).long()}
    arguments |= {"target_probs": torch.ones(2, 4, 5)}
    with pytest.raises(ValueError, match=f"chain_speculative_sampling: {message}"):
        chain_speculative_sampling(**(arguments | change))


def test_nothing_waits_for_the_device_and_empty_batches_work():
    for device, batch in (("meta", 3), ("cpu", 0)):
        p, q = torch.empty(batch, 2, 5, device=device), torch.empty(batch, 3, 5, device=device)
        tokens = torch.empty(batch, 2, dtype=torch.int64, device=device)
        for keywords in ({}, {"seed": 3}, {"seed": tokens[:, 0], "offset": tokens[:, 1]}):
            ids, accepted, emitted = chain_speculative_sampling(p, tokens, q, **keywords)
            assert (ids.shape, accepted.shape, emitted.shape) == ((batch, 3), (batch,), (batch,))
