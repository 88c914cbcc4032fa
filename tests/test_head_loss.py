"""head_loss: agreement with the plain loss and its autograd, teachers, ignored rows, memory, refusals."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cerberus_kernels as ck
from cerberus_kernels._dispatch import OPERATORS
from cerberus_kernels.ops.head_loss import native, reference
from cerberus_kernels.testing import assert_close, available_isa_levels, isa_level

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# T, K, H, V
SHAPES = ((6, 4, 32, 100), (1, 1, 8, 1), (5, 3, 7, 33), (17, 2, 24, 257), (3, 2, 16, 1030))


def make(positions, heads, width, vocab, *, dtype=torch.float32, seed=0):
    """states, vocab_weight (both with gradients), targets with some -1, head_weights, teacher_states."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(positions, heads, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator) / 2).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (positions, heads), generator=generator)
    targets[torch.rand(positions, heads, generator=generator) < 0.2] = -1
    head_weights = 0.8 ** torch.arange(heads)
    teacher = torch.randn(positions, heads, width, generator=generator).to(dtype)
    return states, weight, targets, head_weights, teacher


def gradients(loss, *tensors, upstream=1.0):
    return torch.autograd.grad(loss * upstream, tensors)


@pytest.mark.parametrize("chunk_tokens", [None, 1, 4])
@pytest.mark.parametrize("soft_weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_equal_autograd(backend, shape, soft_weight, chunk_tokens):
    states, weight, targets, head_weights, teacher = make(*shape)
    logits = (teacher @ weight.detach().t()) if soft_weight else None
    expected = reference.head_loss(states, weight, targets, logits, head_weights, soft_weight)
    actual = ck.head_loss(
        states,
        weight,
        targets,
        teacher_states=teacher if soft_weight else None,
        head_weights=head_weights,
        soft_weight=soft_weight,
        chunk_tokens=chunk_tokens,
        backend=backend,
    )
    assert actual.dtype == torch.float32
    assert actual.shape == ()
    assert_close(actual, expected)
    ours = gradients(actual, states, weight, upstream=3.0)
    theirs = gradients(expected, states, weight, upstream=3.0)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(backend, dtype):
    states, weight, targets, head_weights, teacher = make(9, 3, 40, 211, dtype=dtype)
    logits = teacher.float() @ weight.detach().float().t()
    expected = reference.head_loss(states, weight, targets, logits, head_weights, 0.4)
    options = {"head_weights": head_weights, "soft_weight": 0.4, "backend": backend}
    actual = ck.head_loss(states, weight, targets, teacher_states=teacher, **options)
    assert_close(actual, expected)
    for one, other in zip(gradients(actual, states, weight), gradients(expected, states, weight), strict=True):
        assert one.dtype == dtype
        assert_close(one, other)


def test_every_isa_level():
    states, weight, targets, _, teacher = make(9, 3, 40, 1003)
    options = {"teacher_states": teacher, "soft_weight": 0.4}
    expected = ck.head_loss(states, weight, targets, backend="reference", **options)
    theirs = gradients(expected, states, weight)
    for level in available_isa_levels():
        with isa_level(level):
            actual = ck.head_loss(states, weight, targets, backend="native", **options)
        assert_close(actual, expected)
        for one, other in zip(gradients(actual, states, weight), theirs, strict=True):
            assert_close(one, other)


def test_hand_worked_values(backend):
    """Two tokens with logits (x, 0): the loss is softplus(-x), its gradient sigmoid(x) - 1."""
    states = torch.tensor([[[2.0], [-1.0]]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]])
    loss = ck.head_loss(states, weight, torch.tensor([[0, 1]]), backend=backend)
    softplus = [math.log1p(math.exp(-2.0)), math.log1p(math.exp(-1.0))]
    assert loss.item() == pytest.approx(sum(softplus) / 2, rel=1e-6)
    loss.backward()
    sigmoid = [1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(1.0))]
    assert states.grad.flatten().tolist() == pytest.approx([(sigmoid[0] - 1) / 2, sigmoid[1] / 2], rel=1e-5)


@pytest.mark.parametrize("soft_weight", [0.0, 0.5])
def test_gradcheck_of_the_specification(soft_weight):
    states, weight, targets, head_weights, _ = make(3, 2, 4, 6)
    states, weight = states.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    teacher = torch.randn(3, 2, 6, dtype=torch.float64) if soft_weight else None
    assert torch.autograd.gradcheck(
        lambda s, w: reference.head_loss(s, w, targets, teacher, head_weights.double(), soft_weight), (states, weight)
    )


def test_teachers_given_in_three_ways_agree(backend):
    """Head i at position t is taught by the LM head on row t + i: [T, K, V], [T, K, H] and an index say the same."""
    positions, heads = 11, 3
    states, weight, targets, head_weights, _ = make(positions, heads, 16, 90)
    rows = torch.randn(positions, 16)
    index = torch.arange(positions).unsqueeze(1) + torch.arange(1, heads + 1)
    targets[index >= positions] = -1
    garbage = torch.full_like(index, 10**6)
    inside = index.clamp_max(positions - 1)
    ways = (
        {"teacher_logits": (rows @ weight.detach().t())[inside]},
        {"teacher_states": rows[inside]},
        {"teacher_states": rows, "teacher_index": index.where(targets != -1, garbage)},
        {"teacher_states": rows, "teacher_index": inside.to(torch.int32)},
    )
    results = []
    for way in ways:
        loss = ck.head_loss(
            states,
            weight,
            targets,
            head_weights=head_weights,
            soft_weight=0.6,
            chunk_tokens=4,
            backend=backend,
            **way,
        )
        results.append((loss, *gradients(loss, states, weight)))
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert_close(one, other)


def test_a_perfect_student_has_no_soft_gradient(backend):
    states, weight, targets, _, _ = make(4, 2, 16, 50)
    loss = ck.head_loss(states, weight, targets, teacher_states=states.detach(), soft_weight=1.0, backend=backend)
    assert gradients(loss, states)[0].abs().max() < 1e-7


def test_head_i_learns_the_token_i_places_on(backend):
    """Liger-Kernel #325: the first head was trained on the token that is already known."""
    heads, vocab = 3, 20
    tokens = torch.randperm(vocab)
    positions = vocab - heads
    targets = torch.stack([tokens[p + 1 : p + 1 + heads] for p in range(positions)])
    # Heads that know exactly the token i places on: one-hot states, an identity LM head.
    states = torch.nn.functional.one_hot(targets, vocab).float() * 100
    loss, correct, counted = ck.head_loss(states, torch.eye(vocab), targets, return_correct=True, backend=backend)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert correct.tolist() == counted.tolist() == [positions] * heads
    late = torch.stack([tokens[p : p + heads] for p in range(positions)])
    loss, correct, _ = ck.head_loss(states, torch.eye(vocab), late, return_correct=True, backend=backend)
    assert loss.item() == pytest.approx(100, rel=1e-5)
    assert correct.tolist() == [0] * heads


def test_correct_counts_first_maxima_of_valid_rows(backend):
    weight = torch.tensor([[1.0], [1.0], [0.5]])
    states = torch.tensor([[[1.0], [1.0]], [[1.0], [-1.0]], [[-1.0], [1.0]]])
    targets = torch.tensor([[0, 1], [1, 2], [-1, 0]])  # a tie goes to the lowest id: 0 wins over 1
    _, correct, counted = ck.head_loss(states, weight, targets, return_correct=True, backend=backend)
    assert correct.dtype == counted.dtype == torch.int64
    assert correct.tolist() == [1, 2]
    assert counted.tolist() == [2, 3]


def test_ignored_rows_are_not_read_and_get_zeros(backend):
    states, weight, targets, head_weights, teacher = make(8, 3, 16, 70)
    targets[2], targets[5] = -1, -1
    options = {"head_weights": head_weights, "soft_weight": 0.5, "chunk_tokens": 2, "backend": backend}
    clean = ck.head_loss(states, weight, targets, teacher_states=teacher, **options)
    expected = gradients(clean, states, weight)
    poisoned, bad_teacher = states.detach().clone(), teacher.clone()
    poisoned[targets == -1] = float("nan")
    bad_teacher[targets == -1] = float("inf")
    poisoned.requires_grad_()
    loss = ck.head_loss(poisoned, weight, targets, teacher_states=bad_teacher, **options)
    assert torch.equal(loss, clean)
    ours = gradients(loss, poisoned, weight)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])
    assert not ours[0][targets == -1].any()


def test_all_rows_ignored(backend):
    states, weight, targets, _, _ = make(4, 2, 8, 30)
    loss, correct, counted = ck.head_loss(
        states, weight, torch.full_like(targets, -1), return_correct=True, backend=backend
    )
    assert loss.item() == 0
    assert not torch.cat([g.flatten() for g in gradients(loss, states, weight)]).any()
    assert correct.tolist() == counted.tolist() == [0, 0]


def test_no_positions(backend):
    states = torch.empty(0, 3, 8, requires_grad=True)
    loss = ck.head_loss(states, torch.randn(5, 8), torch.empty(0, 3, dtype=torch.int64), backend=backend)
    assert loss.item() == 0
    assert gradients(loss, states)[0].shape == (0, 3, 8)


def test_nan_row_stays_alone(backend):
    states, weight, targets, _, _ = make(5, 2, 16, 40)
    targets[:] = 1
    clean = gradients(ck.head_loss(states, weight, targets, backend=backend), states)[0]
    broken = states.detach().clone()
    broken[2, 1, 0] = float("nan")
    broken.requires_grad_()
    loss = ck.head_loss(broken, weight.detach(), targets, backend=backend)
    assert loss.isnan()
    gradient = gradients(loss, broken)[0]
    assert gradient[2, 1].isnan().all()
    others = torch.ones(5, 2, dtype=torch.bool)
    others[2, 1] = False
    assert_close(gradient[others], clean[others])


@pytest.mark.parametrize("width", [1, 40, 100])
def test_in_a_nan_row_no_target_is_correct(backend, width):
    weight = torch.ones(width, 1)
    weight[width // 2] = float("nan")
    for target in {0, width // 2, width - 1}:
        targets = torch.tensor([[target]])
        for level in available_isa_levels() if backend == "native" else ("",):
            with isa_level(level) if level else contextlib.nullcontext():
                _, correct, counted = ck.head_loss(
                    torch.ones(1, 1, 1), weight, targets, return_correct=True, backend=backend
                )
            assert (correct.item(), counted.item()) == (0, 1), (target, level)


def test_large_logits_stay_finite(backend):
    states = torch.tensor([[[1e4], [-1e4]]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    loss = ck.head_loss(states, weight, torch.tensor([[0, 1]]), backend=backend)
    assert loss.item() == pytest.approx(5e3)
    assert gradients(loss, states)[0].isfinite().all()


def test_only_the_wanted_gradients_are_made(backend):
    states, weight, targets, _, _ = make(4, 2, 8, 30)
    frozen = weight.detach()
    assert not ck.head_loss(states.detach(), frozen, targets, backend=backend).requires_grad
    loss = ck.head_loss(states, frozen, targets, backend=backend)
    alone = ck.head_loss(states.detach(), weight, targets, backend=backend)
    with torch.no_grad():
        quiet = ck.head_loss(states, weight, targets, backend=backend)
    both = gradients(ck.head_loss(states, weight, targets, backend=backend), states, weight)
    assert_close(gradients(loss, states)[0], both[0])
    assert_close(gradients(alone, weight)[0], both[1])
    assert torch.equal(quiet, loss.detach())


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest result of any torch call below it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.numel() * value.element_size())
        return result


@pytest.mark.parametrize("way", ["teacher_states", "teacher_index"])
def test_memory_does_not_grow_with_positions(backend, way):
    """The largest tensor that appears is a chunk's logits, however many positions there are."""
    heads, width, vocab, chunk_tokens = 2, 4, 512, 3
    for positions in (12, 48):
        states, weight, targets, _, teacher = make(positions, heads, width, vocab)
        options = {"teacher_states": teacher}
        if way == "teacher_index":
            options = {"teacher_states": teacher[:, 0], "teacher_index": torch.arange(positions).repeat(heads, 1).t()}
        with LargestTensor() as largest, torch.no_grad():
            OPERATORS["head_loss"].implementations[backend](
                states.detach(),
                weight.detach(),
                targets,
                None,
                options["teacher_states"],
                options.get("teacher_index"),
                None,
                0.5,
                chunk_tokens,
                True,
                True,
            )
        assert largest.bytes <= 4 * chunk_tokens * heads * vocab


def test_thread_count_does_not_matter():
    states, weight, targets, _, teacher = make(16, 3, 8, 300)
    rows = reference.Rows(
        targets.flatten().clamp_min(0),
        torch.rand(48),
        (teacher.flatten(0, 1) @ weight.detach().t()).softmax(-1),
        torch.arange(48),
        0.3,
    )
    logits = states.detach().flatten(0, 1) @ weight.detach().t()
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            gradient = logits.clone()
            results.append((*native.row_loss(gradient, rows, True), gradient))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


def test_offset_views_inside_nan(backend):
    def inside(tensor):
        fill = float("nan") if tensor.is_floating_point() else 10**6
        wide = torch.full([size + 2 for size in tensor.shape], fill, dtype=tensor.dtype)
        view = wide[tuple(slice(1, size + 1) for size in tensor.shape)]
        view.copy_(tensor)
        return view

    states, weight, targets, head_weights, teacher = (t.detach() for t in make(5, 3, 16, 45))
    options = {"soft_weight": 0.5, "backend": backend}
    expected = ck.head_loss(states, weight, targets, head_weights=head_weights, teacher_states=teacher, **options)
    actual = ck.head_loss(
        inside(states),
        inside(weight),
        inside(targets),
        head_weights=inside(head_weights),
        teacher_states=inside(teacher),
        **options,
    )
    assert_close(actual, expected)


def test_refusals_name_argument_constraint_and_value(backend):
    states, weight, targets, _, teacher = make(4, 2, 8, 30)

    def refused(message, *arguments, **options):
        with pytest.raises(ValueError, match=f"head_loss: {message}"):
            ck.head_loss(*arguments, backend=backend, **options)

    refused("states must be 3-dimensional, got shape", states[0], weight, targets)
    refused(r"vocab_weight must be of shape \[any, 8\], got \[30, 7\]", states, weight[:, :7], targets)
    refused("targets must be of dtype int64 or int32, got float32", states, weight, targets.float())
    refused(r"targets must be of shape \[4, 2\], got \[3, 2\]", states, weight, targets[:3])
    refused(r"targets must lie in \[-1, 30\), got 30", states, weight, torch.full_like(targets, 30))
    refused(r"targets must lie in \[-1, 30\), got -2", states, weight, torch.full_like(targets, -2))
    refused(r"soft_weight must be in \[0, 1\], got 1.5", states, weight, targets, soft_weight=1.5)
    refused("soft_weight must be 0 without teacher_logits or teacher_states", states, weight, targets, soft_weight=0.5)
    refused("chunk_tokens must be >= 1, got 0", states, weight, targets, chunk_tokens=0)
    refused("teacher_index must be None without teacher_states", states, weight, targets, teacher_index=targets)
    logits = torch.zeros(4, 2, 30)
    refused(
        "teacher_states must be None when teacher_logits are given",
        states,
        weight,
        targets,
        teacher_logits=logits,
        teacher_states=teacher,
    )
    refused(r"teacher_logits must be of shape", states, weight, targets, teacher_logits=logits[..., :29])
    refused(
        r"teacher_index must lie in \[0, 4\), got 4",
        states,
        weight,
        targets,
        teacher_states=teacher[:, 0],
        teacher_index=torch.full_like(targets, 4),
        soft_weight=0.5,
    )


@pytest.mark.parametrize("way", ["hard", "logits", "states", "index"])
def test_opcheck(way):
    states, weight, targets, head_weights, teacher = make(3, 2, 8, 12)
    given = [None, None, None]
    if way == "logits":
        given[0] = torch.randn(3, 2, 12)
    elif way != "hard":
        given[1] = teacher if way == "states" else teacher[:, 0].contiguous()
        given[2] = None if way == "states" else torch.zeros_like(targets)
    soft_weight = 0.0 if way == "hard" else 0.5
    weight = weight.detach() if way == "hard" else weight
    arguments = (states, weight, targets, *given, head_weights, soft_weight, 2, True, way != "hard")
    torch.library.opcheck(torch.ops.cerberus_kernels.head_loss.default, arguments)


def test_compiles_whole_with_its_gradient():
    states, weight, targets, _, _ = make(4, 2, 8, 30)
    compiled = torch.compile(lambda s, w: ck.head_loss(s, w, targets) * 2, fullgraph=True, backend="eager")
    ours, theirs = compiled(states, weight), ck.head_loss(states, weight, targets) * 2
    assert torch.equal(ours, theirs)
    assert torch.equal(gradients(ours, states)[0], gradients(theirs, states)[0])
