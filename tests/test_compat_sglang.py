"""compat.sglang against values worked out by hand, a plain-Python walk, and this library's own operators."""

from __future__ import annotations

import random

import pytest
import torch
from compat_cases import MALFORMED_LINKS, T5_LINKS, chi_square, shuffled_links, target_only

import cerberus_kernels as ck
from cerberus_kernels.compat import links, sglang
from cerberus_kernels.testing import random_parents

SENTINEL = -77
MODES = sglang.TreeMaskMode


class Call:
    """Arguments and outputs of one verification of SGLang's, filled with sentinels."""

    def __init__(self, candidates, first, sibling, length, dtype=torch.int64, device="cpu"):
        def ids(values):
            return torch.as_tensor(values, dtype=dtype, device=device)

        self.candidates, self.first, self.sibling = ids(candidates), ids(first), ids(sibling)
        self.batch, self.nodes = self.candidates.shape
        self.index = torch.arange(self.batch * self.nodes, dtype=dtype, device=device).view(self.batch, self.nodes)
        out = torch.int32
        self.predicts = torch.full((self.batch * self.nodes,), SENTINEL, dtype=out, device=device)
        self.accept_index = torch.full((self.batch, length), SENTINEL, dtype=out, device=device)
        self.count = torch.full((self.batch,), SENTINEL, dtype=out, device=device)
        self.status = torch.full((self.batch,), 255, dtype=torch.uint8, device=device)

    def _run(self, function, *rest, **keywords):
        tree = (self.candidates, self.index, self.first, self.sibling)
        outputs = (self.predicts, self.accept_index, self.count)
        assert function(*outputs, *tree, *rest, **keywords, status=self.status) is None
        return self

    def greedy(self, target):
        target = torch.as_tensor(target, dtype=self.candidates.dtype, device=self.candidates.device)
        return self._run(sglang.verify_tree_greedy, target)

    def sample(self, coins, final, probs, *rest):
        return self._run(sglang.tree_speculative_sampling_target_only, coins, final, probs, *rest)

    def path(self, b):
        return [i - b * self.nodes for i in self.accept_index[b].tolist() if i >= 0]

    def emitted(self, b):
        return [int(self.predicts[i]) for i in self.accept_index[b].tolist() if i >= 0]

    def outputs(self):
        return [tensor.tolist() for tensor in (self.predicts, self.accept_index, self.count, self.status)]


def star(probs, tokens, coin, final, *rest, **keywords):
    """One root with a row and some children: accepted tokens and the bonus."""
    nodes = len(tokens) + 1
    first, sibling = shuffled_links([-1] + [0] * len(tokens), 0)
    first[0], sibling = (1 if tokens else -1), [-1, *range(2, nodes), -1][:nodes]
    rows = torch.full((1, nodes, len(probs)), 1.0 / len(probs))
    rows[0, 0] = torch.tensor(probs)
    call = Call([[9, *tokens]], [first], [sibling], 2)
    coins = torch.full((1, nodes), float(coin))
    return call.sample(coins, torch.tensor([float(final)]), rows, *rest, **keywords).emitted(0)


# verify_tree_greedy


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ver_08_t5_by_hand(dtype):
    # request 0: root's target 5 is node 2, whose target 2 is its child 4, bonus 11; node 1 is rejected although its
    # child holds node 1's target. Request 1: the root's target 8 is no child.
    call = Call([[7, 3, 5, 9, 2]] * 2, [T5_LINKS[0]] * 2, [T5_LINKS[1]] * 2, 4, dtype)
    call.greedy([[5, 9, 2, 4, 11], [8, 9, 2, 4, 11]])
    assert call.accept_index.tolist() == [[0, 2, 4, -1], [5, -1, -1, -1]]
    assert call.count.tolist() == [2, 0]
    x = SENTINEL
    assert call.predicts.tolist() == [5, x, 2, x, 11, 8, x, x, x, x]
    assert call.status.tolist() == [0, 0]


def test_the_first_of_the_list_is_taken_and_the_width_bounds_the_path():
    # both children hold the target's token and the list runs from node 2 to node 1; a path of two nodes ends at 2
    call = Call([[7, 3, 3, 9, 9]], [[2, 3, 4, -1, -1]], [[-1, -1, 1, -1, -1]], 2).greedy([[3, 9, 9, 1, 1]])
    assert call.accept_index.tolist() == [[0, 2]]
    assert call.emitted(0) == [3, 9]


def test_rows_elsewhere_are_read_and_written_where_the_index_says():
    call = Call([[7, 3], [7, 4]], [[1, -1]] * 2, [[-1, -1]] * 2, 2)
    call.index = torch.tensor([[2, 3], [0, 1]])
    call.greedy([[4, 6], [3, 8]])  # request 0 reads rows 2 and 3: 3, then 8; request 1 rows 0 and 1: 4, then 6
    assert call.accept_index.tolist() == [[2, 3], [0, 1]]
    assert call.predicts.tolist() == [4, 6, 3, 8]


def test_ver_15_padding_matches_nothing():
    call = Call([[7, -1, 3]], [[1, -1, -1]], [[-1, 2, -1]], 3).greedy([[-1, 5, 6]])
    assert call.path(0) == [0]


def test_msk_04_the_root_alone():
    call = Call([[7]], [[-1]], [[-1]], 1).greedy([[5]])
    assert (call.accept_index.tolist(), call.predicts.tolist(), call.count.tolist()) == ([[0]], [5], [0])


@pytest.mark.parametrize("nodes", [1, 2, 33, 64, 129])
def test_greedy_agrees_with_verify_tree(nodes):
    parents = torch.tensor([random_parents(nodes, seed) for seed in range(8)], dtype=torch.int32)
    logits = torch.randn(8, nodes, 5)
    drafts = torch.randint(0, 5, (8, nodes))
    verdict = ck.verify_tree(logits, drafts, parents)
    call = Call(drafts, *links.links_from_parents(parents), nodes).greedy(logits.argmax(-1))
    assert call.count.tolist() == verdict.num_accepted.tolist()
    for b in range(8):
        assert call.path(b) == [node for node in verdict.path[b].tolist() if node >= 0]
        assert call.emitted(b) == [token for token in verdict.tokens[b].tolist() if token >= 0]
    assert nodes == 1 or call.count.max() > 0


# tree_speculative_sampling_target_only


def test_borders_belong_to_the_upper_side():
    # p is dyadic, so every sum is exact: 0 is accepted on [0, .5), 1 on [.5, .75), then 2 or 3 from [.125, .125]
    probs = [0.5, 0.25, 0.125, 0.125]
    assert star(probs, [0, 1], 0.0, 0.0)[:1] == [0]
    assert star(probs, [0, 1], 0.49999, 0.0)[:1] == [0]
    assert star(probs, [0, 1], 0.5, 0.0)[:1] == [1]
    assert star(probs, [0, 1], 0.75, 0.0) == [2]
    assert star(probs, [0, 1], 0.75, 0.49999) == [2]
    assert star(probs, [0, 1], 0.75, 0.5) == [3]
    assert star(probs, [0, 1], 0.99999, 0.99999) == [3]
    assert star(probs, [], 0.0, 0.0) == [0]


@pytest.mark.parametrize("coin", [1.0, float("nan")])
def test_a_coin_out_of_range_still_draws_a_token_with_mass(coin):
    assert star([0.5, 0.25, 0.25, 0.0], [0], 0.9, coin) == [2]


def test_children_past_the_width_are_not_tried():
    # token 0 is a child, but the path may not go on: the bonus is drawn from all of p
    call = Call([[7, 0]], [[1, -1]], [[-1, -1]], 1)
    call.sample(torch.tensor([[0.9, 0.0]]), torch.tensor([0.25]), torch.tensor([[[0.5, 0.5]] * 2]))
    assert call.emitted(0) == [0]


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_token_of_probability_zero_is_never_accepted_nor_drawn(thresholds):
    probs = [0.0, 0.5, 0.5, 0.0]
    assert star(probs, [0, 3], 0.0, 0.0, None, *thresholds) == [1]
    assert star(probs, [0, 3], 0.0, 0.99999994, None, *thresholds) == [2]


def test_thresholds_accept_more():
    probs = [0.5, 0.25, 0.25]
    assert star(probs, [1], 0.3, 0.0) == [0]
    assert star(probs, [1], 0.3, 0.0, None, 1.0, 0.5)[:1] == [1]  # .3 < .25 / .5
    assert star(probs, [1], 0.3, 0.0, None, 0.25, 1.0)[:1] == [1]  # .25 >= .25
    for name, rest in {"threshold_single": (1.5, 1.0), "threshold_acc": (1.0, -0.1)}.items():
        with pytest.raises(ValueError, match=rf"target_only: {name} must be in \[0, 1\], got"):
            star(probs, [1], 0.3, 0.0, None, *rest)


def outcomes(probs, tokens, grid, final_grid):
    """Share of each first token over all pairs of coins of two grids of interval centres, and the call."""
    nodes, coins = len(tokens) + 1, (torch.arange(grid) + 0.5).div(grid)
    final = (torch.arange(final_grid) + 0.5).div(final_grid)
    batch = grid * final_grid
    rows = torch.tensor(probs).expand(batch, nodes, -1)
    sibling = [-1, *range(2, nodes), -1]
    call = Call([[9, *tokens]] * batch, [[1] + [-1] * (nodes - 1)] * batch, [sibling] * batch, 2)
    call.sample(coins.repeat_interleave(final_grid).unsqueeze(1).expand(-1, nodes), final.repeat(grid), rows)
    emitted = torch.tensor([call.emitted(b)[0] for b in range(batch)])
    return torch.bincount(emitted, minlength=len(probs)).double() / batch, call


def test_ver_04_fixed_drafts_keep_the_distribution():
    # Coins at the centres of 20 intervals enumerate outcomes whose probabilities are multiples of .05 exactly:
    # 0 is accepted with .5, else 1 with .3 / .5 = .6, else the residual is [0, 0, .75, .25].
    share, call = outcomes([0.5, 0.3, 0.15, 0.05], [0, 1], 20, 20)
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64), rtol=0, atol=1e-12)
    paths = [call.path(b) for b in range(400)]
    assert paths.count([0, 1]) == 200
    assert paths.count([0, 2]) == 120  # of the 200 that rejected 0


@pytest.mark.parametrize("tokens", [[0], [0, 1], [1, 0], [0, 0], [1, 0, 1], [1, 1], [2, 2, 0, 0, 1]])
def test_the_distribution_is_exact_with_duplicate_siblings(tokens):
    # q = (.2, .5, .3): multiples of 1/10, and every residual of multiples of 1/40
    share, _ = outcomes([0.2, 0.5, 0.3], tokens, 10, 40)
    torch.testing.assert_close(share, torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), rtol=0, atol=1e-12)


def test_random_coins_give_the_target_distribution_at_both_levels():
    batch, vocab_size = 40_000, 5
    rows = torch.softmax(torch.randn(5, vocab_size), -1)
    call = Call([[9, 0, 3, 1, 2]] * batch, [T5_LINKS[0]] * batch, [T5_LINKS[1]] * batch, 3)
    call.sample(torch.rand(batch, 5), torch.rand(batch), rows.expand(batch, -1, -1))
    predicts = call.predicts.view(batch, 5)
    # chi-square with 4 degrees of freedom exceeds 18.5 with probability 0.001
    assert chi_square(torch.bincount(predicts[:, 0], minlength=vocab_size), rows[0]) < 18.5
    for node in (1, 2):
        second = predicts[call.accept_index[:, 1] == torch.arange(batch) * 5 + node, node]
        assert len(second) > 1000
        assert chi_square(torch.bincount(second, minlength=vocab_size), rows[node]) < 18.5


@pytest.mark.parametrize("nodes", [1, 2, 7, 33, 65])
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 0.7)])
def test_sampling_agrees_with_the_pointer_walk(nodes, thresholds):
    batch, vocab_size, length = 12, 11, min(nodes, 5)
    trees = [shuffled_links(random_parents(nodes, seed), seed) for seed in range(batch)]
    candidates = torch.randint(-1, vocab_size + 1, (batch, nodes))
    probs = torch.softmax(2 * torch.randn(batch, nodes, vocab_size), -1)
    coins, final = torch.rand(batch, nodes), torch.rand(batch)
    call = Call(candidates, [t[0] for t in trees], [t[1] for t in trees], length)
    call.sample(coins, final, probs, None, *thresholds)
    for b, tree in enumerate(trees):
        inputs = (coins[b].tolist(), float(final[b]), probs[b].double().tolist())
        path, bonus = target_only(candidates[b].tolist(), *tree, *inputs, length, *thresholds)
        assert call.path(b) == path
        assert call.emitted(b) == [int(candidates[b, node]) for node in path[1:]] + [bonus]
        foreign = (candidates[b, 1:] == vocab_size).any()
        assert call.status[b] == (ck.VerifyStatus.TOKEN_OUT_OF_RANGE if foreign else 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ver_13_explicit_coins_decide_on_every_dtype(dtype):
    # T = 1.5 over logits with one clear winner; row 1's coins lie above the winner's mass, so sampling leaves the
    # greedy path there, and a call that fell back to greedy would show.
    batch, vocab_size = 3, 257
    logits = torch.zeros(batch, 5, vocab_size)
    logits[:, :, 17] = 8.0
    probs = torch.softmax(logits / 1.5, -1).to(dtype)  # token 17 holds 0.447
    coins = torch.tensor([0.2, 0.99, 0.4]).unsqueeze(1).expand(-1, 5)
    call = Call([[7, 17, 5, 17, 2]] * batch, [T5_LINKS[0]] * batch, [T5_LINKS[1]] * batch, 3)
    call.sample(coins, torch.tensor([0.1, 0.5, 0.9]), probs)
    rows = probs.double().tolist()
    finals = (0.1, 0.5, 0.9)
    for b in range(batch):
        path, bonus = target_only(
            [7, 17, 5, 17, 2], *T5_LINKS, coins[b].tolist(), torch.tensor(finals)[b].item(), rows[b], 3
        )
        assert call.path(b) == path
        assert call.emitted(b)[-1] == bonus
    greedy = Call([[7, 17, 5, 17, 2]] * batch, [T5_LINKS[0]] * batch, [T5_LINKS[1]] * batch, 3).greedy(
        logits.argmax(-1)
    )
    assert call.emitted(0)[:2] == greedy.emitted(0)[:2] == [17, 17]
    assert call.emitted(1) != greedy.emitted(1)
    assert call.path(1) == [0]


def test_draft_probs_are_neither_read_nor_written():
    probs = torch.softmax(torch.randn(2, 5, 6), -1)
    coins, final = torch.rand(2, 5), torch.rand(2)
    results = []
    for scratch in (None, torch.full((2, 5, 6), float("nan"))):
        call = Call([[7, 3, 5, 1, 2]] * 2, [T5_LINKS[0]] * 2, [T5_LINKS[1]] * 2, 3)
        results.append(call.sample(coins, final, probs, scratch, 1.0, 1.0, True).outputs())
        assert scratch is None or scratch.isnan().all()
    assert results[0] == results[1]


def test_rows_of_nan_and_without_mass_give_their_greatest_entry_and_say_so():
    nan = float("nan")
    assert star([nan] * 4, [0, 1], 0.1, 0.5) == [0]
    assert star([0.0] * 4, [2, 1], 0.1, 0.5) == [0]
    assert star([0.25, nan, 0.75, 0.0], [1], 0.0, 0.5) == [2]
    assert star([0.0, nan, 0.0, 0.0], [2], 0.0, 0.5) == [0]
    call = Call([[7, 3]], [[1, -1]], [[-1, -1]], 2)
    rows = torch.tensor([[[0.0, 0.0, 0.0, 1.0], [nan, nan, nan, nan]]])
    call.sample(torch.tensor([[0.5, 0.5]]), torch.tensor([0.5]), rows)
    assert call.emitted(0) == [3, 0]
    assert call.status.tolist() == [ck.VerifyStatus.NAN_ROW]
    # everything was tried, yet the coin lay above the mass of the row: the greatest entry, and not the last column
    assert star([0.4, 0.5, 0.0, 0.0], [0, 1], 0.95, 0.5) == [1]


def test_msk_07_a_request_does_not_depend_on_the_batch():
    seeds = range(4)
    trees = [shuffled_links(random_parents(13, seed), seed) for seed in seeds]
    candidates, probs = torch.randint(0, 6, (4, 13)), torch.softmax(torch.randn(4, 13, 6), -1)
    coins, final = torch.rand(4, 13), torch.rand(4)
    for used, row in enumerate((1, 5, 13, 13)):  # nodes past `row` are padding: no list holds them
        first, sibling = trees[used]
        first[:] = [node if node < row else -1 for node in first]
        sibling[:] = [-1 if i >= row or node >= row else node for i, node in enumerate(sibling)]
    together = Call(candidates, [t[0] for t in trees], [t[1] for t in trees], 5).sample(coins, final, probs)
    for b in seeds:
        alone = Call(candidates[b : b + 1], [trees[b][0]], [trees[b][1]], 5)
        alone.sample(coins[b : b + 1], final[b : b + 1], probs[b : b + 1])
        assert (together.path(b), together.emitted(b)) == (alone.path(0), alone.emitted(0))
    candidates[0, 1:], probs[0, 1:], coins[0, 1:] = 2**31 - 1, float("nan"), float("nan")
    again = Call(candidates, [t[0] for t in trees], [t[1] for t in trees], 5).sample(coins, final, probs)
    assert again.outputs()[:3] == together.outputs()[:3]
    assert again.status.tolist() == together.status.tolist()


# links that are no tree


@pytest.mark.parametrize("fault", MALFORMED_LINKS)
@pytest.mark.parametrize("place", [0, 1])
def test_msk_02_malformed_links_are_refused_and_nothing_is_written(fault, place):
    trees = [T5_LINKS, T5_LINKS]
    trees[place] = MALFORMED_LINKS[fault]
    call = Call([[7, 3, 5, 9, 2]] * 2, [t[0] for t in trees], [t[1] for t in trees], 3)
    before = call.outputs()
    message = rf"retrive_next_token must be the links of a tree .*, got \[.*in row {place}"
    with pytest.raises(ValueError, match=f"verify_tree_greedy: {message}"):
        call.greedy([[5, 9, 2, 4, 11]] * 2)
    with pytest.raises(ValueError, match=f"target_only: {message}"):
        call.sample(torch.rand(2, 5), torch.rand(2), torch.full((2, 5, 12), 1 / 12))
    assert call.outputs() == before


@pytest.mark.parametrize("fault", [*MALFORMED_LINKS, "a row out of range"])
def test_msk_02_where_values_cannot_be_looked_at_the_request_is_flagged(fault, monkeypatch):
    # what a CUDA call does, without the refusal that only the CPU can afford
    monkeypatch.setattr(sglang, "refuse_malformed_links", lambda *args: None)
    trees = [T5_LINKS, MALFORMED_LINKS.get(fault, T5_LINKS)]
    call = Call([[7, 3, 5, 9, 2]] * 2, [t[0] for t in trees], [t[1] for t in trees], 3)
    if fault == "a row out of range":
        call.index[1, 3] = 10
        monkeypatch.setattr(sglang, "refuse", lambda *args: None)
    call.greedy([[5, 9, 2, 4, 11], [3, 9, 2, 4, 11]])
    assert call.accept_index.tolist() == [[0, 2, 4], [5, -1, -1]]
    assert [call.emitted(0), call.emitted(1)] == [[5, 2, 11], [3]]
    assert call.status.tolist() == [0, ck.VerifyStatus.MALFORMED_TREE]
    probs = torch.zeros(2, 5, 12)
    probs[:, :, 3], probs[:, :, 5] = 0.25, 0.75
    call.sample(torch.full((2, 5), 0.5), torch.tensor([0.9, 0.1]), probs)  # nothing counts as tried in request 1
    assert [call.emitted(0), call.emitted(1)] == [[5, 5], [3]]
    assert call.status.tolist() == [0, ck.VerifyStatus.MALFORMED_TREE]


def test_rows_out_of_range_are_refused():
    call = Call([[7, 3]], [[1, -1]], [[-1, -1]], 2)
    call.index[0, 1] = 2
    with pytest.raises(ValueError, match=r"retrive_index must be in \[0, 2\), got \[0, 2\] in row 0"):
        call.greedy([[3, 4]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"first": torch.zeros(1, 3, dtype=torch.int64)},
            r"retrive_next_token must be of shape \[1, 2\], got",
        ),
        ({"candidates": torch.zeros(1, 2)}, "candidates must be of dtype int32 or int64, got float32"),
        ({"predicts": torch.zeros(1, dtype=torch.int32)}, "predicts must be of at least 2 elements, got 1"),
        ({"accept_index": torch.zeros(1, 0, dtype=torch.int32)}, r"accept_index must be of shape \[B, D \+ 1\]"),
        ({"count": torch.zeros(1)}, "accept_token_num must be of dtype int32 or int64, got float32"),
        ({"status": torch.zeros(1)}, "status must be of dtype uint8, got float32"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    call = Call([[7, 3]], [[1, -1]], [[-1, -1]], 2)
    vars(call).update(change)
    with pytest.raises(ValueError, match=f"verify_tree_greedy: {message}"):
        call.greedy([[3, 4]])


# build_tree_kernel_efficient


def build(
    parent_list, selected, lengths, topk, depth, mode=MODES.QLEN_ONLY, dtype=torch.int64, device="cpu", mask=None
):
    """Outputs of a build, all of them filled with rubbish before."""
    selected = torch.as_tensor(selected, dtype=dtype, device=device)
    lengths = torch.as_tensor(lengths, dtype=dtype, device=device)
    batch, nodes = selected.shape[0], selected.shape[1] + 1
    if mask is None:
        if mode == MODES.QLEN_ONLY:
            mask = torch.ones(batch, nodes, nodes, dtype=torch.bool, device=device)
        elif mode == MODES.FULL_MASK:
            mask = torch.ones(nodes * (int(lengths.sum()) + batch * nodes), dtype=torch.bool)
        else:
            kind = torch.uint8 if nodes <= 8 else torch.uint16 if nodes <= 16 else torch.uint32
            mask = torch.full((batch * nodes * kind.itemsize,), 255, dtype=torch.uint8).view(kind)
    positions = torch.full((batch * nodes,), SENTINEL, dtype=dtype, device=device)
    outputs = [torch.full((batch, nodes), SENTINEL, dtype=dtype, device=device) for _ in range(3)]
    parent_list = torch.as_tensor(parent_list, dtype=dtype, device=device)
    sglang.build_tree_kernel_efficient(
        parent_list, selected, lengths, mask, positions, *outputs, topk, depth, nodes, int(mode)
    )
    return mask, positions, *outputs


# Candidates 0 and 1 stand below the root, 2 and 3 below candidate 0, 4 and 5 below candidate 1. Selecting 0, 1, 2, 4
# gives T5: nodes A, B, A1 below A, B1 below B.
T5_PARENT_LIST, T5_SELECTED = [-1, 0, 1], [0, 1, 2, 4]
T5_MASK = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_t5_is_built_by_hand(dtype):
    mask, positions, index, first, sibling = build([T5_PARENT_LIST] * 2, [T5_SELECTED] * 2, [6, 0], 2, 2, dtype=dtype)
    assert mask.int().tolist() == [T5_MASK] * 2
    assert positions.tolist() == [6, 7, 7, 8, 8, 0, 1, 1, 2, 2]  # MSK-03: by depth, not by number
    assert index.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert first.tolist() == [T5_LINKS[0]] * 2
    assert sibling.tolist() == [T5_LINKS[1]] * 2


def test_msk_07_the_full_mask_lies_behind_prefixes_of_different_lengths():
    lengths, nodes = [3, 0, 40], 5
    size = nodes * (sum(lengths) + len(lengths) * nodes)
    mask = torch.ones(size + 7, dtype=torch.bool)
    build([T5_PARENT_LIST] * 3, [T5_SELECTED] * 3, lengths, 2, 2, MODES.FULL_MASK, mask=mask)
    start = 0
    for length in lengths:
        rows = mask[start : start + nodes * (length + nodes)].view(nodes, length + nodes)
        assert rows[:, :length].all()
        assert rows[:, length:].int().tolist() == T5_MASK
        start += rows.numel()
    assert mask[start:].all()
    with pytest.raises(ValueError, match=f"tree_mask must be of at least {size} elements, got {size - 1}"):
        build([T5_PARENT_LIST] * 3, [T5_SELECTED] * 3, lengths, 2, 2, MODES.FULL_MASK, mask=mask[: size - 1])


def test_bits_of_t5_by_hand():
    mask, *_ = build([T5_PARENT_LIST], [T5_SELECTED], [6], 2, 2, MODES.QLEN_ONLY_BITPACKING)
    assert mask.dtype == torch.uint8
    assert mask.tolist() == [1, 3, 5, 11, 21]


def eagle_tree(nodes, seed, topk, depth):
    """A selection as EAGLE's drafting makes it, and its parents by looking each candidate up."""
    choose = random.Random(seed)
    parent_list, level, first_of_level = [-1], list(range(topk)), topk
    for _ in range(depth - 1):
        parent_list += choose.sample(level, topk)
        level = list(range(first_of_level, first_of_level + topk * topk))
        first_of_level += topk * topk

    def parent(candidate):
        return None if candidate // topk == 0 else parent_list[candidate // topk]

    selected = set()
    while len(selected) < nodes - 1:
        open_candidates = [c for c in range(first_of_level) if c not in selected and parent(c) in selected | {None}]
        selected.add(choose.choice(open_candidates))
    order = sorted(selected)
    return parent_list, order, [-1] + [0 if parent(c) is None else order.index(parent(c)) + 1 for c in order]


@pytest.mark.parametrize("nodes", [1, 2, 8, 9, 16, 17, 32, 64])
def test_built_trees_agree_with_tree_mask_in_every_layout(nodes):
    topk, depth = 8, 4
    trees = [eagle_tree(nodes, seed, topk, depth) for seed in range(3)]
    parents = torch.tensor([tree[2] for tree in trees], dtype=torch.int32)
    arguments = ([t[0] for t in trees], [t[1] for t in trees], [5, 0, 2], topk, depth)
    expected = ck.tree_mask(parents)
    mask, positions, _, first, sibling = build(*arguments)
    assert torch.equal(mask, ck.unpack_mask(expected, nodes))
    assert positions.view(3, nodes).sub(torch.tensor([5, 0, 2])[:, None]).equal(mask.sum(2) - 1)
    assert torch.equal(links.parents_from_links(first, sibling), parents)
    for given, derived in zip((first, sibling), links.links_from_parents(parents), strict=True):
        assert torch.equal(given, derived)
    if nodes <= 32:
        packed, *_ = build(*arguments, MODES.QLEN_ONLY_BITPACKING)
        assert packed.to(torch.int64).tolist() == [word & 0xFFFFFFFF for word in expected.flatten().tolist()]
    else:
        with pytest.raises(ValueError, match="draft_token_num must be at most 32 with QLEN_ONLY_BITPACKING, got 64"):
            build(*arguments, MODES.QLEN_ONLY_BITPACKING)


def test_msk_04_the_root_alone_is_built():
    for empty in (torch.empty(1, 0), torch.tensor([[-1]])):  # an engine with one level of drafts passes an empty list
        for mode in MODES:
            outputs = build([[]], torch.empty(1, 0, dtype=torch.int64), [6], 4, 1, mode)
            assert [output.flatten().tolist() for output in outputs] == [
                [1] * (7 if mode == 0 else 1),
                [6],
                [0],
                [-1],
                [-1],
            ]
        sglang.build_tree_kernel_efficient(
            empty, torch.tensor([[0, 1]]), torch.tensor([6]), torch.ones(1, 3, 3, dtype=torch.bool),
            torch.empty(3, dtype=torch.int64), *torch.empty(3, 1, 3, dtype=torch.int64), 4, 1, 3, 1
        )  # fmt: skip


@pytest.mark.parametrize(
    ("parent_list", "selected", "lost"),
    [
        ([-1, 0, 1], [0, 1, 3, 6], [4]),  # past the list
        ([-1, 0, 5], [0, 1, 2, 4], [4]),  # the parent, candidate 5, was not selected
        ([-1, 2, 1], [0, 1, 2, 4], [3]),  # a candidate below itself
        ([-1, 4, 2], [0, 1, 2, 4], [3]),  # two candidates below each other
        ([-1, 0, -9], [0, 1, 2, 4], [4]),  # a parent that is no candidate
        ([-1, 0, 1], [0, 1, 2, -1], [4]),  # no candidate
        ([-1, -1, 1], [-1, 0, 1, 2], [1, 4]),  # no candidate below no candidate
    ],
)
def test_msk_02_candidates_without_their_parent_are_refused(parent_list, selected, lost, monkeypatch):
    good = (T5_PARENT_LIST, T5_SELECTED)
    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    arguments = ([good[0], parent_list], [good[1], selected], [0, 0], 2, 2)
    with pytest.raises(ValueError, match=r"selected_index must be in \[0, 6\) .* in row 1 \(entry \d has no parent\)"):
        build(*arguments, mask=mask)
    assert mask.all()
    monkeypatch.setattr(links, "refuse", lambda *args: None)  # as on CUDA: no link, and the root in sight
    mask, positions, _, first, sibling = build(*arguments)
    assert mask[0].int().tolist() == T5_MASK
    reached = links.parents_from_links(first, sibling)[1]
    assert [node for node in range(1, 5) if reached[node] < 0] == lost
    for node in lost:
        assert mask[1, node].nonzero().flatten().tolist() == [0, node]
        assert positions[5 + node] == 1


# devices and empty batches


def test_nothing_waits_for_the_device():
    # a meta tensor has no values: whatever would read one raises
    for length in (1, 5):
        call = Call([[0] * 5] * 3, [T5_LINKS[0]] * 3, [T5_LINKS[1]] * 3, length, device="meta")
        call.greedy(torch.empty(3, 5, device="meta", dtype=torch.int64))
        call.sample(*(torch.empty(shape, device="meta") for shape in ((3, 5), (3,), (3, 5, 11))))
    for mode, size in ((MODES.FULL_MASK, 500), (MODES.QLEN_ONLY, 75), (MODES.QLEN_ONLY_BITPACKING, 15)):
        kind = torch.uint8 if mode == MODES.QLEN_ONLY_BITPACKING else torch.bool
        mask = torch.empty(size, dtype=kind, device="meta")
        build([T5_PARENT_LIST] * 3, [T5_SELECTED] * 3, [1, 2, 3], 2, 2, mode, device="meta", mask=mask)


def test_an_empty_batch_is_an_empty_result():
    none = torch.empty(0, 5, dtype=torch.int64)
    call = Call(none, none, none, 3).greedy(none)
    call.sample(torch.empty(0, 5), torch.empty(0), torch.empty(0, 5, 7))
    assert call.outputs() == [[], [], [], []]
    for mode in MODES:
        build(torch.empty(0, 3), torch.empty(0, 4), torch.empty(0), 2, 2, mode)
