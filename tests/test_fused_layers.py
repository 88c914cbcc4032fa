"""Fused decoder layers: same logits over trees, same weights, and transformers' own code for everything else."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from cerberus_decode.adapter import Adapter
from cerberus_decode.fused_layers import can_fuse, is_fused
from cerberus_decode.layout import TreeLayout
from cerberus_decode.optimize import describe, optimize

import cerberus_kernels as ck
from cerberus_kernels.testing import assert_close

SIZES = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = (transformers.LlamaConfig, transformers.LlamaForCausalLM)
KINDS = {
    "llama": (*LLAMA, {}),
    "llama with biases": (*LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
}


def make(kind: str, dtype: torch.dtype = torch.float32, **changes):
    """Heads of 48 make queries of 192, keys and values of 96: whole panels."""
    config, model, extra = KINDS[kind]
    torch.manual_seed(0)
    built = model(config(**{**SIZES, "head_dim": 48, **extra, **changes})) if kind != "qwen2" else None
    if built is None:  # its head size is the hidden size over the heads
        built = model(config(**{**SIZES, "hidden_size": 192, **extra, **changes}))
    for name, parameter in built.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return built.to(dtype).eval()


def tree_logits(model, batch: int = 1) -> torch.Tensor:
    adapter = Adapter(model)
    layout = TreeLayout(ck.Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0)]), torch.device("cpu"))
    cache = adapter.new_cache(capacity=16, batch=batch)
    tokens = torch.arange(1, 1 + 6 * batch).view(batch, 6)
    with torch.inference_mode():
        adapter.prefill(tokens, cache)
        return adapter.forward(tokens + 20, layout, cache)[1]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_tree_logits_are_those_of_the_plain_model(kind, dtype, batch):
    plain, fused = make(kind, dtype), optimize(make(kind, dtype), linear="packed")
    assert describe(fused).endswith("2 decoder layers fused")
    exact = tree_logits(make(kind), batch)
    plain_error = (tree_logits(plain, batch).float() - exact).abs().max()
    error = (tree_logits(fused, batch).float() - exact).abs().max()
    limit = 1e-5 if dtype == torch.float32 else 1.5 * float(plain_error)
    assert float(error) <= limit


def test_weights_stay_what_and_where_they_are():
    plain, fused = make("llama"), optimize(make("llama"), linear="packed")
    tree_logits(fused)  # merges them
    assert fused.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(fused.state_dict()[name], value), name
    layer = fused.model.layers[0]
    start = layer._fused_parts.weights.qkv.panels.data_ptr()
    assert layer.self_attn.q_proj.packed.panels.data_ptr() == start  # a view, not a second copy
    assert type(layer) is type(plain.model.layers[0])


def test_other_calls_run_transformers_code():
    plain, fused = make("llama"), optimize(make("llama"), linear="packed")
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert_close(fused(tokens).logits, plain(tokens).logits)
    generated = fused.generate(tokens, max_new_tokens=6, do_sample=False)
    assert torch.equal(generated, plain.generate(tokens, max_new_tokens=6, do_sample=False))


def test_new_weights_and_dtypes_reach_the_merged_copies():
    fused = optimize(make("llama"), linear="packed")
    tree_logits(fused)
    other = make("llama")
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    fused.load_state_dict(other.state_dict())
    assert_close(tree_logits(fused), tree_logits(other))
    half = optimize(other.to(torch.bfloat16), linear="packed")
    assert torch.equal(tree_logits(fused.to(torch.bfloat16)), tree_logits(half))


def test_a_copy_is_a_model_of_its_own():
    fused = optimize(make("llama"), linear="packed")
    expected = tree_logits(fused)
    copied = copy.deepcopy(fused)
    fused.load_state_dict({name: torch.zeros_like(value) for name, value in fused.state_dict().items()})
    assert torch.equal(tree_logits(copied), expected)
    assert all(layer.forward.__self__ is layer for layer in copied.model.layers)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"intermediate_size": 100}),  # no whole panels
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 8}),
    ],
)
def test_layers_that_do_not_fit_stay_as_they_are(kind, changes):
    plain, packed = make(kind, **changes), optimize(make(kind, **changes), linear="packed")
    assert not any(map(is_fused, packed.modules()))
    assert not any(map(can_fuse, packed.modules()))
    assert_close(tree_logits(packed), tree_logits(plain))
