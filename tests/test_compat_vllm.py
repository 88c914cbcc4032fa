"""compat.vllm against values worked out by hand, statistics, and sampling without drafts."""

from __future__ import annotations

import pytest
import torch
from compat_cases import chi_square

import cerberus_kernels as ck
from cerberus_kernels.compat import vllm

OPERATOR = "verify_tree"  # its backends
NAN = float("nan")


class Batch:
    """Requests as vLLM lays them out, each in a slot that is not its number."""

    def __init__(self, drafts, temperature=1.0, seed=0, position=10, steps=None, slots=8):
        counts = [len(chain) + 1 for chain in drafts]
        requests = len(drafts)
        self.steps = max(counts, default=1) - 1 if steps is None else steps
        self.drafts = torch.tensor([token for chain in drafts for token in (777, *chain)], dtype=torch.int64)
        self.cu = torch.tensor([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()])
        self.local = torch.tensor([i for count in counts for i in range(count)], dtype=torch.int64)
        size = max(requests, slots)
        self.slot = torch.arange(size - 1, size - 1 - requests, -1)
        self.row_slot = self.slot.repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        self.temperature, self.seed = torch.full((size,), NAN), torch.zeros(size, dtype=torch.int64)
        self.temperature[self.slot] = torch.as_tensor(temperature, dtype=torch.float32).expand(requests)
        self.seed[self.slot] = torch.as_tensor(seed).expand(requests)
        self.position = (
            torch.as_tensor(position).expand(requests).repeat_interleave(torch.tensor(counts).long()) + self.local
        )

    def per_slot(self, draft_logits):
        """[R, S, V''] -> [M, S, V''] with NaN in the slots that nobody uses."""
        scattered = torch.full((len(self.temperature), *draft_logits.shape[1:]), NAN, dtype=draft_logits.dtype)
        scattered[self.slot] = draft_logits
        return scattered

    def sample(self, logits, draft_logits=None, **keywords):
        if draft_logits is not None:
            draft_logits = self.per_slot(draft_logits)
        return vllm.rejection_sample(
            logits, draft_logits, self.drafts, self.cu, self.position, self.slot, self.row_slot, self.local,
            self.temperature, self.seed, self.steps, **keywords,
        )  # fmt: skip


def one_hot(tokens, vocab_size=9):
    return 50.0 * torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size)


@pytest.mark.parametrize("with_draft_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_and_certain_rows_by_hand(with_draft_logits, dtype, backend):
    # Request 0 has drafts 5 and 3 where the target says 5, 2; request 1 has none and is told 6; request 2's two drafts
    # are both right and are followed by 1. Rows so sharp that sampling at T = 1 has no other outcome.
    batch = Batch([[5, 3], [], [4, 8]], temperature=[0.0, 1.0, 1.0], seed=torch.tensor([1, 2, 3]))
    logits = one_hot([5, 2, 0, 6, 4, 8, 1]).to(dtype)
    draft_logits = one_hot([[5, 3], [0, 0], [4, 8]]).to(dtype) if with_draft_logits else None
    sampled, num_sampled = batch.sample(logits, draft_logits, backend=backend)
    assert sampled.tolist() == [[5, 2, -1], [6, -1, -1], [4, 8, 1]]
    assert num_sampled.tolist() == [2, 1, 3]
    assert (sampled.dtype, num_sampled.dtype) == (torch.int64, torch.int32)


def test_ver_07_the_first_draft_is_compared_with_the_row_before_it():
    for draft, expected in ((3, [[5, -1]]), (5, [[5, 6]])):
        sampled, _ = Batch([[draft]], temperature=0.0).sample(one_hot([5, 6]))
        assert sampled.tolist() == expected


def test_ver_09_ties_go_to_the_lowest_id_in_a_mixed_batch(backend):
    logits = torch.zeros(2, 9)
    logits[:, [2, 6]] = 3.25
    for seed in range(20):
        sampled, _ = Batch([[], []], temperature=[0.0, 0.8], seed=seed, steps=1).sample(logits, backend=backend)
        assert sampled[0].tolist() == [2, -1]


def test_ver_03_drafts_from_their_rows_keep_the_distribution():
    requests = 20_000
    p, q = torch.softmax(torch.randn(2, 6), -1), torch.softmax(torch.randn(3, 6), -1)
    drafts = torch.multinomial(p, requests, replacement=True).T.tolist()
    batch = Batch(drafts, seed=torch.arange(requests))
    sampled, num_sampled = batch.sample(q.log().repeat(requests, 1), p.log().expand(requests, 2, 6))
    # chi-square with 5 degrees of freedom exceeds 20.5 with probability 0.001
    for place in range(3):
        tokens = sampled[:, place][sampled[:, place] >= 0]
        assert len(tokens) > 1000
        assert chi_square(torch.bincount(tokens, minlength=6), q[place]) < 20.5
    overlap = torch.minimum(p, q[:2]).sum(1)
    assert (num_sampled - 1).double().mean().sub(overlap[0] + overlap[0] * overlap[1]).abs() < 0.02


def test_ver_04_drafts_without_rows_keep_the_distribution():
    requests = 20_000
    q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]])
    sampled, num_sampled = Batch([[1]] * requests, seed=torch.arange(requests)).sample(q.log().repeat(requests, 1))
    # chi-square with 3 degrees of freedom exceeds 16.3 with probability 0.001
    assert chi_square(torch.bincount(sampled[:, 0], minlength=4), q[0]) < 16.3
    assert (num_sampled - 1).double().mean().sub(0.3).abs() < 0.02


def test_without_rows_the_text_is_that_of_sampling_without_drafts():
    logits, seeds = torch.randn(4, 40), torch.tensor([11, -5])
    alone = [
        [
            int(Batch([[]], seed=seeds[b], position=7 + i, steps=0).sample(logits[i : i + 1])[0])
            for i in range(4)
        ]
        for b in range(2)
    ]  # fmt: skip
    drafts = [[alone[0][0], alone[0][1], 3 if alone[0][2] != 3 else 4], alone[1][:3]]
    sampled, num_sampled = Batch(drafts, seed=seeds, position=7).sample(logits.repeat(2, 1))
    assert num_sampled.tolist() == [3, 4]
    assert sampled.tolist() == [[*alone[0][:3], -1], alone[1]]


@pytest.mark.parametrize("with_draft_logits", [False, True])
def test_msk_07_a_request_does_not_depend_on_the_batch(with_draft_logits):
    drafts, seeds = [[3, 1, 4], [], [1, 5], [9, 2, 6]], torch.tensor([1, 2, 3, 4])
    logits, draft_logits = torch.randn(12, 11), torch.randn(4, 3, 11)
    together, counts = Batch(drafts, seed=seeds).sample(logits, draft_logits if with_draft_logits else None)
    starts = [0, 4, 5, 8, 12]
    for b, chain in enumerate(drafts):
        rows = logits[starts[b] : starts[b + 1]]
        alone = Batch([chain], seed=seeds[b], steps=3)
        sampled, count = alone.sample(rows, draft_logits[b : b + 1] if with_draft_logits else None)
        assert sampled[0].tolist() == together[b].tolist()
        assert count[0] == counts[b]


def test_ver_15_padding_ends_the_chain():
    logits = one_hot([5, 2, 8, 1])
    for draft_logits in (None, torch.zeros(1, 3, 9)):
        sampled, num_sampled = Batch([[5, -1, 8]]).sample(logits, draft_logits)
        assert sampled.tolist() == [[5, 2, -1, -1]]
        assert num_sampled.tolist() == [2]


def test_a_smaller_draft_vocabulary_bounds_the_tokens():
    logits = torch.zeros(3, 12)
    logits[:, 10] = 60.0  # a column the drafter does not know
    sampled, _ = Batch([[3, 4]], temperature=0.0).sample(logits, torch.zeros(1, 2, 8))
    assert sampled.tolist() == [[0, -1, -1]]
    sampled, _ = Batch([[3, 4]], temperature=0.0).sample(logits)
    assert sampled.tolist() == [[10, -1, -1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ver_01_a_row_of_nan_gives_a_token_of_the_vocabulary(temperature, backend):
    logits = torch.randn(3, 32003)
    logits[0] = NAN
    for draft_logits in (None, torch.randn(1, 2, 32003)):
        sampled, count = Batch([[7, 8]], temperature=temperature).sample(logits, draft_logits, backend=backend)
        assert sampled.tolist() == [[0, -1, -1]]
        assert count.tolist() == [1]
    draft_logits = torch.full((1, 2, 32003), NAN)
    sampled, _ = Batch([[7, 8]]).sample(torch.randn(3, 32003), draft_logits, backend=backend)
    assert (sampled[:, 1:] == -1).all() and 0 <= sampled[0, 0] < 32003


def test_what_is_not_offered_is_refused():
    batch = Batch([[1]])
    with pytest.raises(ValueError, match="rejection_sample: synthetic_conditional_rates must be None"):
        batch.sample(torch.zeros(2, 5), synthetic_conditional_rates=torch.ones(1))
    with pytest.raises(ValueError, match="rejection_sample: use_block_verification must be False"):
        batch.sample(torch.zeros(2, 5), use_block_verification=True)
    for temperature in (-1.0, NAN):
        with pytest.raises(ValueError, match=r"rejection_sample: temperature must be >= 0, got \["):
            Batch([[1]], temperature=temperature).sample(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="rejection_sample: draft_logits must be of at least 1 steps, got"):
        batch.sample(torch.zeros(2, 5), torch.zeros(1, 0, 5))
    with pytest.raises(ValueError, match=r"rejection_sample: draft_sampled must be of shape \[3\], got \[2\]"):
        batch.sample(torch.zeros(3, 5))


def test_options_by_place_and_narrow_integers():
    batch = Batch([[5, 3]], temperature=0.0)
    narrow = (
        tensor.int() for tensor in (batch.drafts, batch.cu, batch.position, batch.slot, batch.row_slot, batch.local)
    )
    sampled, _ = vllm.rejection_sample(
        one_hot([5, 2, 0]), None, *narrow, batch.temperature.double(), batch.seed, 2, None, True, False
    )
    assert sampled.tolist() == [[5, 2, -1]]


def test_an_empty_batch_is_an_empty_result():
    sampled, num_sampled = Batch([], steps=3).sample(torch.empty(0, 7), torch.empty(0, 3, 7))
    assert (sampled.shape, num_sampled.shape) == ((0, 4), (0,))


def test_the_chain_is_verify_tree_s():
    # at a request's seed, and with coins keyed by the position of the token that follows the newest one
    logits, drafts, seeds = torch.randn(3, 5, 60), torch.randint(0, 60, (3, 4)), torch.tensor([5, 6, 7])
    drafts[:, 0], draft_logits = logits[:, 0].argmax(1), torch.randn(3, 4, 60)
    batch = Batch(drafts.tolist(), seed=seeds, position=torch.tensor([30, 40, 50]))
    tree = (logits, torch.nn.functional.pad(drafts, (1, 0)), ck.Tree.chain(4).parents)
    options = {"seed": seeds, "position": torch.tensor([31, 41, 51])}
    rows = torch.nn.functional.pad(torch.softmax(draft_logits, 2), (0, 0, 1, 0))
    for given, verdict in (
        (None, ck.verify_tree(*tree, mode="sample", **options)),
        (draft_logits, ck.verify_tree(*tree, mode="rejection", drafting="iid", draft_probs=rows, **options)),
    ):
        sampled, count = batch.sample(logits.flatten(0, 1), given)
        assert sampled.tolist() == verdict.tokens.tolist()
        assert count.tolist() == (verdict.num_accepted + 1).tolist()
