"""packed_linear: agreement, independence of a row from the others, memory, refusals."""

from __future__ import annotations

import re

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close, available_isa_levels, isa_level

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (out, in): the SmolLM2 projections' kinds, and sizes that fill neither a panel (48), a step (2) nor a block (192).
SHAPES = ((576, 576), (192, 576), (576, 1536), (48, 2), (1, 1), (49, 3), (50, 191), (95, 193), (97, 387))


def make(out_features, in_features, rows, dtype):
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    return weight, torch.randn(rows, in_features).to(dtype), torch.randn(out_features).to(dtype)


def assert_equal(actual, expected):
    assert torch.equal(actual, expected)


@pytest.fixture(params=available_isa_levels())
def level(request):
    with isa_level(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_is_exact(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    packed = ck.pack_linear(weight)
    assert torch.equal(ck.unpack_linear(packed), weight)
    assert torch.equal(ck.pack_linear(weight.t().contiguous().t()).panels, packed.panels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_torch_linear_in_fp32(dtype, shape):
    weight, x, bias = make(*shape, 3, dtype)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    packed = ck.pack_linear(weight)
    assert torch.equal(ck.packed_linear(x, packed, bias=bias, backend="reference"), expected.to(dtype))
    raw = ck.packed_linear(x, packed, bias=bias, out_dtype=torch.float32, backend="reference")
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_at_every_level(level, dtype, shape):
    weight, x, bias = make(*shape, 70, dtype)
    packed = ck.pack_linear(weight)
    for rows in (0, 1, 2, 3, 4, 5, 7, 8, 9, 70):
        for use_bias in (None, bias):
            for out_dtype in (dtype, torch.float32):
                arguments = {"bias": use_bias, "out_dtype": out_dtype}
                got = ck.packed_linear(x[:rows], packed, backend="native", **arguments)
                assert_close(got, ck.packed_linear(x[:rows], packed, backend="reference", **arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_in_any_company(level, dtype):
    weight, x, bias = make(145, 391, 130, dtype)
    packed = ck.pack_linear(weight)
    alone = torch.cat([ck.packed_linear(row, packed, bias=bias, backend="native") for row in x.split(1)])
    for rows in range(1, 131):
        assert torch.equal(ck.packed_linear(x[-rows:], packed, bias=bias, backend="native"), alone[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_count_changes_no_bit(dtype):
    weight, x, _ = make(577, 577, 11, dtype)
    packed = ck.pack_linear(weight)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(ck.packed_linear(x, packed, backend="native"))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_att_08_sums_stay_in_fp32_and_bias_comes_before_rounding(backend, rows):
    ones = torch.ones(50, 576, dtype=torch.bfloat16)
    packed = ck.pack_linear(ones)
    x = ones[:rows]
    assert (ck.packed_linear(x, packed, backend=backend) == 576).all()
    # 576 + 2 + 2^-7 rounds up to 580 (bf16 has steps of 4 there); rounding first leaves 578's tie at 576.
    x = torch.cat([x, torch.full((rows, 2), 1.0, dtype=torch.bfloat16)], dim=1)
    packed = ck.pack_linear(torch.ones(50, 578, dtype=torch.bfloat16))
    bias = torch.full((50,), 2.0**-7, dtype=torch.bfloat16)
    assert (ck.packed_linear(x, packed, bias=bias, backend=backend) == 580).all()
    exact = ck.packed_linear(x, packed, bias=bias, out_dtype=torch.float32, backend=backend)
    assert (exact == 578 + 2.0**-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_stay_in_their_row_and_column(backend, dtype):
    weight = torch.zeros(50, 5, dtype=dtype)
    weight[0, 0], weight[3, 1], weight[49, 4] = float("inf"), float("nan"), -1.0
    x = torch.ones(6, 5, dtype=dtype)
    x[2, 4], x[5, 2] = float("-inf"), float("nan")
    out = ck.packed_linear(x, ck.pack_linear(weight), backend=backend)
    expected = torch.nn.functional.linear(x.float(), weight.float()).to(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_subnormal_and_extreme_halves_are_exact(level):
    values = torch.tensor(
        [2.0**-24, 2.0**-14 - 2.0**-24, 65504.0, -65504.0, 2.0**-14, -0.0, 1 / 3], dtype=torch.float16
    )
    weight = values.repeat(8)[:, None]
    out = ck.packed_linear(torch.ones(2, 1, dtype=torch.float16), ck.pack_linear(weight), backend="native")
    assert torch.equal(out, weight.t().expand(2, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_and_leading_dimensions(backend, dtype):
    weight, x, bias = make(50, 77, 6, dtype)
    packed = ck.pack_linear(weight)
    expected = ck.packed_linear(x, packed, bias=bias, backend=backend)
    wide = torch.full((2, 5, 100), float("nan"), dtype=dtype)
    view = wide[:, 1:4, 11:88]
    view.copy_(x.view(2, 3, 77))
    got = ck.packed_linear(view, packed, bias=bias, backend=backend)
    same = assert_close if backend == "reference" else assert_equal  # torch's own sums depend on the shape
    same(got, expected.view(2, 3, 50))
    same(ck.packed_linear(x[0], packed, bias=bias, backend=backend), expected[0])
    same(ck.packed_linear(wide[1, :, 11:88][1:4], packed, bias=bias, backend=backend), expected[3:])
    assert ck.packed_linear(x.view(2, 3, 77)[:, :0], packed, backend=backend).shape == (2, 0, 50)


def test_expanded_rows(backend):
    weight, x, _ = make(50, 64, 1, torch.float32)
    packed = ck.pack_linear(weight)
    got = ck.packed_linear(x.expand(5, 64), packed, backend=backend)
    assert_close(got, ck.packed_linear(x, packed, backend=backend).expand(5, -1))


def test_writes_nothing_beyond_its_output():
    """Each row ends right where the next begins, and the last panel is ragged."""
    function = ck._native.function("packed_linear")
    weight, x, _ = make(50, 33, 5, torch.bfloat16)
    packed = ck.pack_linear(weight)
    room = torch.full((7, 50), 7.0, dtype=torch.bfloat16)
    function(x, packed.panels, None, None, 0.0, False, None, room[1:6])
    assert (room[0] == 7).all()
    assert (room[6] == 7).all()
    assert torch.equal(room[1:6], ck.packed_linear(x, packed, backend="native"))


AROUND = [
    {"norm": True},
    {"gated": True},
    {"residual": True},
    {"norm": True, "residual": True},
    {"gated": True, "residual": True},
]


def around(kinds, shape, rows, dtype):
    """x and the keywords for the steps around the product."""
    out_features, in_features = shape
    x = torch.randn(rows, in_features * (2 if "gated" in kinds else 1)).to(dtype)
    keywords = {"eps": 1e-3}
    if "gated" in kinds:
        keywords["gated"] = True
    if "norm" in kinds:
        keywords["norm_weight"] = torch.randn(in_features).to(dtype)
    if "residual" in kinds:
        keywords["residual"] = torch.randn(rows, out_features).to(dtype)
    return x, keywords


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", AROUND, ids=lambda kinds: "-".join(kinds))
def test_steps_around_the_product_agree_at_every_level(level, dtype, kinds):
    for shape in ((576, 576), (49, 3), (50, 191), (1, 1)):
        weight, _, bias = make(*shape, 1, dtype)
        packed = ck.pack_linear(weight)
        x, keywords = around(kinds, shape, 9, dtype)
        got = ck.packed_linear(x, packed, bias=bias, backend="native", **keywords)
        assert_close(got, ck.packed_linear(x, packed, bias=bias, backend="reference", **keywords))
        for row in range(9):
            alone = {name: value[row : row + 1] if name == "residual" else value for name, value in keywords.items()}
            single = ck.packed_linear(x[row : row + 1], packed, bias=bias, backend="native", **alone)
            assert torch.equal(single[0], got[row])


def test_steps_around_the_product_are_those_of_a_llama_layer():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    for dtype in DTYPES:
        config = LlamaConfig(hidden_size=48, intermediate_size=96, num_attention_heads=4)
        mlp, norm = LlamaMLP(config).to(dtype), LlamaRMSNorm(48, eps=1e-5).to(dtype)
        norm.weight.data.normal_()
        x = torch.randn(4, 48).to(dtype)
        with torch.no_grad():
            expected = x + mlp(norm(x))
            both = ck.pack_linear(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            down = ck.pack_linear(mlp.down_proj.weight)
            inner = ck.packed_linear(x, both, norm_weight=norm.weight, eps=1e-5)
            assert_close(ck.packed_linear(inner, down, gated=True, residual=x), expected)


def test_refusals_name_argument_constraint_and_value():
    packed = ck.pack_linear(torch.ones(4, 6))
    with pytest.raises(ValueError, match=r"pack_linear: weight must be 2-dimensional, got shape \[4\]"):
        ck.pack_linear(torch.ones(4))
    with pytest.raises(ValueError, match="weight must be of dtype float32 or bfloat16 or float16, got int64"):
        ck.pack_linear(torch.ones(4, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"pack_linear: weight must be non-empty, got \[0, 6\]"):
        ck.pack_linear(torch.ones(0, 6))
    with pytest.raises(ValueError, match=r"packed_linear: x must be of shape \[.., 6\], got \[2, 5\]"):
        ck.packed_linear(torch.ones(2, 5), packed)
    with pytest.raises(ValueError, match="packed_linear: x must be of dtype float32, got bfloat16"):
        ck.packed_linear(torch.ones(2, 6, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="packed_linear: x must be contiguous in its last dimension"):
        ck.packed_linear(torch.ones(6, 2).t(), packed)
    with pytest.raises(ValueError, match="packed_linear: weight must be a PackedWeight from pack_linear, got Tensor"):
        ck.packed_linear(torch.ones(2, 6), torch.ones(4, 6))
    with pytest.raises(ValueError, match=r"packed_linear: bias must be of shape \[4\], got \[5\]"):
        ck.packed_linear(torch.ones(2, 6), packed, bias=torch.ones(5))
    x = torch.ones(2, 6)
    for keywords, message in (
        ({"gated": True}, "x must be of shape [.., 12], got [2, 6]"),
        ({"gated": 1}, "gated must be True or False, got 1"),
        ({"eps": -1.0, "norm_weight": x[0]}, "eps must be >= 0, got -1.0"),
        ({"norm_weight": torch.ones(5)}, "norm_weight must be of shape [6], got [5]"),
        ({"norm_weight": torch.ones(6).half()}, "norm_weight must be of dtype float32, got float16"),
        ({"residual": torch.ones(2, 5)}, "residual must be of shape [2, 4], got [2, 5]"),
        ({"residual": torch.ones(4, 2).t()}, "residual must be contiguous"),
        ({"residual": torch.ones(2, 4).half()}, "residual must be of dtype float32, got float16"),
    ):
        for backend in ("native", "reference"):
            with pytest.raises(ValueError, match=re.escape(f"packed_linear: {message}")):
                ck.packed_linear(x, packed, backend=backend, **keywords)
    gated = {"gated": True, "norm_weight": torch.ones(6)}
    with pytest.raises(ValueError, match=re.escape("norm_weight must be None with gated, got shape [6]")):
        ck.packed_linear(torch.ones(2, 12), packed, **gated)
    half = ck.pack_linear(torch.ones(4, 6).half())
    with pytest.raises(ValueError, match="out_dtype must be x's dtype with a residual, got float32"):
        ck.packed_linear(x.half(), half, out_dtype=torch.float32, residual=torch.ones(2, 4).half())
    with pytest.raises(ValueError, match="packed_linear: out_dtype must be x's dtype or float32, got float16"):
        ck.packed_linear(torch.ones(2, 6), packed, out_dtype=torch.float16)
    with pytest.raises(ValueError, match="packed_linear: x must be free of gradients"):
        ck.packed_linear(torch.ones(2, 6, requires_grad=True), packed)
    with torch.no_grad():
        assert ck.packed_linear(torch.ones(2, 6, requires_grad=True), packed).shape == (2, 4)


def test_opcheck():
    weight, x, bias = make(50, 7, 3, torch.bfloat16)
    panels = ck.pack_linear(weight).panels
    operator = torch.ops.cerberus_kernels.packed_linear.default
    for arguments in ((x, panels, 50), (x.view(3, 1, 7), panels, 50, bias), (x, panels, 50, bias, torch.float32)):
        torch.library.opcheck(operator, arguments)


def test_compiles_whole():
    weight, x, bias = make(50, 7, 3, torch.float32)
    packed = ck.pack_linear(weight)
    compiled = torch.compile(lambda x: ck.packed_linear(x, packed, bias=bias) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), ck.packed_linear(x, packed, bias=bias) + 1)
