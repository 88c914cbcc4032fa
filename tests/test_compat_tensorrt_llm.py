"""compat.tensorrt_llm against values worked out by hand and this library's own operators."""

from __future__ import annotations

import pytest
import torch
from compat_cases import MALFORMED_LINKS, T5_LINKS

import cerberus_kernels as ck
from cerberus_kernels.compat import links
from cerberus_kernels.compat import tensorrt_llm as trt
from cerberus_kernels.testing import random_parents

SENTINEL = 77
T5_DRAFTS, T5_TARGETS = [7, 3, 5, 9, 2], [5, 9, 2, 4, 11]


class Packed:
    """Arguments and outputs of one packed verification, the outputs larger than needed and filled with sentinels."""

    def __init__(self, candidates, first, sibling, steps, valid=None, dtype=torch.int32, device="cpu"):
        self.candidates = torch.as_tensor(candidates, device=device).to(dtype)
        self.packed = trt.pack_links(
            torch.as_tensor(first, device=device).to(dtype), torch.as_tensor(sibling, device=device).to(dtype)
        )
        batch, self.steps, self.dtype = self.candidates.shape[0], steps, dtype
        self.index, self.tokens = (
            torch.full((batch + 1, steps + 2), SENTINEL, dtype=dtype, device=device) for _ in range(2)
        )
        self.count = torch.full((batch + 2,), SENTINEL, dtype=dtype, device=device)
        self.valid = torch.ones(batch + 3, dtype=torch.bool, device=device)
        if valid is not None:
            self.valid[:batch] = torch.tensor(valid)
        self.status = torch.full((batch,), 255, dtype=torch.uint8, device=device)

    def run(self, target):
        target = torch.as_tensor(target, device=self.candidates.device).to(self.dtype)
        trt.verify_dynamic_tree_greedy_out_packed_op(
            self.candidates, self.packed, target, self.index, self.count, self.tokens, self.valid, self.steps,
            status=self.status,
        )  # fmt: skip
        return self


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ver_08_t5_by_hand(dtype):
    # Request 0 takes nodes 2 and 4; request 1 has the same tree, marked as not there; request 2 matches nothing.
    trees = ([T5_LINKS[0]] * 3, [T5_LINKS[1]] * 3)
    call = Packed([T5_DRAFTS] * 3, *trees, 4, [True, False, True], dtype)
    call.run([T5_TARGETS, T5_TARGETS, [8, 9, 2, 4, 11]])
    assert call.index.tolist() == [[0, 2, 4, 0, 0, 0], [0] * 6, [0] * 6, [0] * 6]
    assert call.tokens.tolist() == [[5, 2, 11, 0, 0, 0], [5, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0], [0] * 6]
    assert call.count.tolist() == [2, 0, 0, 0, 0]
    assert call.status.tolist() == [0, 0, 0]


def test_places_are_those_of_the_packed_tensor():
    # node 1's target stands at place 0 and the root's at place 1: 3, then 8
    call = Packed([[7, 3]], [[1, -1]], [[-1, -1]], 2)
    call.packed[0, :, 0] = torch.tensor([1, 0])
    call.run([[8, 3]])
    assert call.index[0, :2].tolist() == [1, 0]
    assert call.tokens[0, :2].tolist() == [3, 8]


@pytest.mark.parametrize("nodes", [1, 2, 33, 65])
def test_packed_links_agree_with_verify_tree(nodes):
    parents = torch.tensor([random_parents(nodes, seed) for seed in range(8)], dtype=torch.int32)
    logits, drafts = torch.randn(8, nodes, 5), torch.randint(0, 5, (8, nodes))
    verdict = ck.verify_tree(logits, drafts, parents, max_depth=4)
    call = Packed(drafts, *links.links_from_parents(parents), 5).run(logits.argmax(-1))
    assert torch.equal(call.count[:8], verdict.num_accepted)
    assert torch.equal(call.tokens[:8, :5], verdict.tokens.clamp(min=0))
    assert torch.equal(call.index[:8, :5], verdict.path.clamp(min=0))
    assert nodes == 1 or verdict.num_accepted.max() > 0


@pytest.mark.parametrize("fault", [*MALFORMED_LINKS, "a place out of range"])
def test_msk_02_malformed_links_are_refused_or_flagged(fault, monkeypatch):
    bad = MALFORMED_LINKS.get(fault, T5_LINKS)

    def call(valid):
        call = Packed([T5_DRAFTS] * 2, [T5_LINKS[0], bad[0]], [T5_LINKS[1], bad[1]], 3, [True, valid])
        if fault == "a place out of range":
            call.packed[1, 2, 0] = 5
        return call

    refused = call(True)
    with pytest.raises(ValueError, match=r"verify_dynamic_tree_greedy_out_packed_op: retrieve_packed.* in row 1"):
        refused.run([T5_TARGETS, [3, 9, 2, 4, 11]])
    assert (refused.index == SENTINEL).all() and (refused.count == SENTINEL).all()
    ignored = call(False).run([T5_TARGETS, [3, 9, 2, 4, 11]])  # no tree there: nobody reads its links
    assert ignored.tokens[:2, :3].tolist() == [[5, 2, 11], [3, 0, 0]]
    assert ignored.status.tolist() == [0, 0]
    monkeypatch.setattr(trt, "refuse_malformed_links", lambda *args: None)  # as on CUDA
    flagged = call(True).run([T5_TARGETS, [3, 9, 2, 4, 11]])
    assert flagged.tokens[:2, :3].tolist() == [[5, 2, 11], [3, 0, 0]]
    assert flagged.index[1].tolist() == [0] * 5
    assert flagged.status.tolist() == [0, ck.VerifyStatus.MALFORMED_TREE]


# build_dynamic_tree_op

T5_SELECTION = ([-1, 0, 1], [0, 1, 2, 4])  # as in test_compat_sglang


def build(parent_list, selected, top_k, depth, mode, words, extra=3, device="cpu"):
    selected = torch.as_tensor(selected, dtype=torch.int64, device=device)
    batch, nodes = selected.shape[0], selected.shape[1] + 1
    size = batch * nodes * (nodes if mode == 1 else words)
    outputs = [torch.full((size + extra,), SENTINEL, dtype=torch.int32, device=device)]
    outputs += [torch.full((batch * nodes + extra,), SENTINEL, dtype=torch.int32, device=device) for _ in range(4)]
    parent_list = torch.as_tensor(parent_list, dtype=torch.int64, device=device)
    trt.build_dynamic_tree_op(parent_list, selected, *outputs, top_k, depth, nodes, mode, words)
    return outputs


def test_t5_is_built_by_hand():
    rest, none = [0, 0, 0], [-1, -1, -1]
    arguments = ([T5_SELECTION[0]] * 2, [T5_SELECTION[1]] * 2, 2, 2)
    mask, positions, index, first, sibling = (output.tolist() for output in build(*arguments, 2, 2))
    assert mask == [1, 0, 3, 0, 5, 0, 11, 0, 21, 0] * 2 + rest  # rows of two words, the second empty
    assert positions == [0, 1, 1, 2, 2] * 2 + rest
    assert index == [0, 1, 2, 3, 4] * 2 + rest
    assert first == T5_LINKS[0] * 2 + none
    assert sibling == T5_LINKS[1] * 2 + none
    rows = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert build(*arguments, 1, 0)[0].tolist() == [bit for row in rows for bit in row] * 2 + rest


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 65])
def test_a_chain_has_tree_mask_s_words(nodes):
    # top_k 1: candidate i stands below candidate i - 1
    depth = max(nodes - 1, 1)
    mask, positions, *_ = build(
        [list(range(-1, depth - 1))], [list(range(nodes - 1))], 1, depth, 2, (nodes + 31) // 32, 0
    )
    expected = ck.tree_mask(torch.arange(-1, nodes - 1, dtype=torch.int32))
    assert mask.tolist() == expected.flatten().tolist()
    assert positions.tolist() == list(range(nodes))


def test_what_cannot_be_built_is_refused():
    good = ([T5_SELECTION[0]], [T5_SELECTION[1]], 2, 2)
    with pytest.raises(ValueError, match=r"tree_mask_mode must be 1 \(QLEN_ONLY\) or 2 .*, got 0"):
        build(*good, 0, 1)
    with pytest.raises(ValueError, match="num_int32_per_row must be >= 1, got 0"):
        build(*good, 2, 0)
    with pytest.raises(ValueError, match="positions must be contiguous, of at least 5 elements"):
        trt.build_dynamic_tree_op(
            torch.tensor(good[0]), torch.tensor(good[1]), torch.empty(5, dtype=torch.int32),
            *torch.empty(4, 4, dtype=torch.int32), 2, 2, 5, 2, 1,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"build_dynamic_tree_op: selected_index must be .* in row 0"):
        build([[-1, 0, 5]], *good[1:], 2, 1)


# accept_draft_tokens_by_ids_with_paths

T5_PATHS = [[0, 1, 3], [0, 2, 4]]


class Paths:
    """Arguments and outputs of one verification along paths for every slot, outputs filled with sentinels."""

    def __init__(self, drafts, targets, paths, width=8, **optional):
        self.drafts, self.targets, self.paths = torch.tensor(drafts).long(), torch.tensor(targets), torch.tensor(paths)
        slots = len(targets)
        self.output = torch.full((slots, width), SENTINEL)
        self.accepted, self.best = torch.full((2, slots), SENTINEL)
        names = ("lengths", "finished", "slots", "ends", "current", "ahead")
        self.optional = {name: None if optional.get(name) is None else torch.tensor(optional[name]) for name in names}
        if self.optional["finished"] is not None:
            self.optional["finished"] = self.optional["finished"].to(torch.uint8)

    def run(self):
        lengths, finished, slots, ends, current, ahead = self.optional.values()
        trt.accept_draft_tokens_by_ids_with_paths(
            self.output, self.drafts, self.targets, lengths, self.accepted, finished, slots, self.paths, ends, current,
            ahead, self.best,
        )  # fmt: skip
        return self


def test_t5_along_its_paths_by_hand():
    # Slot 1 takes path 1 (nodes 2 and 4) and writes from place 2 on; slot 0 is in use by nobody; in slot 2 no draft
    # matches, so the lowest path is kept and the token after the root is emitted.
    call = Paths(
        [T5_DRAFTS[1:]] * 3,
        [[0] * 5, T5_TARGETS, [8, 9, 2, 4, 11]],
        [T5_PATHS] * 3,
        lengths=[1, 2, 3],
        slots=[2, 1],
    ).run()
    s = SENTINEL
    assert call.output.tolist() == [[s] * 8, [s, s, 5, 2, 11, s, s, s], [s, s, s, 8, s, s, s, s]]
    assert call.accepted.tolist() == [s, 3, 1]  # the bonus counted
    assert call.best.tolist() == [s, 1, 0]
    assert call.optional["lengths"].tolist() == [1, 5, 4]


@pytest.mark.parametrize(
    ("end", "length", "finished"),
    [(5, 0, 1), (2, 1, 1), (11, 2, 1), (9, 3, 0)],  # emitted without an end: 5, 2, 11
)
def test_the_end_id_is_met_anywhere_and_not_counted(end, length, finished):
    call = Paths([T5_DRAFTS[1:]], [T5_TARGETS], [T5_PATHS], ends=[end], finished=[8]).run()
    assert call.accepted.tolist() == [length]
    assert call.optional["finished"].tolist() == [8 | finished]
    assert call.output[0].tolist() == [5, 2, 11][:length] + [SENTINEL] * (8 - length)


def test_a_tie_does_not_hide_the_end():
    # Path 0 stops at node 1. Path 1 goes on to node 2, and the token after that is the end: both have two tokens before
    # it, and the longer one is kept.
    call = Paths([[5, 2]], [[5, 2, 9]], [[[0, 1, -1], [0, 1, 2]]], ends=[9], finished=[0]).run()
    assert (call.accepted.tolist(), call.best.tolist(), call.optional["finished"].tolist()) == ([2], [1], [1])


def test_nodes_past_the_drafts_match_nothing():
    call = Paths([T5_DRAFTS[1:]] * 3, [T5_TARGETS] * 3, [T5_PATHS] * 3, current=[3, 1, 5], ahead=[9, 5, 9]).run()
    assert call.accepted.tolist() == [2, 1, 3]  # node 4 has no draft, none has, all have
    assert call.optional["current"].tolist() == [3, 5, 5]
    padded = Paths([[3, -1, 9, 2]], [[-1, 9, 2, 4, 11]], [T5_PATHS]).run()  # VER-15: -1 equal to -1 is no match
    assert padded.accepted.tolist() == [1]


def test_msk_04_a_slot_without_a_path_or_a_draft():
    call = Paths([[]], [[4]], [[[0, -1, -1], [-1, -1, -1]]]).run()
    assert (call.accepted.tolist(), call.best.tolist(), call.output[0, 0]) == ([1], [0], 4)
    call = Paths([T5_DRAFTS[1:]], [T5_TARGETS], [[[-1] * 3] * 2]).run()
    assert (call.accepted.tolist(), call.best.tolist(), call.output[0, 0]) == ([1], [0], 5)


def test_numbers_outside_the_tree(monkeypatch):
    call = Paths([T5_DRAFTS[1:]] * 2, [T5_TARGETS] * 2, [T5_PATHS, [[0, 2, 5], [0, 1, 3]]])
    with pytest.raises(ValueError, match=r"paths must be in \[-1, 5\), got \[\[0, 2, 5\], \[0, 1, 3\]\] in slot 1"):
        call.run()
    assert (call.accepted == SENTINEL).all()
    monkeypatch.setattr(trt, "refuse", lambda *args: None)  # as on CUDA
    assert call.run().accepted.tolist() == [3, 2]


@pytest.mark.parametrize("nodes", [2, 33, 65])
def test_paths_agree_with_verify_tree(nodes):
    trees = [random_parents(nodes, seed) for seed in range(8)]
    drafts = torch.stack([torch.randperm(nodes) % max(nodes // 4, 2) for _ in trees])
    logits = torch.randn(8, nodes, nodes)
    for b, tree in enumerate(trees):  # let every row agree with one of its node's children, if it has one
        for node in range(1, nodes):
            logits[b, tree[node], drafts[b, node]] = 9.0 + node
    verdict = ck.verify_tree(logits, drafts, torch.tensor(trees, dtype=torch.int32))
    paths = []
    for tree in trees:
        rows = []
        for node in range(nodes):
            row = [node]
            while row[0] != 0:
                row.insert(0, tree[row[0]])
            rows.append(row + [-1] * (nodes - len(row)))
        paths.append(rows)
    call = Paths(drafts[:, 1:].tolist(), logits.argmax(-1).tolist(), paths, width=nodes).run()
    assert verdict.num_accepted.min() >= 1
    # of equal siblings verify_tree takes the first, and here the longest path decides: never shorter
    for b in range(8):
        taken = int(call.accepted[b])
        assert taken >= verdict.num_accepted[b] + 1
        path = paths[b][int(call.best[b])]
        assert call.output[b, :taken].tolist() == [int(logits[b, node].argmax()) for node in path[:taken]]


def test_nothing_waits_for_the_device_and_empty_batches_work():
    for device, batch in (("meta", 3), ("cpu", 0)):
        ids = torch.zeros(batch, 5, dtype=torch.int32, device=device)
        Packed(ids, ids, ids, 4, device=device).run(ids)
        for mode in (1, 2):
            build(ids[:, :3], ids[:, :4], 2, 2, mode, 1, device=device)
        row, path = ids[:, 0].clone(), torch.zeros(batch, 2, 3, dtype=torch.int32, device=device)
        trt.accept_draft_tokens_by_ids_with_paths(
            ids.clone(), ids[:, 1:], ids, row, row.clone(), row.to(torch.uint8), row.clone(), path, row, row.clone(),
            row, row.clone(),
        )  # fmt: skip
