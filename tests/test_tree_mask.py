"""tree_mask and unpack_mask: agreement, properties, refusals."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import NODE_COUNTS, T5, tree_cases


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_t5_bits(backend):
    assert ck.tree_mask(int32(T5), backend=backend).flatten().tolist() == [1, 3, 5, 11, 21]


@pytest.mark.parametrize("num_nodes", NODE_COUNTS)
def test_rows_hold_exactly_the_ancestors(num_nodes):
    for _, parents in tree_cases(num_nodes):
        expected = ck.tree_mask(int32(parents), backend="reference")
        assert torch.equal(ck.tree_mask(int32(parents), backend="native"), expected)
        visible = ck.unpack_mask(expected, num_nodes)
        for node, row in enumerate(visible):
            ancestors = {node}
            while parents[node] >= 0:
                node = parents[node]
                ancestors.add(node)
            assert set(row.nonzero().flatten().tolist()) == ancestors


def test_root_only_tree_sees_itself(backend):
    assert ck.tree_mask(int32([-1]), backend=backend).tolist() == [[1]]


@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 33, 63, 64, 65, 129, 257])
def test_triton_gives_the_same_bits(num_nodes):
    cases = [parents for name, parents in tree_cases(num_nodes) if name != "chain" or num_nodes < 100]
    trees = int32([*cases, cases[-1]])
    counts = torch.full((len(trees),), num_nodes, dtype=torch.int32)
    counts[-1] = (num_nodes + 1) // 2
    trees[-1, counts[-1] :] = 99
    expected = ck.tree_mask(trees, num_nodes=counts, backend="native")
    assert torch.equal(ck.tree_mask(trees, num_nodes=counts, backend="triton"), expected)


@pytest.mark.parametrize("parents", [[-1, 0, 9, 1, 2], [-1, 2, 1, 0, 0], [0] * 5, [-1, -1, 0, 0, 0], [-1, 0, 1, 3, 0]])
def test_on_a_gpu_a_malformed_tree_has_the_mask_of_its_root(parents):
    """What the launch gives where nothing may be read back to refuse it."""
    triton = pytest.importorskip("cerberus_kernels.ops.tree_mask.triton")
    trees, counts = int32([parents, T5, T5, T5]), int32([5, 5, 0, 6])
    root = [1, 0, 0, 0, 0]
    expected = [root, [1, 3, 5, 11, 21], root, root]
    assert triton.unchecked_tree_mask(trees, counts).flatten(1).tolist() == expected


def test_padded_rows_are_zero_and_never_read(backend):
    parents = int32([[-1, 0, 0, 1, 2], [-1, 2**31 - 1, -7, 99, -1]])
    mask = ck.tree_mask(parents, num_nodes=int32([5, 1]), backend=backend)
    assert mask.flatten(1).tolist() == [[1, 3, 5, 11, 21], [1, 0, 0, 0, 0]]


def test_empty_batch(backend):
    assert ck.tree_mask(torch.empty(0, 40, dtype=torch.int32), backend=backend).shape == (0, 40, 2)


def test_strided_rows(backend):
    wide = torch.full((3, 9), 77, dtype=torch.int32)
    wide[:, 2:7] = int32(T5)
    mask = ck.tree_mask(wide[:, 2:7], backend=backend)
    assert mask[2].flatten().tolist() == [1, 3, 5, 11, 21]


@pytest.mark.parametrize("parents", [[-1, 0, 9, 1, 2], [-1, 2, 1], [0], [-1, -1, 0], [-1, 0, 1, 3]])
def test_malformed_trees_are_refused(backend, parents):
    with pytest.raises(ValueError, match="tree_mask: parents must be -1 for the root"):
        ck.tree_mask(int32(parents), backend=backend)
    batch = torch.full((2, 5), 0, dtype=torch.int32)
    batch[0] = int32(T5)
    batch[1, : len(parents)] = int32(parents)
    with pytest.raises(ValueError, match="in row 1"):
        ck.tree_mask(batch, num_nodes=int32([5, len(parents)]), backend=backend)


def test_refusals_name_argument_constraint_and_value():
    with pytest.raises(ValueError, match="parents must be of dtype int32, got int64"):
        ck.tree_mask(torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match=r"num_nodes must lie in \[1, 5\], got 6"):
        ck.tree_mask(int32([T5]), num_nodes=int32([6]))
    with pytest.raises(ValueError, match="num_nodes must be None for one tree"):
        ck.tree_mask(int32(T5), num_nodes=int32([5]))
    with pytest.raises(ValueError, match=r"num_nodes must be in \[0, 32\], got 33"):
        ck.unpack_mask(ck.tree_mask(int32(T5)), 33)


def test_opcheck():
    parents = torch.full((2, 12), 3, dtype=torch.int32)
    parents[:, 1:6] = int32(T5)
    for rows in (int32([T5]), parents[:, 1:6]):
        torch.library.opcheck(torch.ops.cerberus_kernels.tree_mask.default, (rows,))


def test_compiles_whole():
    compiled = torch.compile(lambda parents: ck.tree_mask(parents) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(int32(T5)), ck.tree_mask(int32(T5)) + 1)
