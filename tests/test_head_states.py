"""head_states: agreement, gradients, links between heads, hand-worked values, refusals."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.ops.head_states import reference
from cerberus_kernels.testing import assert_close, available_isa_levels, isa_level

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# B, L, K, H: odd widths, one head, no block, many rows.
SHAPES = ((1, 2, 4, 64), (3, 1, 1, 7), (5, 3, 2, 33), (2, 0, 3, 16), (9, 2, 3, 48), (40, 2, 2, 40), (1, 1, 5, 1))


def make(batch, blocks, heads, width, *, linked=True, dtype=torch.float32, seed=0):
    """hidden, weight, bias, root_embedding of a size at which every block changes the state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    columns = 2 * width if linked else width
    weight = normal(blocks, heads, width, columns) / columns**0.5
    tensors = normal(batch, width), weight, normal(blocks, heads, width) / 2, normal(batch, width)
    return tuple(tensor.to(dtype) for tensor in tensors)


def one_head_after_another(hidden, weight, bias, root):
    """The definition as loops over rows, blocks and heads, in fp64."""
    blocks, heads, _, columns = weight.shape
    results = []
    for row, first in zip(hidden.double(), root.double(), strict=True):
        states = [first] + [row] * heads
        for block in range(blocks):
            before = list(states)
            for head in range(heads):
                seen = torch.cat([before[head + 1], before[head]])[:columns]
                product = weight[block, head].double() @ seen + bias[block, head].double()
                states[head + 1] = before[head + 1] + product * product.sigmoid()
        results.append(torch.stack(states[1:]))
    return torch.stack(results)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_definition(backend, shape, linked):
    hidden, weight, bias, root = make(*shape, linked=linked)
    expected = one_head_after_another(hidden, weight, bias, root).float()
    root_embedding = root if linked else None
    assert_close(ck.head_states(hidden, weight, bias, root_embedding=root_embedding, backend=backend), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_native_agrees_with_reference(shape, linked, dtype):
    hidden, weight, bias, root = make(*shape, linked=linked, dtype=dtype)
    for root_embedding in (None, root) if linked else (None,):
        expected = ck.head_states(hidden, weight, bias, root_embedding=root_embedding, backend="reference")
        actual = ck.head_states(hidden, weight, bias, root_embedding=root_embedding, backend="native")
        assert actual.dtype == dtype
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_isa_level(dtype):
    tensors = make(5, 2, 3, 72, dtype=dtype)
    expected = ck.head_states(*tensors[:3], root_embedding=tensors[3], backend="reference")
    for level in available_isa_levels():
        with isa_level(level):
            assert_close(ck.head_states(*tensors[:3], root_embedding=tensors[3], backend="native"), expected)


def test_mixed_dtypes_round_only_the_result(backend):
    hidden, weight, bias, root = make(3, 2, 3, 40)
    expected = ck.head_states(hidden, weight.bfloat16().float(), bias, root_embedding=root.half().float())
    actual = ck.head_states(hidden, weight.bfloat16(), bias, root_embedding=root.half(), backend=backend)
    assert actual.dtype == torch.float32
    assert_close(actual, expected)


def test_att_08_sums_of_ones_are_exact_and_bias_comes_before_rounding(backend):
    ones, width = torch.ones(1, 576, dtype=torch.bfloat16), 576
    weight, bias = torch.ones(1, 1, width, width, dtype=torch.bfloat16), torch.full((1, 1, width), 2.0**-7)
    # 1 + SiLU(576 + bias): the sigmoid is 1 in fp32, so the result is the rounding of 577 + 2^-7.
    for dtype, expected in ((torch.float32, 577 + 2.0**-7), (torch.bfloat16, 576.0)):
        states = ck.head_states(ones.to(dtype), weight, bias.to(dtype), backend=backend)
        assert states.unique().tolist() == [expected]
    # bf16 holds 2.0 exactly and 2 + 2^-7 not; two biases below its step add up only if nothing is rounded between.
    hidden, zeros = torch.full((1, 8), 256.0, dtype=torch.bfloat16), torch.zeros(2, 1, 8, 8, dtype=torch.bfloat16)
    step = torch.full((2, 1, 8), 1.0, dtype=torch.bfloat16)
    rise = 2 * torch.nn.functional.silu(torch.tensor(1.0))  # 1.46: each alone rounds away at 256, both together to 258
    assert ck.head_states(hidden, zeros, step, backend=backend).unique().tolist() == [258.0]
    assert 1 < rise < 3


def test_zero_weights_are_the_identity(backend):
    hidden, weight, bias, root = make(3, 2, 4, 33, dtype=torch.bfloat16)
    states = ck.head_states(hidden, weight * 0, bias * 0, root_embedding=root, backend=backend)
    assert torch.equal(states, hidden.unsqueeze(1).expand(-1, 4, -1))


@pytest.mark.parametrize("linked", [True, False])
def test_head_i_sees_its_left_neighbours_and_nothing_else(backend, linked):
    """After L blocks, head i depends on the weights of heads i-L+1..i: nothing runs head after head."""
    blocks, heads = 2, 5
    hidden, weight, bias, root = make(2, blocks, heads, 24, linked=linked)
    root_embedding = root if linked else None
    before = ck.head_states(hidden, weight, bias, root_embedding=root_embedding, backend=backend)
    for changed in range(heads):
        other = weight.clone()
        other[:, changed] += 0.5
        after = ck.head_states(hidden, other, bias, root_embedding=root_embedding, backend=backend)
        moved = (after != before).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
        reach = blocks if linked else 1
        assert moved == [head for head in range(heads) if changed <= head < changed + reach]


def test_root_embedding_reaches_as_many_heads_as_there_are_blocks(backend):
    hidden, weight, bias, root = make(1, 2, 4, 24)
    before = ck.head_states(hidden, weight, bias, root_embedding=root, backend=backend)
    after = ck.head_states(hidden, weight, bias, root_embedding=root + 1, backend=backend)
    assert (after != before).flatten(2).any(-1).flatten().tolist() == [True, True, False, False]
    without = ck.head_states(hidden, weight, bias, backend=backend)
    assert torch.equal(without, ck.head_states(hidden, weight, bias, root_embedding=hidden, backend=backend))


def test_each_block_has_its_own_weight(backend):
    """Medusa's trap: a list multiplied in Python made all blocks share one weight."""
    hidden, weight, bias, root = make(2, 3, 2, 20)
    through_two = ck.head_states(hidden, weight[:2], bias[:2], root_embedding=root, backend=backend)
    other = weight.clone()
    other[2] *= -1
    last = [ck.head_states(hidden, w, bias, root_embedding=root, backend=backend) for w in (weight, other)]
    assert not torch.allclose(last[0], last[1])
    # The third block alone, on what the first two gave, is what both runs differ by.
    for states, w in zip(last, (weight, other), strict=True):
        left = torch.stack([root, through_two[:, 0]], dim=1)
        inputs = torch.cat([through_two, left], dim=-1)
        product = torch.einsum("krc,bkc->bkr", w[2], inputs) + bias[2]
        assert_close(states, through_two + torch.nn.functional.silu(product))


def test_hed_04_overflow_stays_in_its_row(backend):
    width = 64
    hidden, _, bias, _ = make(4, 1, 2, width, linked=False, dtype=torch.float16)
    weight = (torch.eye(width) * 8).expand(2, 2, -1, -1).to(torch.float16).contiguous()
    bias = bias.expand(2, -1, -1).contiguous()
    normal = ck.head_states(hidden, weight, bias, backend=backend)
    loud = hidden.clone()
    loud[2] = 6e4
    states = ck.head_states(loud, weight, bias, backend=backend)
    assert torch.equal(states[[0, 1, 3]], normal[[0, 1, 3]])
    assert not states[2].isnan().any()
    # The states between the blocks are fp32: 9 · 6e4 would be infinite in fp16, and -inf · 0 a NaN.
    quiet = ck.head_states(loud.float(), weight, bias, backend=backend)
    assert quiet[2].isfinite().all()
    assert quiet[2].min() > 80 * 6e4


def test_nan_row_stays_alone(backend):
    hidden, weight, bias, root = make(5, 2, 3, 24)
    normal = ck.head_states(hidden, weight, bias, root_embedding=root, backend=backend)
    hidden[1], root[3] = float("nan"), float("inf")
    states = ck.head_states(hidden, weight, bias, root_embedding=root, backend=backend)
    assert torch.equal(states[[0, 2, 4]], normal[[0, 2, 4]])
    assert states[1].isnan().all()


def test_large_products(backend):
    """SiLU far out: 0 on the left, the identity on the right, never inf · 0."""
    hidden, weight = torch.zeros(1, 4), torch.zeros(1, 1, 4, 4)
    bias = torch.tensor([-1e30, -200.0, 200.0, 1e30]).view(1, 1, 4)
    states = ck.head_states(hidden, weight, bias, backend=backend)
    assert_close(states.flatten(), torch.tensor([0.0, 0.0, 200.0, 1e30]))


def test_empty_batch(backend):
    _, weight, bias, _ = make(1, 2, 3, 16)
    assert ck.head_states(torch.empty(0, 16), weight, bias, backend=backend).shape == (0, 3, 16)


def test_offset_views_inside_nan(backend):
    """Rows with gaps, weights and biases with strides, everything between them NaN."""

    def inside(tensor):
        wide = torch.full([size + 2 for size in tensor.shape], float("nan"), dtype=tensor.dtype)
        view = wide[tuple(slice(1, size + 1) for size in tensor.shape)]
        view.copy_(tensor)
        return view

    tensors = make(3, 2, 3, 19, dtype=torch.bfloat16)
    expected = ck.head_states(*tensors[:3], root_embedding=tensors[3], backend=backend)
    views = [inside(tensor) for tensor in tensors]
    assert torch.equal(ck.head_states(*views[:3], root_embedding=views[3], backend=backend), expected)


def test_thread_count_does_not_matter():
    tensors = make(3, 2, 4, 96, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ck.head_states(*tensors[:3], root_embedding=tensors[3], backend="native"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("linked", "rooted"), [(True, True), (True, False), (False, False)])
def test_gradcheck_of_the_formulas(linked, rooted):
    hidden, weight, bias, root = (t.double().requires_grad_() for t in make(3, 2, 3, 5, linked=linked))
    inputs = (hidden, weight, bias, root if rooted else None)
    assert torch.autograd.gradcheck(reference.head_states, inputs)
    upstream = torch.randn(3, 3, 5, dtype=torch.float64)
    wanted = [tensor for tensor in inputs if tensor is not None]
    expected = torch.autograd.grad(reference.head_states(*inputs), wanted, upstream)
    actual = [g for g in reference.head_states_gradients(upstream, *inputs) if g is not None]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("linked", "rooted"), [(True, True), (True, False), (False, False)])
def test_gradients_through_the_operator(backend, linked, rooted):
    hidden, weight, bias, root = (t.requires_grad_() for t in make(4, 2, 3, 24, linked=linked))
    wanted = [hidden, weight, bias, root] if rooted else [hidden, weight, bias]
    root_embedding = root if rooted else None
    upstream = torch.randn(4, 3, 24)
    expected = torch.autograd.grad(reference.head_states(hidden, weight, bias, root_embedding), wanted, upstream)
    states = ck.head_states(hidden, weight, bias, root_embedding=root_embedding, backend=backend)
    for ours, theirs in zip(torch.autograd.grad(states, wanted, upstream), expected, strict=True):
        assert_close(ours, theirs)


def test_frozen_weights_get_no_gradient():
    hidden, weight, bias, root = make(2, 1, 2, 8)
    hidden.requires_grad_()
    ck.head_states(hidden, weight, bias, root_embedding=root).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is bias.grad is root.grad is None


def test_refusals_name_argument_constraint_and_value():
    hidden, weight, bias, root = make(2, 1, 3, 8)
    with pytest.raises(ValueError, match=r"head_states: hidden must be of dtype .*, got float64"):
        ck.head_states(hidden.double(), weight, bias)
    with pytest.raises(ValueError, match=r"weight must be of shape \[any, any, 8, 16\] or .*, got \[1, 3, 8, 12\]"):
        ck.head_states(hidden, weight[..., :12], bias)
    with pytest.raises(ValueError, match=r"bias must be of shape \[1, 3, 8\], got \[1, 2, 8\]"):
        ck.head_states(hidden, weight, bias[:, :2])
    with pytest.raises(ValueError, match=r"root_embedding must be None for weights without links, got \[2, 8\]"):
        ck.head_states(hidden, weight[..., :8].contiguous(), bias, root_embedding=root)
    with pytest.raises(ValueError, match=r"root_embedding must be of shape \[2, 8\], got \[1, 8\]"):
        ck.head_states(hidden, weight, bias, root_embedding=root[:1])
    with pytest.raises(ValueError, match="weight must be contiguous in its last dimension"):
        ck.head_states(hidden, torch.randn(1, 3, 8, 32)[..., ::2], bias)
    with pytest.raises(ValueError, match="weight must be of at least one head"):
        ck.head_states(hidden, weight[:, :0], bias[:, :0])


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("linked", [True, False])
def test_opcheck(linked, needs_gradient):
    tensors = [t.requires_grad_(needs_gradient) for t in make(2, 2, 3, 12, linked=linked)]
    arguments = tensors if linked else tensors[:3]
    torch.library.opcheck(torch.ops.cerberus_kernels.head_states.default, tuple(arguments))


def test_compiles_whole():
    hidden, weight, bias, root = make(2, 2, 3, 12)
    compiled = torch.compile(
        lambda h, w, b, r: ck.head_states(h, w, b, root_embedding=r) * 2, fullgraph=True, backend="eager"
    )
    expected = ck.head_states(hidden, weight, bias, root_embedding=root) * 2
    assert torch.equal(compiled(hidden, weight, bias, root), expected)
