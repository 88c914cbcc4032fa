"""Adapter: a tree's logits equal plain forward passes over its paths, for several architectures; refusals."""

from __future__ import annotations

import pytest
import torch
import transformers
from cerberus_decode import Adapter, Decoder, ModelUnsupported
from cerberus_decode.adapter import ATTENTION_NAME
from cerberus_decode.layout import TreeLayout
from decoding_models import HIDDEN, VOCAB, build, fresh_greedy, greedy, prompt, tiny_llama, tree_from_parents

from cerberus_kernels import Tree
from cerberus_kernels.testing import T5, tree_cases


def tree_logits(adapter, prefix, tokens, layout):
    cache = adapter.new_cache(len(prefix) + layout.num_nodes)
    with torch.inference_mode():
        adapter.prefill(torch.tensor([prefix]), cache)
        return adapter.forward(torch.tensor([tokens], dtype=torch.int32), layout, cache)


def path_logits(model, prefix, tokens, tree):
    """Logits of every node from plain forward passes over its root path."""
    paths = tree.paths
    rows = [prefix + [tokens[node] for node in path if node >= 0] for path in paths.tolist()]
    width = max(map(len, rows))
    with torch.inference_mode():
        logits = model(torch.tensor([row + [0] * (width - len(row)) for row in rows]), use_cache=False).logits
    by_node = {}
    for row, path in enumerate(paths.tolist()):
        for depth, node in enumerate(path):
            if node >= 0:
                by_node[node] = logits[row, len(prefix) + depth]
    return torch.stack([by_node[node] for node in range(tree.num_nodes)])


def assert_tree_follows_paths(model, prefix, tree, adapter=None, seed=0):
    adapter = adapter or Adapter(model)
    tokens = prompt(tree.num_nodes, seed=100 + seed)
    _, actual = tree_logits(adapter, prefix, tokens, TreeLayout(tree))
    expected = path_logits(model, prefix, tokens, tree)
    scale = expected.abs().max()
    assert (actual[0] - expected).abs().max() <= 1e-4 * scale


@pytest.fixture(scope="module")
def llama():
    return Adapter(tiny_llama())


@pytest.mark.parametrize("num_nodes", range(1, 66))
def test_every_node_equals_its_root_path(llama, num_nodes):
    for index, (_, parents) in enumerate(tree_cases(num_nodes)):
        assert_tree_follows_paths(llama.model, prompt(6), tree_from_parents(parents), llama, seed=index)


@pytest.mark.parametrize(("parents", "prefix"), [(T5, 6), ([-1, 0, 0, 0] + [1] * 9, 1)])
def test_msk03_positions_follow_depth(llama, parents, prefix):
    tree = tree_from_parents(parents)
    seen = []
    rotary = llama.model.model.rotary_emb
    hook = rotary.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    try:
        tree_logits(llama, prompt(prefix), prompt(len(parents)), TreeLayout(tree))
    finally:
        hook.remove()
    depths = [0, 1, 1, 2, 2] if prefix == 6 else [0, 1, 1, 1] + [2] * 9
    assert seen[-1].tolist() == [[prefix + depth for depth in depths]]
    assert_tree_follows_paths(llama.model, prompt(prefix), tree, llama)


def test_msk04_root_only(llama):
    layout = TreeLayout(Tree.from_choices([]))
    assert layout.mask.tolist() == [[1]]
    assert layout.depths.tolist() == [0]
    assert_tree_follows_paths(llama.model, prompt(9), Tree.from_choices([]), llama)


def test_stale_slots_are_never_read(llama):
    layout = TreeLayout(Tree.from_choices([(0,), (1,), (0, 0)]))
    tokens = torch.tensor([[4, 5, 6, 7]])
    results = []
    for poison in (0.0, float("nan")):
        cache = llama.new_cache(40)
        cache.keys.fill_(poison)
        cache.values.fill_(poison)
        with torch.inference_mode():
            llama.prefill(torch.tensor([prompt(9)]), cache)
            results.append(llama.forward(tokens, layout, cache)[1])
    assert torch.equal(results[0], results[1])


def test_prefill_in_chunks_equals_one_pass(llama, monkeypatch):
    ids = torch.tensor([prompt(75)])
    whole, parts = llama.new_cache(75), llama.new_cache(75)
    with torch.inference_mode():
        hidden, logits = llama.prefill(ids, whole)
        monkeypatch.setattr("cerberus_decode.adapter.PREFILL_CHUNK", 32)
        chunked_hidden, chunked_logits = llama.prefill(ids, parts)
        expected = llama.model(ids, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chunked_logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chunked_hidden, hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts.keys, whole.keys, rtol=1e-4, atol=1e-4)
    assert parts.lengths == [75]
    assert hidden.shape == (1, 1, HIDDEN)


def test_hidden_states_are_the_output_projections_input(llama):
    hidden, logits = tree_logits(llama, prompt(5), prompt(5), TreeLayout(tree_from_parents(T5)))
    with torch.inference_mode():
        torch.testing.assert_close(llama.model.lm_head(hidden), logits)


def test_dec08_minus_one_is_never_embedded(llama):
    tree = tree_from_parents(T5)
    layout = TreeLayout(tree)
    cache = llama.new_cache(20)
    valid = torch.tensor([[True, True, False, True, False]])
    with torch.inference_mode():
        llama.prefill(torch.tensor([prompt(3)]), cache)
        _, padded = llama.forward(torch.tensor([[7, 3, -1, 9, -1]]), layout, cache, valid=valid)
        _, full = llama.forward(torch.tensor([[7, 3, 60, 9, 61]]), layout, cache)
        assert torch.equal(padded[:, [0, 1, 3]], full[:, [0, 1, 3]])
        with pytest.raises(ValueError, match=r"tokens must be in \[0, 97\), got -1"):
            llama.forward(torch.tensor([[7, 3, -1, 9, -1]]), layout, cache)
        with pytest.raises(ValueError, match=r"tokens must be in \[0, 97\), got -1"):
            llama.forward(torch.tensor([[7, -1, -1, 9, -1]]), layout, cache, valid=valid)


def test_the_model_stays_usable_in_between():
    model = build(transformers.LlamaConfig, transformers.LlamaForCausalLM)
    ids = prompt(7)
    before, name = greedy(model, ids, 8), model.config._attn_implementation
    decoder = Decoder(model)
    generation = decoder.stream(ids, max_new_tokens=8)
    for _ in range(4):
        next(generation)
    assert model.config._attn_implementation == name != ATTENTION_NAME
    assert fresh_greedy(model, ids, 8) == before
    assert not model.lm_head._forward_pre_hooks
    list(generation)
    assert generation.tokens == before


WINDOW = {"sliding_window": 8}
ARCHITECTURES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen2_window": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral_window": (transformers.MistralConfig, transformers.MistralForCausalLM, WINDOW),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, WINDOW | {"head_dim": 16}),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM, {"logits_scaling": 4.0}),
    "gpt2": (
        transformers.GPT2Config,
        transformers.GPT2LMHeadModel,
        {"num_key_value_heads": 4, "n_embd": HIDDEN, "n_head": 4, "n_layer": 2, "n_positions": 256},
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kv09_architectures(name):
    config_class, model_class, overrides = ARCHITECTURES[name]
    model = build(config_class, model_class, **overrides)
    adapter = Adapter(model)
    for prefix in (3, 21):
        for _, parents in tree_cases(26):
            assert_tree_follows_paths(model, prompt(prefix), tree_from_parents(parents), adapter)
    ids = prompt(11)
    assert Decoder(adapter).generate(ids, max_new_tokens=24).tokens == greedy(model, ids, 24)


def test_models_without_the_attention_interface_are_refused():
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4)
    ).eval()
    with pytest.raises(ModelUnsupported, match="MambaForCausalLM does not use transformers' attention interface"):
        Adapter(mamba)
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, decoder_ffn_dim=32,
                                encoder_ffn_dim=32, decoder_attention_heads=2, encoder_attention_heads=2)
    ).eval()  # fmt: skip
    with pytest.raises(ModelUnsupported, match="decoder-only causal LM"):
        Adapter(bart)
    with pytest.raises(ModelUnsupported, match="PreTrainedModel, got Linear"):
        Adapter(torch.nn.Linear(2, 2))
    with pytest.raises(ModelUnsupported, match="eval mode"):
        Adapter(build(transformers.LlamaConfig, transformers.LlamaForCausalLM).train())


def test_a_model_that_ignores_the_tree_is_refused_by_name():
    model = build(transformers.LlamaConfig, transformers.LlamaForCausalLM)
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def own_attention(*args, **kwargs):
        attention.config = plain_config
        kwargs.pop("cerberus_context", None)
        return inner(*args, **kwargs)

    plain_config = type(model.config)(**model.config.to_dict())
    plain_config._attn_implementation = "sdpa"
    attention.forward = own_attention
    with pytest.raises(ModelUnsupported, match=r"LlamaForCausalLM does not use .* in 1 of 2 layers"):
        Adapter(model)


def test_a_model_with_positions_of_its_own_is_refused():
    model = build(transformers.LlamaConfig, transformers.LlamaForCausalLM)
    rotary = model.model.rotary_emb
    inner = rotary.forward
    rotary.forward = lambda x, position_ids: inner(x, torch.arange(x.shape[1]).unsqueeze(0))
    with pytest.raises(ModelUnsupported, match="LlamaForCausalLM does not follow the tree: its logits differ"):
        Adapter(model)


def test_attention_sinks_are_refused():
    config = transformers.GptOssConfig(**(SHAPE_FOR_SINKS | {"layer_types": ["full_attention"]}))
    with pytest.raises(ModelUnsupported, match="attention sinks"):
        Adapter(transformers.GptOssForCausalLM(config).eval())


SHAPE_FOR_SINKS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
