"""decoder_layer: agreement with its composition and with transformers, caches, paged caches, refusals, memory."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close, available_isa_levels, isa_level, random_parents
from cerberus_kernels.testing.trees import chain

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def weights(dtype=torch.float32, *, width=40, inner=56, q_heads=6, kv_heads=2, head_dim=24, biases=True):
    def linear(out, into):
        return ck.pack_linear((torch.randn(out, into) / into**0.5 / 2).to(dtype))

    def bias(out):
        return (torch.randn(out) / 4).to(dtype) if biases else None

    rows = (q_heads + 2 * kv_heads) * head_dim
    return ck.DecoderWeights(
        linear(rows, width),
        linear(width, q_heads * head_dim),
        linear(2 * inner, width),
        linear(width, inner),
        torch.rand(width).to(dtype) + 0.5,
        torch.rand(width).to(dtype) + 0.5,
        1e-5,
        1e-6,
        *map(bias, (rows, width, 2 * inner, width)),
    )


def arguments(dtype=torch.float32, *, batch=2, nodes=7, slots=40, head_dim=24, kv_heads=2, one_tree=True, **sizes):
    torch.manual_seed(0)
    layer = weights(dtype, head_dim=head_dim, kv_heads=kv_heads, **sizes)
    angles = torch.rand(batch, nodes, head_dim // 2).repeat(1, 1, 2) * 6
    parents = [random_parents(nodes, seed) for seed in range(max(batch, 1))]
    return {
        "hidden": torch.randn(batch, nodes, layer.qkv.in_features).to(dtype),
        "weights": layer,
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "k_cache": torch.randn(batch, slots, kv_heads, head_dim).to(dtype),
        "v_cache": torch.randn(batch, slots, kv_heads, head_dim).to(dtype),
        "mask": ck.tree_mask(int32(parents[0] if one_tree else parents)),
        "prefix_lens": int32([11 + 6 * b for b in range(batch)]),
    }


def run(given, **options):
    """Result and both caches afterwards; the given ones stay as they are."""
    caches = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    return ck.decoder_layer(**{**given, **caches}, **options), caches["k_cache"], caches["v_cache"]


@pytest.mark.parametrize("level", available_isa_levels())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"batch": 1, "nodes": 1, "biases": False},
        {"nodes": 33, "one_tree": False, "slots": 64},
        {"batch": 3, "head_dim": 8, "q_heads": 4, "kv_heads": 4, "width": 33, "inner": 17},
        {"batch": 1, "nodes": 70, "head_dim": 64, "q_heads": 9, "kv_heads": 3, "slots": 90},
    ],
    ids=str,
)
def test_agrees_at_every_level(level, dtype, sizes):
    given = arguments(dtype, **sizes)
    expected = run(given, backend="reference")
    with isa_level(level):
        found = run(given, backend="native")
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_its_parts_in_turn_bit_for_bit(dtype):
    given = arguments(dtype, batch=1)
    layer, hidden, head_dim = given["weights"], given["hidden"], 24
    out, k_after, v_after = run(given, backend="native")
    heads = ck.packed_linear(hidden, layer.qkv, bias=layer.qkv_bias, norm_weight=layer.input_norm, eps=layer.input_eps)
    heads = heads.view(1, 7, -1, head_dim)
    low, high = heads[:, :, :8].chunk(2, -1)
    rotated = heads[:, :, :8] * given["cos"].unsqueeze(2) + torch.cat((-high, low), -1) * given["sin"].unsqueeze(2)
    k_cache, v_cache = given["k_cache"].clone(), given["v_cache"].clone()
    k_cache[0, 11:18], v_cache[0, 11:18] = rotated[0, :, 6:], heads[0, :, 8:]
    if dtype == torch.bfloat16:  # in fp32 torch may fuse the rotation's multiply and add
        assert_equal(k_after, k_cache)
    assert_close(k_after, k_cache)
    assert_equal(v_after, v_cache)
    attended = ck.tree_attention(rotated[:, :, :6], k_cache, v_cache, given["mask"], given["prefix_lens"])
    hidden = ck.packed_linear(attended.flatten(2), layer.output, bias=layer.output_bias, residual=hidden)
    gated = ck.packed_linear(
        hidden, layer.gate_up, bias=layer.gate_up_bias, norm_weight=layer.post_norm, eps=layer.post_eps
    )
    expected = ck.packed_linear(gated, layer.down, bias=layer.down_bias, gated=True, residual=hidden)
    if dtype == torch.bfloat16:
        assert_equal(out, expected)
    assert_close(out, expected)


def test_a_chain_is_transformers_llama_layer(backend):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, head_dim=16
    )
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0).eval()
    attention, mlp = layer.self_attn, layer.mlp
    pack = [torch.cat([p.weight for p in parts]) for parts in (
        (attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,), (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )]  # fmt: skip
    norms = (layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach())
    ours = ck.DecoderWeights(*map(ck.pack_linear, pack), *norms, config.rms_norm_eps, config.rms_norm_eps)
    hidden = torch.randn(1, 9, 48)
    cos, sin = LlamaRotaryEmbedding(config)(hidden, torch.arange(9)[None])
    future = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        expected = layer(hidden, attention_mask=future, position_embeddings=(cos, sin))
    expected = expected[0] if isinstance(expected, tuple) else expected
    cache = torch.zeros(1, 9, 3, 16)
    mask = ck.tree_mask(int32(chain(9)))
    found = ck.decoder_layer(hidden, ours, cos, sin, cache, cache.clone(), mask, int32([0]), backend=backend)
    assert_close(found, expected)


def test_only_the_nodes_slots_are_written(backend):
    given = arguments()
    _, *after = run(given, backend=backend)
    for name, cache in zip(("k_cache", "v_cache"), after, strict=True):
        for b, prefix in enumerate((11, 17)):
            changed = (cache[b] != given[name][b]).flatten(1).any(1).nonzero().flatten().tolist()
            assert changed == list(range(prefix, prefix + 7))


def test_slots_past_the_nodes_are_not_read(backend):
    given = arguments()
    expected = run(given, backend=backend)[0]
    for name in ("k_cache", "v_cache"):
        for b, prefix in enumerate((11, 17)):
            given[name][b, prefix:] = float("nan")
    assert_equal(run(given, backend=backend)[0], expected)


def test_paged_caches_hold_the_same(backend):
    given = arguments()
    expected = run(given, backend=backend)
    table = int32([[5, 0, 9, 2, 7], [3, 8, 1, 6, 4]])
    paged = {}
    for name in ("k_cache", "v_cache"):
        paged[name] = torch.empty(10, 8, 2, 24)
        paged[name][table.long()] = given[name].view(2, 5, 8, 2, 24)
    found = run({**given, **paged}, block_table=table, backend=backend)
    assert_equal(found[0], expected[0])
    for cache, contiguous in zip(found[1:], expected[1:], strict=True):
        assert_equal(cache[table.long()].view(2, 40, 2, 24), contiguous)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_node_gets_what_it_gets_alone(dtype):
    given = arguments(dtype, batch=1, nodes=5)
    given["mask"] = torch.ones(5, 1, dtype=torch.int32) << torch.arange(5)[:, None].to(torch.int32)  # sees itself only
    together = run(given)[0]
    for node in range(5):
        one = {name: given[name][:, node : node + 1].contiguous() for name in ("hidden", "cos", "sin")}
        alone = run({**given, **one, "mask": torch.ones(1, 1, dtype=torch.int32)})[0]
        assert_close(alone, together[:, node : node + 1])


def test_nothing_comes_of_nothing(backend):
    for sizes in ({"batch": 0}, {"nodes": 0}):
        given = arguments(batch=sizes.get("batch", 2))
        if "nodes" in sizes:
            given.update({name: given[name][:, :0].contiguous() for name in ("hidden", "cos", "sin")})
            given["mask"] = torch.empty(0, 0, dtype=torch.int32)
        out, k_cache, _ = run(given, backend=backend)
        assert out.shape == given["hidden"].shape
        assert torch.equal(k_cache, given["k_cache"])


def test_opcheck_and_compile():
    given = arguments()
    layer = given["weights"]
    rest = [given[name] for name in ("cos", "sin", "k_cache", "v_cache", "mask", "prefix_lens")]
    panels = [weight.panels for weight in layer[:4]]
    inputs = (given["hidden"], *panels, *layer[8:], *layer[4:8], 6, 56, *rest, None, 0.2)
    for backend in ("native", "reference"):
        torch.library.opcheck(torch.ops.cerberus_kernels.decoder_layer, inputs, {"backend": backend})
    compiled = torch.compile(lambda **kwargs: ck.decoder_layer(**kwargs), fullgraph=True, backend="eager")
    expected = run(given)[0]
    assert_equal(
        compiled(**{**given, "k_cache": given["k_cache"].clone(), "v_cache": given["v_cache"].clone()}), expected
    )


def refusals():
    given = arguments()
    wide = ck.pack_linear(torch.randn(40, 64))
    yield "hidden must be 3-dimensional", {"hidden": given["hidden"][0]}
    yield "hidden must be contiguous", {"hidden": given["hidden"].transpose(0, 1).contiguous().transpose(0, 1)}
    yield "weights must be a DecoderWeights", {"weights": tuple(given["weights"])}
    yield "weights must be of products that fit", {"weights": given["weights"]._replace(down=wide)}
    yield "input_eps must be >= 0", {"weights": given["weights"]._replace(input_eps=-1.0)}
    yield "down_bias must be of shape", {"weights": given["weights"]._replace(down_bias=torch.zeros(3))}
    yield "cos must be of shape", {"cos": given["cos"][:, :, :8]}
    yield "k_cache must be of dtype", {"k_cache": given["k_cache"].half()}
    yield "v_cache must be of shape", {"v_cache": given["v_cache"][:, 1:]}
    yield "prefix_lens must be in", {"prefix_lens": int32([11, 34])}
    yield "mask must be of shape", {"mask": torch.zeros(7, 2, dtype=torch.int32)}
    yield "scale must be finite", {"scale": float("nan")}
    yield "block_table must be in", {"block_table": int32([[0], [2]])}


@pytest.mark.parametrize(("message", "change"), refusals(), ids=lambda value: value if isinstance(value, str) else "")
def test_refusals_leave_the_caches_alone(message, change, backend):
    given = {**arguments(), **change}
    before = given["k_cache"].clone(), given["v_cache"].clone()
    with pytest.raises(ValueError, match=f"^decoder_layer: {message}"):
        ck.decoder_layer(**given, backend=backend)
    assert torch.equal(given["k_cache"], before[0])
    assert torch.equal(given["v_cache"], before[1])
