"""optimize: same results, same state_dict, weights freed or kept as they should, and a choice that can be seen."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from cerberus_decode.optimize import LinearChoice, PackedLinear, choose_linear, describe, optimize
from torch import nn

from cerberus_kernels.testing import assert_close, tolerance


def llama(dtype=torch.float32, tied=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=not tied,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def logits(model, rows=7):
    tokens = torch.arange(3, 3 + rows)[None]
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_and_state_dict_stay(dtype, tied):
    model = llama(dtype, tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exact = logits(copy.deepcopy(model).float()) if dtype != torch.float32 else logits(model)
    plain_error = (logits(model).float() - exact).abs().max()
    assert optimize(model, linear="packed") is model
    assert describe(model) == "15 linear layers packed"
    # No further from the fp32 model's logits than the plain model of that dtype, up to one rounding.
    error = (logits(model).float() - exact).abs().max()
    assert error <= 1.5 * plain_error + tolerance(dtype)["atol"]
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
        assert after[name].dtype == dtype


def test_tied_weight_stays_shared_and_untied_is_freed():
    tied = optimize(llama(tied=True), linear="packed")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    tied.tie_weights()
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    untied = optimize(llama(tied=False), linear="packed")
    names = {name for name, _ in untied.named_parameters()}
    assert not any(name.endswith(("proj.weight", "lm_head.weight")) for name in names)
    assert "model.embed_tokens.weight" in names
    assert untied.lm_head.weight.shape == (131, 64)


def test_a_second_call_changes_nothing():
    model = optimize(llama(), linear="packed")
    modules = list(model.modules())
    expected = logits(model)
    optimize(model, linear="packed")
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_load_state_dict_repacks(tied):
    model = optimize(llama(tied=tied), linear="packed")
    source = llama(tied=tied)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.25)
    model.load_state_dict(source.state_dict())
    assert_close(logits(model), logits(source))
    broken = source.state_dict()
    del broken["model.layers.0.mlp.up_proj.weight"]
    broken["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 3)
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key.*layers.0.mlp.up_proj.weight.*size mismatch for model.layers.1"
    ):
        model.load_state_dict(broken)


@pytest.mark.parametrize("tied", [True, False])
def test_conversion_and_copy_keep_the_meaning(tied):
    source = llama(torch.bfloat16, tied)
    model = optimize(copy.deepcopy(source), linear="packed")
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    model.float()
    assert_close(logits(model), logits(source.float()))


def test_only_plain_linear_layers_are_replaced():
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict({"plain": nn.Linear(4, 3), "special": Special(4, 3), "fp64": nn.Linear(4, 3).double()})
    model["again"] = model["plain"]
    optimize(model, linear="packed")
    assert isinstance(model["plain"], PackedLinear)
    assert model["again"] is model["plain"]
    assert type(model["special"]) is Special
    assert type(model["fp64"]) is nn.Linear


def test_the_measured_choice_decides(monkeypatch):
    slow = LinearChoice("torch", {1: 2.0}, {1: 1.0}, "float32: packed_linear is slower here")
    monkeypatch.setattr(sys.modules["cerberus_decode.optimize"], "choose_linear", lambda dtype: slow)
    model = optimize(llama())
    assert type(model.lm_head) is nn.Linear
    assert describe(model) == "left as it is: float32: packed_linear is slower here"
    optimize(model, linear="packed")
    assert isinstance(model.lm_head, PackedLinear)


def test_choose_linear_measures_once():
    choice = choose_linear(torch.float32)
    assert choice is choose_linear(torch.float32)
    assert set(choice.packed_ms) == set(choice.torch_ms) == {1, 16}
    assert choice.method in ("packed", "torch")
    assert "at 16 rows" in choice.reason


def test_refusals():
    with pytest.raises(ValueError, match="optimize: linear must be one of auto, packed, torch, got 'fast'"):
        optimize(nn.Linear(2, 2), linear="fast")
    with pytest.raises(ValueError, match="optimize: model must be on cpu, got meta"):
        optimize(nn.Sequential(nn.Linear(2, 2, device="meta")), linear="packed")
