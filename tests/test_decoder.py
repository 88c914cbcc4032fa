"""Decoder: greedy text equals plain decoding for every tree, state of cache and heads, reuse, refusals."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from cerberus_decode import Adapter, AutoRegressive, Decoder, FixedTree, Gated, Policy
from cerberus_decode.compare import first_difference, row_count_noise
from decoding_models import (
    TREE,
    VOCAB,
    OracleHeads,
    build,
    greedy,
    prompt,
    random_heads,
    run_oracle,
    tiny_llama,
    tree_from_parents,
)

from cerberus_kernels.testing.trees import binary, chain, random_parents, star

INFINITY = float("inf")


@pytest.fixture(scope="module")
def adapter():
    return Adapter(tiny_llama())


def oracle_decoder(adapter, ids, length, policy=None, **kwargs):
    text = ids + greedy(adapter.model, ids, length)
    return Decoder(adapter, OracleHeads(text, **kwargs), policy)


@pytest.mark.parametrize("policy", [AutoRegressive(), FixedTree(), FixedTree(size=5), Gated(threshold=2.0)])
@pytest.mark.parametrize("heads", ["random", "oracle"])
def test_greedy_equals_transformers(adapter, policy, heads):
    for length in (1, 8, 31):
        ids = prompt(length, seed=length)
        expected = greedy(adapter.model, ids, 40)
        if heads == "random":
            decoder = Decoder(adapter, random_heads(), policy)
            result = decoder.generate(ids, max_new_tokens=40)
        else:
            decoder = oracle_decoder(adapter, ids, 44, policy)
            result, _ = run_oracle(decoder, ids, max_new_tokens=40)
        assert result.tokens == expected
        assert result.finish_reason == "length"


@pytest.mark.parametrize("size", [1, 2, 5, 26, 32, 33, 63, 64, 65])
def test_dec06_every_tree_gives_the_same_text(adapter, size):
    shapes = [binary(size), random_parents(size, 3), star(min(size, 40)), chain(min(size, 8))]
    for index, parents in enumerate(shapes):
        choices = tree_from_parents(parents).choices
        ids = prompt(9, seed=index)
        decoder = oracle_decoder(adapter, ids, 60, FixedTree(choices=choices), num_heads=20)
        result, _ = run_oracle(decoder, ids, max_new_tokens=40)
        assert result.tokens == greedy(adapter.model, ids, 40)


def test_dec06_bf16_differs_only_within_the_models_own_noise():
    adapter = Adapter(build(transformers.LlamaConfig, transformers.LlamaForCausalLM).to(torch.bfloat16))
    plain = Decoder(adapter)
    accepted = 0
    for seed in range(6):
        ids = prompt(9, seed)
        expected = plain.generate(ids, max_new_tokens=36).tokens
        for size in (5, 26, 63):
            choices = tree_from_parents(random_parents(size, seed)).choices
            decoder = Decoder(adapter, OracleHeads(ids + expected, num_heads=20), FixedTree(choices=choices))
            result, _ = run_oracle(decoder, ids, max_new_tokens=32)
            accepted += result.metrics.accepted
            position = first_difference(expected[:32], result.tokens)
            if position is not None:
                gaps, noise = row_count_noise(adapter, ids, expected[:32], size)
                assert gaps[position] <= noise
    assert accepted > 100


@pytest.mark.parametrize("size", range(21))
@pytest.mark.parametrize("num_candidates", [1, 4, 12])
def test_cli02_every_draft_size(adapter, size, num_candidates):
    choices = [(rank,) for rank in range(num_candidates)] + [(0,) * depth for depth in (2, 3, 4)]
    choices += [(rank, other) for rank in range(1, num_candidates) for other in range(2)][:20]
    choices = choices[:size] if num_candidates > 1 else choices[: min(size, 4)]
    tree = FixedTree(choices=tuple(choices)) if choices else FixedTree(size=0)
    ids = prompt(5)
    assert Decoder(adapter, random_heads(), tree).generate(ids, max_new_tokens=16).tokens == greedy(
        adapter.model, ids, 16
    )


def test_msk06_a_chain_accepts_what_its_tree_accepts(adapter):
    ids = prompt(7)
    runs = []
    for choices in (((0,), (0, 0), (0, 0, 0)), TREE):
        decoder = oracle_decoder(adapter, ids, 40, FixedTree(choices=choices), num_heads=3 if len(choices) == 3 else 4)
        result, steps = run_oracle(decoder, ids, max_new_tokens=30)
        runs.append((result.tokens, max(len(step.tokens) for step in steps)))
    assert runs[0][0] == runs[1][0]
    assert [longest for _, longest in runs] == [4, 5]
    layout = decoder.layout(0, 0)
    assert layout.mask.tolist() == [[1]]


def test_gate_at_minus_infinity_is_plain_decoding(adapter):
    ids = prompt(12)

    class Untouchable(OracleHeads):
        def propose(self, *args, **kwargs):
            raise AssertionError("the heads ran behind a closed gate")

    heads = Untouchable(ids)
    closed = Decoder(adapter, heads, Gated(threshold=-INFINITY)).generate(ids, max_new_tokens=30)
    plain = Decoder(adapter).generate(ids, max_new_tokens=30)
    assert closed.tokens == plain.tokens
    assert closed.metrics.steps == plain.metrics.steps == 30
    assert closed.metrics.proposed == closed.metrics.open_steps == 0
    assert closed.metrics.gate_open_share == 0.0


def test_gate_at_infinity_is_the_fixed_tree(adapter):
    ids = prompt(12)
    runs = []
    for policy in (FixedTree(), Gated(threshold=INFINITY)):
        decoder = oracle_decoder(adapter, ids, 40, policy, right=lambda call: call % 5)
        result, steps = run_oracle(decoder, ids, max_new_tokens=30)
        runs.append([(step.tokens, step.num_accepted, step.num_proposed) for step in steps])
        assert result.metrics.gate_open_share == 1.0
    assert runs[0] == runs[1]


class Pattern(Policy):
    """Drafts the given numbers of nodes in turn."""

    def __init__(self, sizes, choices=TREE):
        self.sizes = list(sizes)
        self.choices = choices
        self.asked = 0

    def num_drafts(self, hidden, entropy):
        self.asked += 1
        return self.sizes[(self.asked - 1) % len(self.sizes)]


def test_gat03_proposals_after_closed_steps_are_fresh(adapter):
    ids = prompt(10)
    heads = random_heads()
    decoder = Decoder(adapter, heads, Pattern([12, 0, 0, 0, 0, 0, 12, 0, 12]))
    bound, calls = decoder.heads, []
    propose = bound.propose

    def record(hidden, root, k=None):
        tokens, log_probs = propose(hidden, root, k)
        calls.append((len(generation.tokens), tokens))
        return tokens, log_probs

    bound.propose = record
    generation = decoder.stream(ids, max_new_tokens=30)
    list(generation)
    assert generation.tokens == greedy(adapter.model, ids, 30)
    assert len(calls) >= 4
    for count, tokens in calls:
        text = ids + generation.tokens[: count - 1]
        with torch.inference_mode():
            hidden, _ = adapter.prefill(torch.tensor([text]), adapter.new_cache(len(text)))
            fresh, _ = propose(hidden[:, -1], torch.tensor([generation.tokens[count - 1]]), tokens.shape[-1])
        assert torch.equal(tokens, fresh)


def test_gat04_tree_sizes_change_between_steps(adapter):
    choices = tree_from_parents(random_parents(64, 5)).choices
    ids = prompt(10)
    text = ids + greedy(adapter.model, ids, 80)
    heads = OracleHeads(text, num_heads=20)
    decoder = Decoder(adapter, heads, Pattern([63, 5, 1, 13, 63], choices))
    generation = decoder.stream(ids, max_new_tokens=40)
    heads.generation = generation
    for step in generation:
        length = generation.cache.lengths[0]
        generation.cache.keys[:, :, length:] = float("nan")
        generation.cache.values[:, :, length:] = float("nan")
        assert step.tokens
    assert generation.tokens == text[10:50]
    assert {63, 5, 1, 13} >= {len(call.tokens[0]) for call in heads.calls} - {20}


@pytest.mark.parametrize(("path", "node"), [([0, 2, 4], 4), ([0], 0)])
def test_hed01_heads_read_the_last_accepted_node(adapter, monkeypatch, path, node):
    t5 = ((0,), (1,), (0, 0), (1, 0))
    ids = prompt(6)
    text = ids + greedy(adapter.model, ids, 20)

    class SecondBranch(OracleHeads):
        def propose(self, hidden, root, k=10):
            tokens, log_probs = super().propose(hidden, root, k)
            if len(path) == 1:
                return (tokens + 5) % VOCAB, log_probs
            tokens[:, 0] = (tokens[:, 0] - torch.arange(k)).roll(1, -1) + torch.tensor([3] + [0] * (k - 1))
            return tokens % VOCAB, log_probs

    heads = SecondBranch(text, num_heads=2)
    decoder = Decoder(adapter, heads, FixedTree(choices=t5))
    forward = adapter.forward

    def distinct(tokens, layout, cache, valid=None):
        hidden, logits = forward(tokens, layout, cache, valid)
        return torch.arange(hidden.shape[1]).view(1, -1, 1).expand_as(hidden).float(), logits

    monkeypatch.setattr(adapter, "forward", distinct)
    generation = decoder.stream(ids, max_new_tokens=12)
    heads.generation = generation
    next(generation)
    step = next(generation)
    assert step.num_accepted == len(path) - 1
    next(generation)
    assert heads.calls[1].hidden.unique().tolist() == [float(node)]


@pytest.mark.parametrize("depth", [1, 4])
def test_kv04_cache_is_a_fresh_prefill_of_the_text(adapter, depth):
    ids = prompt(13)
    right = lambda call: 0 if call == 10 else 4  # noqa: E731
    choices = tuple((0,) * (d + 1) for d in range(depth))
    decoder = oracle_decoder(adapter, ids, 90, FixedTree(choices=choices), right=right)
    generation = decoder.stream(ids, max_new_tokens=80)
    decoder.heads.generation = generation
    accepted = []
    for index, step in enumerate(generation):
        accepted.append(step.num_accepted)
        text = ids + generation.tokens
        assert generation.cache.lengths == [len(text) - 1]
        fresh = adapter.new_cache(len(text) - 1)
        with torch.inference_mode():
            adapter.prefill(torch.tensor([text[:-1]]), fresh)
        for layer in range(adapter.num_layers):
            for mine, theirs in zip(generation.cache.committed(layer), fresh.committed(layer), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        if index == 12:
            break
    assert accepted == [0] + [depth] * 10 + [0] + [depth]


def test_kv05_a_rejected_step_leaves_the_prefix_alone(adapter):
    ids = prompt(40)
    decoder = oracle_decoder(adapter, ids, 10, right=lambda call: 0)
    generation = decoder.stream(ids, max_new_tokens=8)
    decoder.heads.generation = generation
    next(generation)
    assert generation.cache.lengths == [40]
    before = generation.cache.keys[:, :, :40].clone()
    assert next(generation).num_accepted == 0
    assert generation.cache.lengths == [41]
    assert generation.cache.prefix_lens.tolist() == [41]
    assert torch.equal(generation.cache.keys[:, :, :40], before)


def test_kv10_objects_are_reusable_and_independent(adapter):
    prompts = [prompt(31, 1), prompt(8, 2), prompt(31, 1)]
    decoder = Decoder(adapter, random_heads())
    expected = [greedy(adapter.model, ids, 20) for ids in prompts]
    assert [decoder.generate(ids, max_new_tokens=20).tokens for ids in prompts] == expected
    other = Decoder(adapter.model, random_heads(seed=1), Gated(threshold=2.0))
    running = [decoder.stream(prompts[0], max_new_tokens=20), other.stream(prompts[1], max_new_tokens=20)]
    running.append(decoder.stream(prompts[1], max_new_tokens=20))
    abandoned = decoder.stream(prompts[1], max_new_tokens=20)
    next(abandoned)
    del abandoned
    while any(not generation.finish_reason for generation in running):
        for generation in running:
            next(generation, None)
    assert [generation.tokens for generation in running] == [expected[0], expected[1], expected[1]]


def test_typical_with_zero_temperature_is_greedy(adapter):
    ids = prompt(9)
    decoder = oracle_decoder(adapter, ids, 40)
    result, _ = run_oracle(decoder, ids, max_new_tokens=30, mode="typical", temperature=0.0)
    assert result.tokens == greedy(adapter.model, ids, 30)


def test_typical_is_reproducible_and_stays_in_the_vocabulary(adapter):
    ids = prompt(9)
    decoder = Decoder(adapter, random_heads())
    runs = [
        decoder.generate(ids, max_new_tokens=40, mode="typical", temperature=1.5, seed=seed).tokens
        for seed in (7, 7, 8)
    ]
    assert runs[0] == runs[1]
    assert all(0 <= token < VOCAB for tokens in runs for token in tokens)
    assert [len(tokens) for tokens in runs] == [40] * 3


def test_dec05_prompts(adapter):
    ids = prompt(9)
    decoder = Decoder(adapter)
    expected = decoder.generate(ids, max_new_tokens=5).tokens
    assert decoder.generate(torch.tensor(ids), max_new_tokens=5).tokens == expected
    assert decoder.generate(torch.tensor([ids], dtype=torch.int32), max_new_tokens=5).tokens == expected
    with pytest.raises(ValueError, match=r"ids must be one sequence, .* \(batch 1 only\), got shape \[2, 9\]"):
        decoder.generate(torch.tensor([ids, ids]))
    with pytest.raises(ValueError, match="ids must be at least one token long"):
        decoder.generate([])
    with pytest.raises(ValueError, match=r"ids must be in \[0, 97\), got 97"):
        decoder.generate([3, 97])
    with pytest.raises(ValueError, match=r"ids must be in \[0, 97\), got -1"):
        decoder.generate([3, -1])
    with pytest.raises(ValueError, match="ids must be of an integer dtype, got float32"):
        decoder.generate(torch.rand(5))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"repetition_penalty": 1.3}, "repetition_penalty must be absent .* got 1.3"),
        ({"min_new_tokens": 8}, "min_new_tokens must be absent .* got 8"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values must be absent .* got DynamicCache"),
        ({"cache_implementation": "static"}, "cache_implementation must be absent .* got static"),
        ({"past_key_values": ((1, 2),)}, "past_key_values must be absent .* got tuple"),
        ({"num_beams": 4}, "num_beams must be absent .no such option., got 4"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer >= 0, got -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer >= 0, got 1.5"),
        ({"mode": "beam"}, "mode must be one of greedy, typical, sample, got 'beam'"),
        ({"temperature": -0.1}, "temperature must be finite and >= 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite and >= 0, got nan"),
    ],
)
def test_ver17_kv09_options_are_refused_in_words(adapter, option, message):
    with pytest.raises(ValueError, match="generate: " + message):
        Decoder(adapter).generate([1, 2], **option)


def test_ver17_a_models_own_rules_are_not_ignored_in_silence():
    model = build(transformers.LlamaConfig, transformers.LlamaForCausalLM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder(model)
    model.generation_config.repetition_penalty = 1.3
    with pytest.warns(UserWarning, match="repetition_penalty: not applied"):
        Decoder(model)


def test_policies_need_fitting_heads(adapter):
    with pytest.raises(ValueError, match="Decoder: heads must be given for FixedTree, got None"):
        Decoder(adapter, policy=FixedTree(choices=((0,),)))
    with pytest.raises(ValueError, match=r"policy must be a tree at most 4 deep \(the heads\), got 5"):
        Decoder(adapter, random_heads(), FixedTree(choices=tuple((0,) * (d + 1) for d in range(5))))
