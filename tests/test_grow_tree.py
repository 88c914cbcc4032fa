"""grow_tree: the best paths by brute force, order and ties, sizes by cost, memory, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels._dispatch import OPERATORS
from cerberus_kernels.testing import available_isa_levels, isa_level

NAN = math.nan


def likely(*shape, seed=0):
    """Sorted log-probabilities of random candidates."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2).log_softmax(-1).sort(descending=True).values


def paths_of(tree, b=0):
    """Ranks on the way to every node of one request, root first."""
    paths = [()]
    for node in range(1, int((tree.score[b] > -math.inf).sum())):
        parent, (head, rank) = int(tree.parents[b, node]), tree.slots[b, node].tolist()
        assert 0 <= parent < node
        assert head == len(paths[parent])
        paths.append((*paths[parent], rank))
    return paths


def brute_force(log_probs, budget):
    """Scores of all paths of one request, the best first, summed in fp32 from the root."""
    heads, ranks = log_probs.shape
    scores = [torch.zeros(())]
    for depth in range(1, heads + 1):
        for path in itertools.product(range(ranks), repeat=depth):
            score = torch.zeros(())
            for head, rank in enumerate(path):
                score = score + log_probs[head, rank]
            scores.append(score)
    return torch.stack(scores).sort(descending=True).values[:budget]


@pytest.mark.parametrize("budget", [1, 2, 3, 17, 64, 400])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_nodes_are_the_best_paths(backend, heads, budget):
    log_probs = likely(3, heads, 4)
    tree = ck.grow_tree(log_probs, budget, backend=backend)
    for b in range(3):
        expected = brute_force(log_probs[b], budget)
        count = len(expected)
        assert int(tree.num_nodes[b]) == count
        assert torch.equal(tree.score[b, :count], expected)
        paths = paths_of(tree, b)
        assert len(set(paths)) == count
        for path, score in zip(paths, tree.score[b].tolist(), strict=False):
            assert score == pytest.approx(sum(log_probs[b, h, r].item() for h, r in enumerate(path)), abs=1e-5)
        for name in ("parents", "slots"):
            assert (getattr(tree, name)[b, count:] == -1).all()
        assert (tree.score[b, count:] == -math.inf).all()


@pytest.mark.parametrize("size", [1, 2, 7, 30])
def test_the_first_nodes_are_the_smaller_tree(backend, size):
    log_probs = likely(2, 3, 6)
    whole, part = (ck.grow_tree(log_probs, n, backend=backend) for n in (31, size))
    for name in ("parents", "slots", "score"):
        assert torch.equal(getattr(whole, name)[:, :size], getattr(part, name))


def test_ties_by_hand(backend):
    """All scores are equal within a depth: the shallower, then the earlier parent, then the better rank."""
    log_probs = torch.zeros(1, 2, 2)
    tree = ck.grow_tree(log_probs, 7, backend=backend)
    assert paths_of(tree) == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    uneven = torch.tensor([[[-1.0, -2.0], [-1.0, -1.0]]])
    tree = ck.grow_tree(uneven, 7, backend=backend)
    assert paths_of(tree) == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_backends_agree_bit_by_bit():
    for seed in range(10):
        quantised = (likely(4, 4, 5, seed=seed) * 2).round() / 2  # many ties
        tokens, roots = torch.randint(99, (4, 4, 5), dtype=torch.int32), torch.randint(99, (4,), dtype=torch.int32)
        costs = torch.linspace(1, 2, 40)
        one, other = (
            ck.grow_tree(quantised, 40, tokens=tokens, roots=roots, costs=costs, backend=backend)
            for backend in ("reference", "native")
        )
        for name, expected in one._asdict().items():
            assert torch.equal(getattr(other, name), expected), name


def test_a_heads_candidates_end_at_what_is_no_probability(backend):
    log_probs = torch.tensor([[[-0.1, NAN, -0.2], [-0.5, -math.inf, -math.inf], [NAN, NAN, NAN]]])
    tree = ck.grow_tree(log_probs, 6, backend=backend)
    assert tree.num_nodes.tolist() == [3]
    assert paths_of(tree) == [(), (0,), (0, 0)]


def test_more_than_certain_counts_as_certain(backend):
    tree = ck.grow_tree(torch.tensor([[[0.5, -1.0]]]), 3, backend=backend)
    assert tree.score.tolist() == [[0.0, 0.0, -1.0]]


def test_tokens_follow_their_slots(backend):
    log_probs, roots = likely(2, 3, 4), torch.tensor([70, 71], dtype=torch.int32)
    tokens = torch.arange(24, dtype=torch.int32).view(2, 3, 4)
    tree = ck.grow_tree(log_probs, 90, tokens=tokens, roots=roots, backend=backend)
    for b in range(2):
        count = int(tree.num_nodes[b])
        assert tree.draft_tokens[b, 0] == roots[b]
        for node in range(1, count):
            head, rank = tree.slots[b, node].tolist()
            assert tree.draft_tokens[b, node] == tokens[b, head, rank]
        assert (tree.draft_tokens[b, count:] == -1).all()
    assert ck.grow_tree(log_probs, 5, backend=backend).draft_tokens is None


def test_size_by_cost(backend):
    log_probs = torch.tensor([[[0.6, 0.3], [0.5, 0.1]], [[0.05, 0.01], [0.5, 0.1]]]).log()
    tree = ck.grow_tree(log_probs, 4, costs=torch.tensor([1.0, 1.2, 1.5, 1.9]), backend=backend)
    assert tree.num_nodes.tolist() == [2, 1]
    assert int((tree.score > -math.inf).sum()) == 8  # the nodes behind are there all the same
    flat = ck.grow_tree(log_probs, 4, costs=torch.ones(4), backend=backend)
    assert flat.num_nodes.tolist() == [4, 4]
    free = ck.grow_tree(torch.full((1, 1, 2), -math.inf), 3, costs=torch.ones(3), backend=backend)
    assert free.num_nodes.tolist() == [1]


def test_trees_pass_on_to_the_other_operators(backend):
    tree = ck.grow_tree(likely(2, 3, 4), 200, backend=backend)
    mask = ck.tree_mask(tree.parents, num_nodes=tree.num_nodes)
    assert mask.shape == (2, 200, 7)


def test_strides_and_empty_batches(backend):
    log_probs = likely(3, 2, 4)
    spread = torch.full((6, 5, 9), NAN)
    spread[::2, 1:3, 2:6] = log_probs
    expected = ck.grow_tree(log_probs, 9, backend=backend)
    found = ck.grow_tree(spread[::2, 1:3, 2:6], 9, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(found[:4], expected[:4], strict=True))
    for shape in ((0, 2, 4), (2, 0, 4), (2, 2, 0)):
        tree = ck.grow_tree(torch.zeros(shape), 3, backend=backend)
        assert tree.parents.shape == (shape[0], 3)
        assert tree.num_nodes.tolist() == [1] * shape[0]


def test_every_level_gives_the_same_bits():
    log_probs = likely(5, 4, 10)
    found = []
    for level in available_isa_levels():
        with isa_level(level):
            found.append(ck.grow_tree(log_probs, 64, costs=torch.linspace(1, 3, 64), backend="native"))
    for tree in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tree[:4], found[0][:4], strict=True))


def test_opcheck_and_compile(backend):
    log_probs, costs = likely(2, 3, 4), torch.ones(9)
    tokens, roots = torch.zeros(2, 3, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    operator = torch.ops.cerberus_kernels.grow_tree.default
    torch.library.opcheck(operator, (log_probs, 9), {"backend": backend})
    torch.library.opcheck(operator, (log_probs, 9, tokens, roots, costs), {"backend": backend})
    assert "grow_tree" in OPERATORS

    def run(log_probs):
        return ck.grow_tree(log_probs, 9, costs=costs, backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend="eager")(log_probs)
    assert all(torch.equal(a, b) for a, b in zip(compiled[:4], run(log_probs)[:4], strict=True))


LOG_PROBS = likely(2, 3, 4)
TOKENS, ROOTS = torch.zeros(2, 3, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": [1.0]}, "log_probs must be a torch.Tensor, got list"),
        ({"log_probs": LOG_PROBS[0]}, "log_probs must be 3-dimensional, got shape"),
        ({"log_probs": LOG_PROBS.double()}, "log_probs must be of dtype float32, got float64"),
        ({"log_probs": LOG_PROBS.transpose(1, 2)}, "log_probs must be contiguous in its last dimension"),
        ({"log_probs": LOG_PROBS.flip(-1)}, "log_probs must be sorted, best first, got "),
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"budget": 2.0}, "budget must be an integer, got 2.0"),
        ({"tokens": TOKENS}, "roots must be given with tokens, and only then, got tokens alone"),
        ({"roots": ROOTS}, "roots must be given with tokens, and only then, got roots"),
        ({"tokens": TOKENS.long(), "roots": ROOTS}, "tokens must be of dtype int32, got int64"),
        ({"tokens": TOKENS[:, :2], "roots": ROOTS}, r"tokens must be of shape \[2, 3, 4\]"),
        ({"tokens": TOKENS, "roots": ROOTS[:1]}, r"roots must be of shape \[2\]"),
        ({"costs": torch.ones(4)}, r"costs must be of shape \[5\], got \[4\]"),
        ({"costs": torch.ones(5).double()}, "costs must be of dtype float32, got float64"),
        ({"costs": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])}, "costs must be above 0, got 0.* for 3 nodes"),
    ],
)
def test_refusals(backend, changes, message):
    arguments = {"log_probs": LOG_PROBS, "budget": 5} | changes
    with pytest.raises(ValueError, match="grow_tree: " + message):
        ck.grow_tree(**arguments, backend=backend)
