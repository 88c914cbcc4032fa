"""decoder_layer at SmolLM2-135M's size against its parts called in turn, the reference and transformers' own layer."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import cerberus_kernels as ck
from bench.measure import Work, in_turns
from cerberus_kernels.testing import assert_close
from cerberus_kernels.testing.trees import chain

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, PREFIX = 576, 1536, 9, 3, 64, 256


@functools.lru_cache(maxsize=1)
def layer(dtype: torch.dtype) -> tuple[LlamaDecoderLayer, ck.DecoderWeights]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS
    )
    config._attn_implementation = "sdpa"
    plain = LlamaDecoderLayer(config, 0).eval().to(dtype)
    attention, mlp = plain.self_attn, plain.mlp
    merged = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    qkv, gate_up = (ck.pack_linear(torch.cat([part.weight for part in parts])) for parts in merged)
    norms = (plain.input_layernorm.weight.detach(), plain.post_attention_layernorm.weight.detach())
    output, down = ck.pack_linear(attention.o_proj.weight), ck.pack_linear(mlp.down_proj.weight)
    return plain, ck.DecoderWeights(qkv, output, gate_up, down, *norms, config.rms_norm_eps, config.rms_norm_eps)


def parts_in_turn(hidden, weights, cos, sin, k_cache, v_cache, mask, prefix_lens):
    """The same from the other operators and torch's small steps."""
    batch, nodes, _ = hidden.shape
    heads = ck.packed_linear(hidden, weights.qkv, norm_weight=weights.input_norm, eps=weights.input_eps)
    heads = heads.view(batch, nodes, -1, HEAD_DIM)
    turning, values = heads.split((HEADS + KV_HEADS, KV_HEADS), 2)
    low, high = turning.chunk(2, -1)
    turned = turning * cos.unsqueeze(2) + torch.cat((-high, low), -1) * sin.unsqueeze(2)
    queries, keys = turned.split((HEADS, KV_HEADS), 2)
    k_cache[:, PREFIX : PREFIX + nodes], v_cache[:, PREFIX : PREFIX + nodes] = keys, values
    attended = ck.tree_attention(queries, k_cache, v_cache, mask, prefix_lens).flatten(2)
    hidden = ck.packed_linear(attended, weights.output, residual=hidden)
    gated = ck.packed_linear(hidden, weights.gate_up, norm_weight=weights.post_norm, eps=weights.post_eps)
    return ck.packed_linear(gated, weights.down, gated=True, residual=hidden)


class Cache:
    """What transformers' layer asks of a cache, without the cost of one: the prefix with the new nodes behind it."""

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        self.caches = [cache.transpose(1, 2) for cache in (k_cache, v_cache)]

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        end = PREFIX + keys.shape[2]
        for cache, new in zip(self.caches, (keys, values), strict=True):
            cache[:, :, PREFIX:end] = new
        return self.caches[0][:, :, :end], self.caches[1][:, :, :end]


@pytest.mark.parametrize("case", ["native", "native_parts", "reference", "torch_transformers"])
@pytest.mark.parametrize("nodes", [1, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_decoder_layer(compare, dtype, nodes, case):
    plain, weights = layer(dtype)
    hidden = torch.randn(1, nodes, WIDTH).to(dtype)
    angles = torch.rand(1, nodes, HEAD_DIM // 2).repeat(1, 1, 2) * 6
    k_cache, v_cache = (torch.randn(1, PREFIX + nodes, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    mask = ck.tree_mask(torch.tensor(chain(nodes), dtype=torch.int32))
    around = (angles.cos().to(dtype), angles.sin().to(dtype), k_cache, v_cache, mask, torch.tensor([PREFIX]).int())
    visible = torch.cat([torch.ones(nodes, PREFIX, dtype=torch.bool), ck.unpack_mask(mask, nodes)], dim=1)[None, None]

    def transformers_layer(module):
        name = "past_key_values" if "past_key_values" in module.forward.__code__.co_varnames else "cache"
        out = module(hidden, attention_mask=visible, position_embeddings=around[:2], **{name: Cache(k_cache, v_cache)})
        return out[0] if isinstance(out, tuple) else out

    def reference():
        return ck.decoder_layer(hidden, weights, *around, backend="reference")

    def ours(run):
        return in_turns(lambda *packed: run(hidden, ck.DecoderWeights(*packed, *weights[4:]), *around), *weights[:4])

    call = {
        "native": lambda: ours(ck.decoder_layer),
        "native_parts": lambda: ours(parts_in_turn),
        "reference": lambda: reference,
        "torch_transformers": lambda: in_turns(transformers_layer, plain),
    }[case]()

    def agree(found, right):
        # transformers rounds the norms' and gates' inner steps otherwise in bf16.
        wide = 4e-2 if case == "torch_transformers" and dtype == torch.bfloat16 else None
        if wide:
            torch.testing.assert_close(found, right, rtol=wide, atol=wide)
        else:
            assert_close(found, right)

    size = sum(weight.panels.numel() for weight in weights[:4])
    moved = dtype.itemsize * (size + 2 * (PREFIX + nodes) * KV_HEADS * HEAD_DIM + 2 * hidden.numel())
    flops = 2 * size * nodes + 4 * nodes * HEADS * HEAD_DIM * (PREFIX + nodes)
    with torch.inference_mode():
        compare(
            f"decoder_layer H={WIDTH} N={nodes} S={PREFIX} {dtype}", {case: call}, case, agree,
            work=Work(moved, flops), expected=reference,
        )  # fmt: skip
