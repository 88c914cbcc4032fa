"""head_topk: agreement, hand-worked values, ties, padding, bad rows, strides, refusals."""

from __future__ import annotations

import math

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close, available_isa_levels, isa_level

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def integers(*shape: int, low: int = -3, high: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers: every product and sum is exact in fp32, so ties are exact and results equal to the bit."""
    return torch.randint(low, high, shape).to(dtype)


def gaussians(rows: int, vocab: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width).to(dtype), (torch.randn(vocab, width) / math.sqrt(width)).to(dtype)


def check_against_logits(result: ck.Candidates, states: torch.Tensor, weight: torch.Tensor) -> None:
    """Sums in another order may swap near-equal logits: compare values, and that each token holds its value."""
    logits = states.double() @ weight.double().T
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    assert_close(result.lse, logits.logsumexp(-1).float())
    assert_close(result.log_probs, log_probs.topk(result.tokens.shape[-1]).values.float())
    assert_close(result.log_probs, log_probs.gather(-1, result.tokens.long()).float())
    assert all(len(set(row)) == len(row) for row in result.tokens.flatten(0, -2).tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab", "width", "k"),
    [
        (1, 1, 1, 1),
        (2, 7, 3, 7),
        (3, 33, 8, 5),
        (4, 1000, 64, 10),
        (5, 127, 65, 10),
        (9, 3001, 100, 40),
        (4, 517, 576, 9),
    ],
)
def test_agrees_with_double_precision(backend, dtype, rows, vocab, width, k):
    states, weight = gaussians(rows, vocab, width, dtype)
    check_against_logits(ck.head_topk(states, weight, k, backend=backend), states, weight)


@pytest.mark.parametrize("level", available_isa_levels())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_isa_level_equals_the_reference_on_exact_sums(level, dtype):
    for rows, vocab, width, k in ((1, 40, 5, 40), (4, 700, 129, 10), (7, 1500, 577, 33)):
        states, weight = integers(rows, width, dtype=dtype), integers(vocab, width, dtype=dtype)
        expected = ck.head_topk(states, weight, k, backend="reference")
        with isa_level(level):
            result = ck.head_topk(states, weight, k, backend="native")
        assert torch.equal(result.tokens, expected.tokens)
        assert_close(result.log_probs, expected.log_probs)
        assert_close(result.lse, expected.lse)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 127, 128, 129])
def test_hed06_every_row_gets_its_own_result(backend, rows):
    states = torch.zeros(rows, 160)
    order = torch.randperm(160)[:rows]
    states[torch.arange(rows), order] = 9.0
    tokens, log_probs, lse = ck.head_topk(states, torch.eye(160), 3, backend=backend)
    assert tokens[:, 0].tolist() == order.tolist()
    assert tokens[:, 1:].tolist() == [[i for i in range(3) if i != best][:2] for best in order.tolist()]
    expected = math.log(math.exp(9) + 159)
    assert_close(lse, torch.full((rows,), expected))
    assert_close(log_probs, torch.tensor([9.0, 0.0, 0.0]).expand(rows, 3) - expected)


def test_hand_worked_values(backend):
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)], [0.0], [0.0]])
    tokens, log_probs, lse = ck.head_topk(torch.ones(1, 1), weight, 5, backend=backend)
    assert tokens.tolist() == [[2, 1, 0, 3, 4]]
    assert_close(log_probs.exp(), torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]]))
    assert_close(lse, torch.tensor([math.log(10)]))


def test_att08_sum_of_ones_in_bf16_is_576(backend):
    weight = torch.zeros(50, 576, dtype=torch.bfloat16)
    weight[33] = 1
    tokens, log_probs, lse = ck.head_topk(torch.ones(4, 576, dtype=torch.bfloat16), weight, 2, backend=backend)
    assert tokens.tolist() == [[33, 0]] * 4
    assert (log_probs + lse.unsqueeze(-1)).tolist() == [[576.0, 0.0]] * 4


def test_hed02_padding_rows_never_appear(backend):
    vocab, padded, width = (3_075, 3_136, 16) if backend == "triton" else (49_155, 49_216, 16)
    weight = torch.randn(padded, width)
    weight[vocab:] = 50.0
    states = torch.rand(4, width)
    result = ck.head_topk(states, weight, 20, vocab_size=vocab, backend=backend)
    assert int(result.tokens.max()) < vocab
    check_against_logits(result, states, weight[:vocab])
    weight[vocab:] = torch.nan
    again = ck.head_topk(states, weight, 20, vocab_size=vocab, backend=backend)
    assert all(torch.equal(before, after) for before, after in zip(result, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 37])
def test_hed04_a_bad_row_leaves_its_siblings_alone(backend, dtype, width):
    states, weight = gaussians(6, 900, width, dtype)
    clean = ck.head_topk(states, weight, 8, backend=backend)
    for bad in (torch.nan, torch.inf):
        spoiled = states.clone()
        spoiled[2, 11] = bad
        result = ck.head_topk(spoiled, weight, 8, backend=backend)
        siblings = [0, 1, 3, 4, 5]
        assert all(torch.equal(one[siblings], other[siblings]) for one, other in zip(clean, result, strict=True))
        assert result.tokens[2].tolist() == list(range(8))
        assert result.log_probs[2].isnan().all()
        assert result.lse[2].isnan()


def test_hed04_large_fp16_states_stay_finite(backend):
    states = torch.full((3, 64), 6e4, dtype=torch.float16)
    weight = torch.full((20, 64), -8.0, dtype=torch.float16)
    weight[13] = 8
    tokens, log_probs, lse = ck.head_topk(states, weight, 2, backend=backend)
    assert tokens.tolist() == [[13, 0]] * 3
    assert lse.tolist() == [64 * 8 * 6e4] * 3
    assert log_probs[:, 0].tolist() == [0.0] * 3


@pytest.mark.parametrize("row", [0, 63, 64, 299])
def test_a_nan_in_the_weight_marks_every_row(backend, row):
    states, weight = gaussians(5, 300, 32, torch.float32)
    weight[row, 31] = torch.nan
    tokens, log_probs, lse = ck.head_topk(states, weight, 4, backend=backend)
    assert tokens.tolist() == [[0, 1, 2, 3]] * 5
    assert log_probs.isnan().all()
    assert lse.isnan().all()


def test_minus_infinity_is_a_probability_of_zero(backend):
    weight = torch.zeros(200, 4)
    weight[[0, 5, 150], 0] = -torch.inf
    tokens, log_probs, lse = ck.head_topk(torch.ones(2, 4), weight, 200, backend=backend)
    assert tokens[0].tolist() == [i for i in range(200) if i not in (0, 5, 150)] + [0, 5, 150]
    assert log_probs[1, -3:].tolist() == [-torch.inf] * 3
    assert_close(lse, torch.full((2,), math.log(197)))
    everywhere = ck.head_topk(torch.ones(1, 4), torch.full((70, 4), -torch.inf), 3, backend=backend)
    assert everywhere.tokens.tolist() == [[0, 1, 2]]
    assert everywhere.log_probs.isnan().all()
    assert everywhere.lse.isnan().all()


def test_ties_go_to_the_lowest_row_and_topk_is_a_prefix(backend):
    vocab = 300 if backend == "triton" else 2000  # its interpreter takes long
    states, weight = integers(5, 6, low=-1, high=2), integers(vocab, 6, low=-1, high=2)
    longest = ck.head_topk(states, weight, vocab, backend=backend)
    logits = states @ weight.T
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    assert torch.equal(longest.tokens.long(), order)
    for k in (1, 2, 9, 10, 11, 63, 64, 65, 200, vocab - 1):
        shorter = ck.head_topk(states, weight, k, backend=backend)
        assert torch.equal(shorter.tokens, longest.tokens[:, :k])
        assert torch.equal(shorter.log_probs, longest.log_probs[:, :k])
        assert torch.equal(shorter.lse, longest.lse)


def test_token_map_names_the_tokens_and_ties_go_by_row(backend):
    states, weight = torch.ones(2, 3), torch.zeros(5, 3)
    weight[2] = 1
    token_map = torch.tensor([900, 4, 77, 3, 1], dtype=torch.int32)
    tokens, _, lse = ck.head_topk(states, weight, 5, token_map=token_map, backend=backend)
    assert tokens.tolist() == [[77, 900, 4, 3, 1]] * 2
    padded = torch.cat([weight, torch.full((3, 3), 50.0)])
    again = ck.head_topk(states, padded, 5, token_map=token_map, backend=backend)
    assert torch.equal(again.tokens, tokens)
    assert torch.equal(again.lse, lse)
    spoiled = ck.head_topk(states * torch.nan, weight, 2, token_map=token_map, backend=backend)
    assert spoiled.tokens.tolist() == [[900, 4]] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_att09_strides(backend, dtype):
    states, weight = gaussians(6, 333, 70, dtype)
    expected = ck.head_topk(states, weight, 7, backend=backend)
    wide_states = torch.full((2, 5, 3, 90), torch.nan, dtype=dtype)
    wide_states[:, 1, :, 3:73] = states.view(2, 3, 70)
    wide_weight = torch.full((400, 83), torch.nan, dtype=dtype)
    wide_weight[20:353, 5:75] = weight
    result = ck.head_topk(wide_states[:, 1, :, 3:73], wide_weight[20:353, 5:75], 7, backend=backend)
    assert result.tokens.shape == (2, 3, 7)
    assert result.lse.shape == (2, 3)
    assert torch.equal(result.tokens.flatten(0, 1), expected.tokens)
    assert_close(result.log_probs.flatten(0, 1), expected.log_probs)
    transposed = ck.head_topk(states.view(2, 3, 70).transpose(0, 1), weight, 7, backend=backend)
    assert torch.equal(transposed.tokens.transpose(0, 1).reshape(6, 7), expected.tokens)
    with pytest.raises(ValueError, match="vocab_weight must be contiguous in its last dimension"):
        ck.head_topk(states[:, :35], weight[:, ::2], 7, backend=backend)
    with pytest.raises(ValueError, match="states must be contiguous in its last dimension"):
        ck.head_topk(states[:, ::2], weight[:, :35], 7, backend=backend)


def test_one_state_and_no_states(backend):
    states, weight = gaussians(3, 50, 12, torch.float32)
    one = ck.head_topk(states[1], weight, 4, backend=backend)
    assert one.tokens.shape == (4,)
    assert one.lse.shape == ()
    assert torch.equal(one.tokens, ck.head_topk(states, weight, 4, backend=backend).tokens[1])
    none = ck.head_topk(states.new_empty(0, 4, 12), weight, 4, backend=backend)
    assert (none.tokens.shape, none.log_probs.shape, none.lse.shape) == ((0, 4, 4), (0, 4, 4), (0, 4))
    assert none.tokens.dtype == torch.int32


def test_refusals_name_argument_constraint_and_value():
    states, weight = torch.zeros(2, 4), torch.zeros(9, 4)
    token_map = torch.arange(10, dtype=torch.int32)
    for arguments, options, message in (
        ((states, weight, 0), {}, r"head_topk: k must be in \[1, 9\], got 0"),
        ((states, weight, 10), {}, r"head_topk: k must be in \[1, 9\], got 10"),
        ((states, weight, 4), {"vocab_size": 3}, r"head_topk: k must be in \[1, 3\], got 4"),
        ((states, weight, 1), {"vocab_size": 10}, r"head_topk: vocab_size must be in \[1, 9\], got 10"),
        ((states, weight.bfloat16(), 1), {}, "head_topk: vocab_weight must be of dtype float32, got bfloat16"),
        ((states.double(), weight, 1), {}, "head_topk: states must be of dtype .*, got float64"),
        ((states, weight[:, :3], 1), {}, r"head_topk: vocab_weight must be of shape \[any, 4\], got \[9, 3\]"),
        ((states, weight, 1), {"token_map": token_map}, "head_topk: token_map must be at most 9 long"),
        ((states, weight, 1), {"token_map": token_map[:4], "vocab_size": 5}, r"token_map must be of length vocab_size"),
        ((states, weight, 1), {"token_map": token_map.long()}, "token_map must be of dtype int32, got int64"),
    ):
        with pytest.raises(ValueError, match=message):
            ck.head_topk(*arguments, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    states, weight = gaussians(3, 40, 9, dtype)
    token_map = torch.arange(40, dtype=torch.int32)
    operator = torch.ops.cerberus_kernels.head_topk.default
    torch.library.opcheck(operator, (states, weight, 4, 38))
    torch.library.opcheck(operator, (states, weight, 4, 40, token_map))


def test_compiles_whole():
    states, weight = gaussians(4, 90, 16, torch.float32)
    compiled = torch.compile(lambda x: ck.head_topk(x, weight, 3).tokens + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(states), ck.head_topk(states, weight, 3).tokens + 1)


def test_result_is_the_same_for_any_thread_count_and_any_company():
    states, weight = gaussians(6, 5000, 64, torch.bfloat16)
    threads = torch.get_num_threads()
    expected = ck.head_topk(states, weight, 12, backend="native")
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            result = ck.head_topk(states, weight, 12, backend="native")
            assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))
    finally:
        torch.set_num_threads(threads)
    for first, last in ((0, 1), (1, 3), (3, 6), (1, 6)):
        part = ck.head_topk(states[first:last], weight, 12, backend="native")
        assert all(torch.equal(one, other[first:last]) for one, other in zip(part, expected, strict=True))
