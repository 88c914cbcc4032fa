"""Faults of tree masks that were reported elsewhere, through every operator that a mask or a tree reaches."""

from __future__ import annotations

import pytest
import torch
from cerberus_decode import Adapter, Decoder, FixedTree
from cerberus_decode.layout import TreeLayout
from decoding_models import greedy, prompt, random_heads, tiny_llama

import cerberus_kernels as ck
from cerberus_kernels.testing import T5, assert_close


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


THIRTEEN = ck.Tree.from_choices([(i,) for i in range(3)] + [(i, j) for i in range(3) for j in range(3)])


@pytest.mark.parametrize("shape", [(13, 40), (12, 53), (53, 13), (13, 54), (13, 2), (1, 13)])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_mask_of_another_shape_is_refused(backend, shape):  # MSK-01
    q, cache = torch.zeros(1, 13, 2, 8), torch.zeros(1, 64, 1, 8)
    mask = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"mask must be of shape \[13, 1\], got \[{shape[0]}, {shape[1]}\]"):
        ck.tree_attention(q, cache, cache, mask, int32([40]), backend=backend)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_mask_of_another_dtype_is_refused(backend, dtype):  # MSK-01
    q, cache = torch.zeros(1, 13, 2, 8), torch.zeros(1, 64, 1, 8)
    with pytest.raises(ValueError, match="mask must be of dtype int32, got"):
        ck.tree_attention(q, cache, cache, torch.zeros(13, 1, dtype=dtype), int32([40]), backend=backend)


def test_the_tree_of_the_root_alone():  # MSK-04
    tree = ck.Tree.from_choices([])
    assert ck.tree_mask(tree.parents).tolist() == [[1]]
    layout = TreeLayout(tree, torch.device("cpu"))
    assert (layout.depths + 7).tolist() == [7]
    logits = torch.nn.functional.one_hot(torch.tensor([[5]]), 8).float()
    verdict = ck.verify_tree(logits, int32([[3]]), tree.parents)
    assert (verdict.tokens.tolist(), verdict.num_accepted.tolist()) == ([[5]], [0])
    cache = torch.randn(1, 1, 9, 1, 4)
    before = cache.clone()
    assert ck.commit_kv(cache, cache.clone(), verdict.path, verdict.num_accepted, int32([7])).tolist() == [8]
    assert torch.equal(cache, before)
    result = Decoder(tiny_llama(), random_heads(), FixedTree(0)).generate(prompt(9), max_new_tokens=20)
    assert result.tokens == greedy(tiny_llama(), prompt(9), 20)
    assert result.metrics.steps == 20


def test_a_chain_written_as_a_tree_is_the_chain():  # MSK-06
    tree, chain = ck.Tree.from_choices([(0,), (0, 0), (0, 0, 0)]), ck.Tree.chain(3)
    assert tree.parents.tolist() == chain.parents.tolist() == [-1, 0, 1, 2]
    assert torch.equal(ck.unpack_mask(ck.tree_mask(tree.parents), 4), torch.ones(4, 4).tril().bool())
    assert (TreeLayout(tree, torch.device("cpu")).depths + 6).tolist() == [6, 7, 8, 9]
    logits = torch.randn(1, 4, 12)
    drafts = torch.cat([torch.zeros(1, 1, dtype=torch.int64), logits.argmax(-1)[:, :3]], 1)
    drafts[0, 3] = (drafts[0, 3] + 1) % 12
    for parents in (tree.parents, int32([-1, 0, 1, 2])):
        verdict = ck.verify_tree(logits, drafts, parents)
        assert verdict.num_accepted.tolist() == [2]
        assert verdict.tokens[0, :3].tolist() == logits.argmax(-1)[0, :3].tolist()


@pytest.mark.parametrize("width", [13, 16])
def test_padding_changes_no_bit_of_a_row(width):  # MSK-07
    trees, prefixes = [int32([-1]), int32(T5), THIRTEEN.parents], [3, 0, 40]
    counts = int32([len(tree) for tree in trees])
    parents = torch.full((3, width), 77, dtype=torch.int32)
    for row, tree in zip(parents, trees, strict=True):
        row[: len(tree)] = tree
    torch.manual_seed(0)
    q, keys, values = torch.randn(3, width, 4, 16), torch.randn(3, 60, 2, 16), torch.randn(3, 60, 2, 16)
    logits, drafts = torch.randn(3, width, 50), torch.randint(50, (3, width))

    def run(q, keys, values, logits, drafts):
        mask = ck.tree_mask(parents, num_nodes=counts)
        attended = ck.tree_attention(q, keys, values, mask, int32(prefixes), num_nodes=counts)
        return mask, attended, ck.verify_tree(logits, drafts, parents, num_nodes=counts, max_depth=2)

    mask, attended, verdict = run(q, keys, values, logits, drafts)
    for b, tree in enumerate(trees):
        count, rows = len(tree), slice(b, b + 1)
        solo_mask = ck.tree_mask(tree)
        assert torch.equal(ck.unpack_mask(mask[b], count)[:count], ck.unpack_mask(solo_mask, count))
        lengths = int32([prefixes[b]])
        solo = ck.tree_attention(q[rows, :count].contiguous(), keys[rows], values[rows], solo_mask, lengths)
        assert_close(attended[rows, :count], solo)
        solo_verdict = ck.verify_tree(logits[rows, :count], drafts[rows, :count], tree, max_depth=2)
        assert all(torch.equal(field[rows], other) for field, other in zip(verdict, solo_verdict, strict=True))
    spoiled = [tensor.clone() for tensor in (q, keys, values, logits, drafts)]
    for b, tree in enumerate(trees):
        for tensor, garbage in ((spoiled[0], torch.nan), (spoiled[3], torch.nan), (spoiled[4], 10**9)):
            tensor[b, len(tree) :] = garbage
        for tensor in spoiled[1:3]:
            tensor[b, prefixes[b] + len(tree) :] = torch.nan
    again = run(*spoiled)
    assert torch.equal(again[0], mask)
    assert torch.equal(again[1], attended)
    assert all(torch.equal(field, other) for field, other in zip(again[2], verdict, strict=True))


def test_depth_not_index_gives_rotary_positions():  # MSK-03
    assert (TreeLayout(THIRTEEN, torch.device("cpu")).depths + 1).tolist() == [1] + [2] * 3 + [3] * 9
    adapter = Adapter(tiny_llama())
    cache = adapter.new_cache(capacity=16)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    nodes = torch.tensor([[7, 3, 5, 9, 2]])
    layout = TreeLayout(ck.Tree.from_choices([(0,), (1,), (0, 0), (1, 0)]), torch.device("cpu"))
    with torch.inference_mode():
        adapter.prefill(tokens, cache)
        _, logits = adapter.forward(nodes, layout, cache)
        for path in ([0, 1, 3], [0, 2, 4]):
            plain = tiny_llama()(torch.cat([tokens, nodes[:, path]], 1)).logits[:, 6:]
            torch.testing.assert_close(logits[:, path], plain, rtol=1e-4, atol=1e-4)
