"""gate: scores, comparisons at the threshold, bad rows, gradients, refusals."""

from __future__ import annotations

import math

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close, available_isa_levels, isa_level

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF = math.inf


def make_weights(width: int, inner: int, dtype: torch.dtype = torch.float32) -> ck.GateWeights:
    return ck.GateWeights(
        (torch.randn(inner, width) / math.sqrt(width)).to(dtype),
        torch.randn(inner).to(dtype),
        torch.randn(inner).to(dtype),
        torch.randn(1).to(dtype),
    )


def exact_entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(torch.softmax(logits.double(), -1)).sum(-1).float()


def exact_probability(hidden: torch.Tensor, weights: ck.GateWeights, eps: float = 1e-6) -> torch.Tensor:
    w1, b1, w2, b2 = (weight.double() for weight in weights)
    hidden = hidden.double()
    normed = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=eps)
    return torch.sigmoid(torch.nn.functional.silu(normed @ w1.T + b1) @ w2 + b2).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "vocab"), [(1, 1), (2, 3), (3, 127), (5, 4096), (2, 4097), (1, 49_152), (7, 10_001)])
def test_entropy_of_logits(backend, dtype, batch, vocab):
    logits = (3 * torch.randn(batch, vocab)).to(dtype)
    score, is_open = ck.gate(None, logits=logits, threshold=1.5, backend=backend)
    assert_close(score, exact_entropy(logits))
    assert torch.equal(is_open, score < 1.5)
    hidden_score, _ = ck.gate(logits, kind="hidden_entropy", threshold=1.5, backend=backend)
    assert torch.equal(hidden_score, score)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gat01_probabilities_of_zero(backend, dtype):
    rows = torch.tensor([[1, 1, -INF], [5, -INF, -INF], [-INF, -INF, 5], [60_000, -60_000, -INF]]).to(dtype)
    score, _ = ck.gate(None, logits=rows, threshold=1.0, backend=backend)
    assert_close(score, torch.tensor([math.log(2), 0, 0, 0]))
    uniform, _ = ck.gate(None, logits=torch.full((1, 49_152), -7.0).to(dtype), threshold=1.0, backend=backend)
    assert_close(uniform, torch.tensor([10.80267]))


def test_gat01_a_score_equal_to_the_threshold_stays_closed(backend):
    logits = torch.tensor([[1.0, 1.0, -INF]]).expand(3, 3)
    score, _ = ck.gate(None, logits=logits, threshold=0.0, backend=backend)
    ends = torch.tensor([-INF, INF])
    around = torch.stack([torch.nextafter(score[0], ends[0]), score[0], torch.nextafter(score[0], ends[1])])
    for options in ({"logits": logits}, {"entropy": score}):
        decision = ck.gate(None, **options, threshold=around, backend=backend)
        assert decision.open.tolist() == [False, False, True]
        each = [ck.gate(None, **options, threshold=float(limit), backend=backend).open[0].item() for limit in around]
        assert each == [False, False, True]


def test_a_probability_equal_to_the_threshold_opens(backend):
    hidden, weights = torch.randn(3, 8), make_weights(8, 4)
    score, _ = ck.gate(hidden, kind="learned", weights=weights, threshold=0.5, backend=backend)
    above = torch.nextafter(score, torch.full((3,), INF))
    below = torch.nextafter(score, torch.full((3,), -INF))
    for limit, expected in ((below, True), (score, True), (above, False)):
        is_open = ck.gate(hidden, kind="learned", weights=weights, threshold=limit, backend=backend).open
        assert is_open.tolist() == [expected] * 3


@pytest.mark.parametrize("bad", [[1.0, math.nan, 2.0], [1.0, INF, 2.0], [-INF, -INF, -INF], [math.nan] * 3])
def test_a_nan_score_never_opens_and_leaves_its_siblings_alone(backend, bad):
    logits = torch.tensor([[1.0, 2.0, 3.0], bad, [0.0, 0.0, 0.0]])
    for options in ({"logits": logits}, {"kind": "hidden_entropy"}):
        score, is_open = ck.gate(logits, **options, threshold=INF, backend=backend)
        assert score.isnan().tolist() == [False, True, False]
        assert is_open.tolist() == [True, False, True]
    score, is_open = ck.gate(None, entropy=torch.tensor([0.3, math.nan]), threshold=INF, backend=backend)
    assert is_open.tolist() == [True, False]


@pytest.mark.parametrize("position", [0, 4095, 4096, 9999])
def test_a_nan_anywhere_in_a_long_row_closes(backend, position):
    logits = torch.randn(2, 10_000)
    logits[0, position] = math.nan
    score, is_open = ck.gate(None, logits=logits, threshold=INF, backend=backend)
    assert score.isnan().tolist() == [True, False]
    assert is_open.tolist() == [False, True]


def test_a_nan_in_hidden_closes_the_learned_gate(backend):
    hidden = torch.randn(3, 8)
    hidden[1, 7] = math.nan
    clean = torch.randn(3, 8)
    clean[[0, 2]] = hidden[[0, 2]]
    weights = make_weights(8, 4)
    score, is_open = ck.gate(hidden, kind="learned", weights=weights, threshold=-INF, backend=backend)
    assert is_open.tolist() == [True, False, True]
    expected = ck.gate(clean, kind="learned", weights=weights, threshold=-INF, backend=backend).score
    assert torch.equal(score[[0, 2]], expected[[0, 2]])


def test_gat06_never_always_and_one_in_ten(backend):
    entropy = torch.linspace(0.05, 4.95, 50)
    for threshold, opened in ((-INF, 0), (0.0, 0), (INF, 50), (0.5, 5)):
        assert int(ck.gate(None, entropy=entropy, threshold=threshold, backend=backend).open.sum()) == opened


def test_threshold_per_request(backend):
    entropy = torch.tensor([1.0, 1.0, 1.0, math.nan])
    limits = torch.tensor([0.5, 1.5, -INF, INF])
    decision = ck.gate(None, entropy=entropy, threshold=limits, backend=backend)
    assert decision.open.tolist() == [False, True, False, False]
    torch.testing.assert_close(decision.score, entropy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(("batch", "width", "inner"), [(1, 1, 1), (2, 576, 20), (5, 33, 7), (3, 100, 1)])
def test_learned_probability(backend, dtype, weight_dtype, batch, width, inner):
    hidden, weights = (4 * torch.randn(batch, width)).to(dtype), make_weights(width, inner, weight_dtype)
    score, is_open = ck.gate(hidden, kind="learned", weights=weights, threshold=0.5, backend=backend)
    assert_close(score, exact_probability(hidden, weights))
    assert torch.equal(is_open, score >= 0.5)


def test_learned_hand_worked(backend):
    weights = ck.GateWeights(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0]),
                             torch.tensor([-1.0]))  # fmt: skip
    score, _ = ck.gate(
        torch.tensor([[3.0, -3.0]]), kind="learned", weights=weights, threshold=0.5, eps=0.0, backend=backend
    )
    silu_of_one = 1 / (1 + math.exp(-1))
    assert_close(score, torch.tensor([1 / (1 + math.exp(-(2 * silu_of_one + 3 * silu_of_one - 1)))]))


def test_large_and_zero_hidden_states_stay_finite(backend):
    hidden = torch.stack([torch.full((64,), 60_000.0), torch.zeros(64)]).half()
    weights = make_weights(64, 8)
    score, _ = ck.gate(hidden, kind="learned", weights=weights, threshold=0.5, backend=backend)
    assert_close(score, exact_probability(hidden, weights))


@pytest.mark.parametrize("level", available_isa_levels())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_isa_level(level, dtype):
    logits, weights = torch.randn(3, 5001).to(dtype), make_weights(5001, 9, dtype)
    logits[1, ::3] = -INF
    with isa_level(level):
        entropy, _ = ck.gate(None, logits=logits, threshold=1.0, backend="native")
        learned, _ = ck.gate(logits[::2], kind="learned", weights=weights, threshold=1.0, backend="native")
    assert_close(entropy, exact_entropy(logits))
    assert_close(learned, exact_probability(logits[::2], weights))


def test_columns_past_the_vocabulary_are_never_read(backend):
    wide = torch.full((4, 300), math.nan)
    wide[:, 40:241] = torch.randn(4, 201)
    score, _ = ck.gate(None, logits=wide[:, 40:], vocab_size=201, threshold=1.0, backend=backend)
    assert_close(score, exact_entropy(wide[:, 40:241]))


def test_att09_strides(backend):
    wide, weights = torch.full((3, 2, 90), math.nan), make_weights(160, 12)
    wide[:, 1, 7:77] = torch.randn(3, 70)
    wide_w1 = torch.full((12, 100), math.nan)
    wide_w1[:, 3:73] = weights.w1[:, :70]
    weights = weights._replace(w1=wide_w1[:, 3:73])
    hidden = wide[:, 1, 7:77]
    score, _ = ck.gate(hidden, kind="learned", weights=weights, threshold=0.5, backend=backend)
    assert_close(score, exact_probability(hidden, weights))
    entropy, _ = ck.gate(hidden, kind="hidden_entropy", threshold=0.5, backend=backend)
    assert_close(entropy, exact_entropy(hidden))
    with pytest.raises(ValueError, match="gate: hidden must be contiguous in its last dimension"):
        ck.gate(hidden[:, ::2], kind="hidden_entropy", threshold=0.5, backend=backend)


def test_empty_batch(backend):
    weights = make_weights(8, 4)
    for options in ({"entropy": torch.empty(0)}, {"logits": torch.empty(0, 5)}, {"kind": "hidden_entropy"},
                    {"kind": "learned", "weights": weights}):  # fmt: skip
        score, is_open = ck.gate(torch.empty(0, 8), **options, threshold=0.5, backend=backend)
        assert (score.shape, score.dtype) == ((0,), torch.float32)
        assert (is_open.shape, is_open.dtype) == ((0,), torch.bool)


def test_learned_gradients_equal_autograd(backend):
    hidden = torch.randn(5, 12, requires_grad=True)
    weights = ck.GateWeights(*(weight.requires_grad_() for weight in make_weights(12, 6)))
    target = torch.rand(5)
    inputs = (hidden, *weights)
    score, is_open = ck.gate(hidden, kind="learned", weights=weights, threshold=0.5, backend=backend)
    assert not is_open.requires_grad
    actual = torch.autograd.grad((score - target).square().sum(), inputs)
    expected = torch.autograd.grad((exact_probability(hidden, weights) - target).square().sum(), inputs)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other.float())


def test_entropy_gradients_equal_autograd(backend):
    rows = torch.randn(4, 9)
    rows[1, 3] = -INF
    for options in ({"kind": "hidden_entropy"}, {"vocab_size": 7}):
        given = rows.clone().requires_grad_()
        used = options.get("vocab_size", 9)
        score, _ = ck.gate(given, logits=given if used == 7 else None, **options, threshold=1.0, backend=backend)
        (actual,) = torch.autograd.grad((score * torch.arange(4)).sum(), given)
        exact = rows.double().requires_grad_()
        p = torch.softmax(exact[:, :used], -1)
        (torch.special.entr(p.clamp_min(1e-300)).sum(-1) * torch.arange(4)).sum().backward()
        assert_close(actual, exact.grad.float())
    entropy = torch.rand(3, requires_grad=True)
    ck.gate(None, entropy=entropy, threshold=1.0, backend=backend).score.sum().backward()
    assert entropy.grad.tolist() == [1.0] * 3


def test_refusals_name_argument_constraint_and_value():
    hidden, weights = torch.zeros(2, 4), make_weights(4, 3)
    entropy, logits = torch.zeros(2), torch.zeros(2, 9)
    learned = {"kind": "learned", "weights": weights}
    for options, message in (
        ({"kind": "psychic"}, "gate: kind must be one of entropy, hidden_entropy, learned, got 'psychic'"),
        ({}, "gate: entropy must be given, or logits in its place, got neither"),
        ({"entropy": entropy, "logits": logits}, "gate: entropy must be given, or logits in its place, got both"),
        ({"kind": "hidden_entropy", "entropy": entropy}, "gate: entropy must be None for kind 'hidden_entropy'"),
        ({**learned, "logits": logits}, "gate: logits must be None for kind 'learned'"),
        ({"kind": "learned"}, "gate: weights must be GateWeights"),
        ({"entropy": entropy, "weights": weights}, "gate: weights must be None for kind 'entropy'"),
        ({"entropy": entropy.double()}, "gate: entropy must be of dtype float32, got float64"),
        ({"entropy": entropy, "vocab_size": 4}, "gate: vocab_size must be None without logits, got 4"),
        ({"logits": logits, "vocab_size": 10}, r"gate: vocab_size must be in \[1, 9\], got 10"),
        ({"logits": logits[:, ::2]}, "gate: logits must be contiguous in its last dimension"),
        ({"entropy": entropy, "threshold": torch.zeros(3)}, r"gate: threshold must be of shape \[2\], got \[3\]"),
        ({**learned, "weights": make_weights(5, 3)}, r"gate: weights.w1 must be of shape \[any, 4\], got \[3, 5\]"),
        ({**learned, "weights": weights._replace(b1=torch.zeros(2))}, r"gate: weights.b1 must be of shape \[3\]"),
        ({**learned, "weights": weights._replace(w2=torch.zeros(3).half())}, "weights.w2 must be of dtype float32"),
    ):
        with pytest.raises(ValueError, match=message):
            ck.gate(hidden, **{"threshold": 1.0, **options})
    with pytest.raises(ValueError, match=r"gate: hidden must be a torch.Tensor, got NoneType"):
        ck.gate(None, kind="hidden_entropy", threshold=1.0)


def test_opcheck():
    operator = torch.ops.cerberus_kernels.gate.default
    none, hidden, limits = [None] * 4, torch.randn(3, 8, requires_grad=True), torch.rand(3)
    weights = [weight.requires_grad_() for weight in make_weights(8, 4)]
    torch.library.opcheck(operator, (hidden, None, None, limits, *weights, "learned", 0.0, 0, 1e-6))
    torch.library.opcheck(operator, (hidden, None, None, None, *none, "hidden_entropy", 0.5, 0, 1e-6))
    torch.library.opcheck(operator, (None, None, torch.randn(2, 9), None, *none, "entropy", 0.5, 7, 1e-6))
    torch.library.opcheck(operator, (None, torch.rand(3), None, limits, *none, "entropy", 0.5, 0, 1e-6))


@pytest.mark.parametrize("threshold", [0.7, INF, -INF])
def test_compiles_whole(threshold):
    weights = make_weights(8, 4)

    def both(hidden):
        learned = ck.gate(hidden, kind="learned", weights=weights, threshold=threshold)
        return learned.open, ck.gate(hidden, kind="hidden_entropy", threshold=threshold).score * 2

    hidden = torch.randn(3, 8)
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert all(torch.equal(one, other) for one, other in zip(compiled(hidden), both(hidden), strict=True))


def test_result_is_the_same_for_any_thread_count():
    logits = torch.randn(3, 49_152)
    threads = torch.get_num_threads()
    expected = ck.gate(None, logits=logits, threshold=1.0, backend="native").score
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(ck.gate(None, logits=logits, threshold=1.0, backend="native").score, expected)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ck.gate(None, logits=logits[1:2], threshold=1.0, backend="native").score, expected[1:2])
