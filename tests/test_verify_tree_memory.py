"""verify_tree: shapes, strides and memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

import pytest
import torch
from verify_cases import MODES, assert_same, expecting, int32, one_hot_rows, random_case, rule, some

import cerberus_kernels as ck
from cerberus_kernels.ops.verify_tree.parameters import DEFAULTS
from cerberus_kernels.testing import T5, random_parents

NAN = math.nan


@pytest.mark.parametrize("mode", MODES)
def test_root_only_rows(backend, mode):
    rows, drafts = one_hot_rows([5], 8) * 4, int32([[1]])
    verdict = ck.verify_tree(rows, drafts, int32([-1]), **rule(mode, drafts, 8), backend=backend)
    assert verdict.tokens.tolist() == [[5]]
    assert verdict.path.tolist() == [[0]]
    assert verdict.num_accepted.tolist() == [0]


@pytest.mark.parametrize("mode", MODES)
def test_max_depth_cuts_the_path(backend, mode):
    rows = one_hot_rows([1, 2, 3, 4], 8) * 4
    drafts, parents = int32([[0, 1, 2, 3]]), int32([-1, 0, 1, 2])
    for depth, tokens in ((0, [1]), (2, [1, 2, 3]), (5, [1, 2, 3, 4, -1, -1])):
        verdict = ck.verify_tree(rows, drafts, parents, **rule(mode, drafts, 8), max_depth=depth, backend=backend)
        assert verdict.tokens.tolist() == [tokens]


@pytest.mark.parametrize("mode", MODES)
def test_empty_batch(backend, mode):
    none = int32([]).reshape(0, 4)
    keys = {**rule(mode, none, 7), "backend": backend}
    verdict = ck.verify_tree(torch.empty(0, 4, 7), none, int32([-1, 0, 0, 1]), **keys)
    assert verdict.tokens.shape == (0, 4)
    assert verdict.status.shape == (0,)
    if mode == "rejection":
        keys["draft_probs"] = torch.empty(0, 7)
    ragged = ck.verify_tree(torch.empty(0, 7), int32([]), int32([]), cu_nodes=int32([0]), max_depth=2, **keys)
    assert ragged.path.shape == (0, 3)


@pytest.mark.parametrize("mode", MODES)
def test_dense_padded_and_ragged_forms_agree(backend, mode):
    counts = [1, 5, 13, 32]
    trees = [random_parents(count, seed=count) for count in counts]
    cases = [random_case(1, tree, 101, torch.float32, seed) for seed, tree in enumerate(trees)]
    seeds, positions = torch.tensor([4, -5, 6, 2**62]), torch.tensor([0, 9, 2**33, 7])
    rules = [rule(mode, drafts, 101) for _, drafts in cases]
    solo = [
        ck.verify_tree(
            logits, drafts, int32(tree), seed=int(seeds[b]), position=int(positions[b]), max_depth=9, **rules[b],
            backend=expecting(backend),
        )
        for b, ((logits, drafts), tree) in enumerate(zip(cases, trees, strict=True))
    ]  # fmt: skip
    logits, probs = torch.full((4, 40, 110), NAN), torch.full((4, 40, 101), NAN)
    drafts, parents = torch.full((4, 40), 10**9), torch.full((4, 40), 10**9, dtype=torch.int32)
    for b, ((rows, tokens), tree) in enumerate(zip(cases, trees, strict=True)):
        logits[b, : counts[b], :101], drafts[b, : counts[b]], parents[b, : counts[b]] = rows, tokens, int32(tree)
        if mode == "rejection":
            probs[b, : counts[b]] = rules[b]["draft_probs"]
    used = torch.arange(40) < int32(counts).unsqueeze(1)
    keywords = {"seed": seeds, "position": positions, "max_depth": 9, "vocab_size": 101, "backend": backend, **rules[0]}
    more = [{"draft_probs": probs}, {"draft_probs": torch.cat([probs[used], probs[0, :3]])}]
    dense, flat = ({**keywords, **(own if mode == "rejection" else {})} for own in more)
    padded = ck.verify_tree(logits, drafts, parents, num_nodes=int32(counts), **dense)
    ragged = ck.verify_tree(
        torch.cat([logits[used], torch.full((3, 110), NAN)]), torch.cat([drafts[used], torch.zeros(3).long()]),
        torch.cat([parents[used], int32([9, 9, 9])]), cu_nodes=int32([0, 1, 6, 19, 51]), **flat,
    )  # fmt: skip
    for b, expected in enumerate(solo):
        assert_same(ck.Verdict(*(field[b : b + 1] for field in padded)), expected)
        assert_same(ck.Verdict(*(field[b : b + 1] for field in ragged)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_strided_rows_and_broadcast_trees(backend, mode):
    batch = some(backend, 3, 2)
    logits, drafts = random_case(batch, list(T5), 50, torch.bfloat16)
    wide = torch.full((batch, 5, 2, 64), NAN, dtype=torch.bfloat16)
    wide[:, :, 1, 3:53] = logits
    wide_drafts = torch.full((batch, 9), 77)
    wide_drafts[:, 2:7] = drafts
    keys = {**rule(mode, drafts, 50), "backend": backend}
    expected = ck.verify_tree(logits, drafts, int32(T5), **{**keys, "backend": expecting(backend)})
    trees = int32(T5).expand(batch, 5)
    assert_same(ck.verify_tree(wide[:, :, 1, 3:53], wide_drafts[:, 2:7], trees, **keys), expected)
    turned = logits.transpose(0, 1).contiguous().transpose(0, 1)  # requests innermost
    assert_same(ck.verify_tree(turned, drafts, trees, **keys), expected)


def test_one_tree_with_a_count_per_request(backend):
    logits, drafts = random_case(3, [-1, 0, 1, 2, 3], 50, torch.float32)
    parents = int32([-1, 0, 1, 2, 3])
    drafts[:, 1:] = logits.argmax(-1)[:, :-1]
    verdict = ck.verify_tree(logits, drafts, parents, num_nodes=int32([1, 3, 5]), backend=backend)
    assert verdict.num_accepted.tolist() == [0, 2, 4]


@pytest.mark.parametrize("mode", MODES)
def test_out_is_filled_and_its_surroundings_are_not(backend, mode):
    logits, drafts = random_case(2, list(T5), 50, torch.float32)
    keys = {**rule(mode, drafts, 50), "backend": backend}
    expected = ck.verify_tree(logits, drafts, int32(T5), **{**keys, "backend": expecting(backend)})
    memory = [torch.full((4, *field.shape[1:]), 99, dtype=field.dtype) for field in expected]
    out = ck.Verdict(*(field[1:3] for field in memory))
    assert ck.verify_tree(logits, drafts, int32(T5), **keys, out=out) is out
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


@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_a_malformed_tree_is_its_root_and_a_status(interpreter, mode):
    """What the launch gives where nothing may be read back to refuse it: padded, ragged, and borders that fall."""
    triton = pytest.importorskip("cerberus_kernels.ops.verify_tree.triton")
    trees = int32([[-1, 0, 9, 1, 2], T5, [-1, 2, 1, 0, 0], [0] * 5, [-1, -1, 0, 0, 0], T5, T5])
    counts = int32([5, 5, 5, 5, 5, 0, 6])
    rows, drafts = one_hot_rows([5, 9, 2, 4, 11], 12).expand(7, 5, 12) * 4, int32([[7, 3, 5, 9, 2]]).expand(7, 5)
    keys = rule(mode, drafts, 12)
    right = ck.verify_tree(rows[1:2], drafts[1:2], int32(T5), **rule(mode, drafts[:1], 12), backend="native")
    root = ck.verify_tree(rows[:1], drafts[:1], int32(T5), **rule(mode, drafts[:1], 12), max_depth=0, backend="native")

    def run(logits, drafts, parents, num_nodes, cu_nodes, probs):
        batch = len(num_nodes) if cu_nodes is None else len(cu_nodes) - 1
        shapes = ((batch, 5), (batch,), (batch, 5), (batch,), (batch,))
        dtypes = (torch.int32, torch.int32, torch.int32, torch.float32, torch.uint8)
        out = [torch.full(shape, 99, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        scalars = (MODES.index(mode), *DEFAULTS[1 : len(DEFAULTS) // 2])
        rows = (None,) * len(scalars)
        triton.unchecked_verify_tree(
            logits, drafts, parents, num_nodes, cu_nodes, probs, 12, 4, 1, *scalars, *rows, *out
        )  # fmt: skip
        return ck.Verdict(*out)

    def check(verdict, sound):
        for b in range(len(sound)):
            expected = right if sound[b] else root
            assert verdict.tokens[b].tolist() == expected.tokens[0].tolist() + [-1] * (0 if sound[b] else 4)
            assert verdict.path[b].tolist() == expected.path[0].tolist() + [-1] * (0 if sound[b] else 4)
            assert int(verdict.status[b]) == (0 if sound[b] else ck.VerifyStatus.MALFORMED_TREE)

    probs = keys.get("draft_probs")
    check(run(rows, drafts, trees, counts, None, probs), [b == 1 for b in range(7)])
    flat = (rows.flatten(0, 1), drafts.flatten(), trees.flatten())
    ragged = None if probs is None else probs.flatten(0, 1)
    check(run(*flat, None, int32([0, 5, 10, 15]), ragged), [False, True, False])
    check(run(*flat, None, int32([-5, 5, 10, 8]), ragged), [False, True, False])


def far_rows(*best: int) -> torch.Tensor:
    """bf16 [1, 2, 8]: two rows 2**31 entries apart in memory that is reserved and, but for them, never touched."""
    memory = mmap.mmap(-1, 2 * (2**31 + 8))
    rows = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((1, 2, 8), (0, 2**31, 1))
    for node, token in enumerate(best):
        rows[0, node, token] = 20.0
    return rows


@pytest.mark.parametrize("mode", MODES)
def test_offsets_past_32_bits(backend, mode):
    keys = {"mode": mode}
    if mode == "rejection":
        keys.update(drafting="iid", draft_probs=far_rows(0, 5))
    verdict = ck.verify_tree(far_rows(5, 2), int32([[1, 5]]), int32([-1, 0]), **keys, backend=backend)
    assert verdict.tokens.tolist() == [[5, 2]]
    assert verdict.status.tolist() == [0]


PAGE_ROW = mmap.PAGESIZE // 4  # fp32 entries in a page of memory


class PagedRows:
    """Rows of one page each, in memory that holds no page before it is read or written."""

    def __init__(self, nodes: int) -> None:
        self.memory = mmap.mmap(-1, nodes * mmap.PAGESIZE)
        self.rows = torch.frombuffer(self.memory, dtype=torch.float32).view(1, nodes, PAGE_ROW)

    def touched(self) -> list[int]:
        """Rows that have been read or written."""
        nodes = self.rows.shape[1]
        present = (ctypes.c_ubyte * nodes)()
        size = ctypes.c_size_t(nodes * mmap.PAGESIZE)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(self.rows.data_ptr()), size, present)
        if failed:
            pytest.skip("no mincore on this system")
        return [node for node in range(nodes) if present[node] & 1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mincore is asked which pages are there")
@pytest.mark.parametrize("mode", MODES)
def test_only_visited_rows_are_read(backend, mode):
    parents, drafts = int32([-1, 0, 0, 0, 1, 2, 2, 6, 3]), int32([[0, 7, 5, 9, 5, 3, 9, 1, 2]])
    logits, probs = PagedRows(9), PagedRows(9)
    assert logits.touched() == []
    for node, token in ((0, 5), (2, 9), (6, 4)):  # the path; rows 1, 3, 4, 5, 7 and 8 are never made
        logits.rows[0, node] = -20.0
        logits.rows[0, node, token] = 20.0
    keys = {"mode": mode}
    if mode == "rejection":
        tried = (1, 2, 5, 6, 7)  # 1, 5 and 7 are rejected, 2 and 6 accepted
        for node in tried:
            probs.rows[0, node, drafts[0, node]] = 1.0
        keys.update(drafting="iid", draft_probs=probs.rows)
    verdict = ck.verify_tree(logits.rows, drafts, parents, **keys, backend=backend)
    assert verdict.path[0].tolist() == [0, 2, 6] + [-1] * 6
    assert verdict.tokens[0, :3].tolist() == [5, 9, 4]
    assert logits.touched() == [0, 2, 6]
    assert probs.touched() == ([*tried] if mode == "rejection" else [])
