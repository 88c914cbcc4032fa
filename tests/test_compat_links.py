"""compat.links: parents from and to the links and paths of other engines; and what holds for all of compat."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch
from compat_cases import MALFORMED_LINKS, T5_LINKS, shuffled_links

import cerberus_kernels as ck
from cerberus_kernels import compat
from cerberus_kernels.compat import links
from cerberus_kernels.testing import NODE_COUNTS, T5, tree_cases

MODULES = sorted(module.name for module in pkgutil.iter_modules(compat.__path__))
MALFORMED_PARENTS = [[-1, 0, 9, 1, 2], [-1, 2, 1], [0], [-1, -1, 0], [-1, 0, 1, 3]]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"cerberus_kernels.compat.{name}")
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("_")])
def test_each_module_is_imported_by_itself_and_only_when_asked_for(name):
    code = "import sys, cerberus_kernels\nassert 'cerberus_kernels.compat' not in sys.modules\n"
    code += f"import cerberus_kernels.compat.{name}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("nodes", NODE_COUNTS)
def test_links_and_parents_are_inverse(nodes):
    trees = [tree for _, tree in tree_cases(nodes)]
    parents = torch.tensor(trees, dtype=torch.int32)
    first, sibling = links.links_from_parents(parents)
    for row, tree in enumerate(trees):
        for node in range(nodes):
            children = [child for child in range(nodes) if tree[child] == node]
            assert first[row, node] == (children[0] if children else -1)
            assert [sibling[row, child] for child in children] == [*children[1:], -1][: len(children)]
    assert torch.equal(links.parents_from_links(first, sibling), parents)
    shuffled = [shuffled_links(tree, 5) for tree in trees]
    for dtype in links.INTEGERS:
        first, sibling = (torch.tensor([pair[i] for pair in shuffled], dtype=dtype) for i in (0, 1))
        assert torch.equal(links.parents_from_links(first, sibling), parents)


def test_ranks_follow_the_list():
    first, sibling = torch.tensor([[3, -1, -1, -1, -1]]), torch.tensor([[-1, 4, -1, 1, -1]])
    lists = links.sibling_lists(first, sibling)  # the root's children are 3, 1, 4; node 2 is padding
    assert lists.parents.tolist() == [[-1, 0, -1, 0, 0]]
    assert lists.ranks.tolist() == [[0, 1, 0, 0, 2]]
    assert lists.malformed.tolist() == [False]


@pytest.mark.parametrize("fault", MALFORMED_LINKS)
def test_malformed_links_are_refused_alone_and_in_a_batch(fault):
    bad = MALFORMED_LINKS[fault]
    for trees in ([bad], [T5_LINKS, bad]):
        first, sibling = (torch.tensor([tree[i] for tree in trees]) for i in (0, 1))
        message = rf"parents_from_links: first_child must be the links of a tree .* in row {len(trees) - 1}"
        with pytest.raises(ValueError, match=message):
            links.parents_from_links(first, sibling)
        assert links.sibling_lists(first, sibling).malformed.tolist() == [False, True][-len(trees) :]


@pytest.mark.parametrize("bad", MALFORMED_PARENTS)
def test_msk_02_malformed_parents_are_refused(bad):
    good = [-1, *range(len(bad) - 1)]
    for trees in ([bad], [good, bad]):
        with pytest.raises(ValueError, match=f"links_from_parents: parents must be .* in row {len(trees) - 1}"):
            links.links_from_parents(torch.tensor(trees, dtype=torch.int32))


def test_padding_is_in_no_list():
    parents = torch.tensor([T5, [-1, 0, 7, 7, 7]], dtype=torch.int32)
    first, sibling = links.links_from_parents(
        parents, num_nodes=torch.tensor([5, 2], dtype=torch.int32), dtype=torch.int32
    )
    assert first.tolist() == [T5_LINKS[0], [1, -1, -1, -1, -1]]
    assert sibling.tolist() == [T5_LINKS[1], [-1] * 5]
    assert first.dtype == sibling.dtype == torch.int32


@pytest.mark.parametrize("nodes", NODE_COUNTS)
def test_parents_from_paths_of_every_leaf(nodes):
    for _, tree in tree_cases(nodes):
        paths = []
        for leaf in set(range(nodes)) - set(tree[1:]):
            path = [leaf]
            while path[0] != 0:
                path.insert(0, tree[path[0]])
            paths.append(path)
        width = max(map(len, paths))
        matrix = torch.tensor([[path + [-1] * (width - len(path)) for path in paths] + [[-1] * width]])
        parents, num_nodes = links.parents_from_paths(matrix, nodes + 2)
        assert parents.tolist() == [[*tree, -1, -1]]
        assert num_nodes.tolist() == [nodes]


def test_paths_of_a_medusa_tree():
    tree = ck.Tree.from_choices([(0,), (0, 0), (1,), (0, 1)])
    parents, num_nodes = links.parents_from_paths(tree.paths.unsqueeze(0), tree.num_nodes)
    assert parents[0].tolist() == tree.parents.tolist()
    assert num_nodes.tolist() == [5]


@pytest.mark.parametrize(
    "bad",
    [
        [[0, 1, 2], [0, 2, -1]],  # node 2 below two parents
        [[0, 2, 1]],  # a parent after its child
        [[0, 1, 1]],  # a node below itself
        [[0, 1, 5]],  # no such node
        [[0, 1, -2]],
        [[1, 2, -1]],  # not from the root
        [[0, 1, 2], [2, 3, -1]],
        [[0, -1, 1]],  # a hole
        [[0, 1, 3]],  # node 2 left out
        [[0, 1, 0]],  # the root below a node
    ],
)
def test_malformed_paths_are_refused(bad, monkeypatch):
    good = [[0, 1, 2]] + [[-1] * 3] * (len(bad) - 1)
    for matrix in ([bad], [good, bad]):
        with pytest.raises(ValueError, match=rf"parents_from_paths: paths must be .* in row {len(matrix) - 1}"):
            links.parents_from_paths(torch.tensor(matrix), 5)
    monkeypatch.setattr(links, "refuse", lambda *args: None)  # as on a device where looking would be a sync
    parents, num_nodes = links.parents_from_paths(torch.tensor([good, bad]), 5)
    assert parents.tolist() == [[-1, 0, 1, -1, -1], [-1] * 5]
    assert num_nodes.tolist() == [3, 1]


def test_nothing_waits_for_the_device_and_empty_batches_work():
    for device, batch in (("meta", 3), ("cpu", 0)):
        integers = torch.empty(batch, 5, dtype=torch.int32, device=device)
        assert links.parents_from_links(integers, integers).shape == (batch, 5)
        assert [tensor.shape for tensor in links.links_from_parents(integers)] == [(batch, 5)] * 2
        paths = torch.empty(batch, 2, 3, dtype=torch.int32, device=device)
        assert [tensor.shape for tensor in links.parents_from_paths(paths, 4)] == [(batch, 4), (batch,)]
