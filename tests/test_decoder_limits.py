"""Where a generation ends: end tokens inside a block, token counts, the context's end; and what the metrics say."""

from __future__ import annotations

import pytest
import torch
import transformers
from cerberus_decode import Adapter, AutoRegressive, Decoder, FixedTree, Gated, Metrics
from decoding_models import OracleHeads, build, greedy, prompt, random_heads, run_oracle, tiny_llama

CHAIN5 = tuple((0,) * (depth + 1) for depth in range(5))


@pytest.fixture(scope="module")
def adapter():
    return Adapter(tiny_llama())


def all_accepted(adapter, ids, length=40, choices=CHAIN5, right=None):
    text = ids + greedy(adapter.model, ids, length)
    return Decoder(adapter, OracleHeads(text, num_heads=5, right=right), FixedTree(choices=choices))


def distinct_prompt(adapter) -> tuple[list[int], list[int]]:
    """A prompt whose first 12 greedy tokens are all different."""
    for seed in range(200):
        ids = prompt(7, seed)
        tokens = greedy(adapter.model, ids, 12)
        if len(set(tokens)) == 12:
            return ids, tokens
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("place", range(1, 9))
def test_dec01_an_end_token_inside_a_block_ends_the_text(adapter, place):
    ids, tokens = distinct_prompt(adapter)
    end = tokens[place - 1]
    for eos in (end, [tokens[10], end], torch.tensor([end]).tolist()):
        decoder = all_accepted(adapter, ids)
        generation = decoder.stream(ids, max_new_tokens=12, eos_token_id=eos)
        decoder.heads.generation = generation
        steps = list(generation)
        assert generation.tokens == tokens[:place] == greedy(adapter.model, ids, 12, eos_token_id=end)
        assert generation.finish_reason == "eos"
        assert generation.cache.lengths == [len(ids) + place - 1]
        assert sum(len(step.tokens) for step in steps) == generation.metrics.tokens == place
        assert next(generation, None) is None


def test_end_tokens_come_from_the_model_unless_given():
    model = build(transformers.LlamaConfig, transformers.LlamaForCausalLM)
    ids = prompt(7)
    tokens = greedy(model, ids, 12)
    model.generation_config.eos_token_id = [tokens[4]]
    decoder = Decoder(model)
    first = tokens.index(tokens[4])
    assert decoder.generate(ids, max_new_tokens=12).tokens == tokens[: first + 1]
    assert decoder.generate(ids, max_new_tokens=12, eos_token_id=()).tokens == tokens


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_dec02_exactly_as_many_tokens_as_asked(adapter, count):
    ids = prompt(7)
    decoder = all_accepted(adapter, ids)
    result, steps = run_oracle(decoder, ids, max_new_tokens=count)
    assert result.tokens == greedy(adapter.model, ids, 7)[:count]
    assert result.finish_reason == "length"
    assert result.metrics.tokens == count
    assert result.metrics.steps == len(steps) == (0 if count == 0 else 1 if count == 1 else 2 if count < 8 else 3)


@pytest.mark.parametrize("policy", [AutoRegressive(), FixedTree(), Gated(threshold=float("inf"))])
def test_kv06_a_full_cache_shrinks_the_tree(adapter, policy):
    ids = prompt(60)
    tree = FixedTree(choices=((0,), (0, 0), (1,), (0, 0, 0), *((rank,) for rank in range(2, 12)), (0, 0, 0, 0)))
    if isinstance(policy, FixedTree):
        policy = tree
    decoder = Decoder(adapter, random_heads(), policy)
    for asked, reason in ((4, "length"), (50, "context")):
        generation = decoder.stream(ids, max_new_tokens=asked, capacity=64)
        list(generation)
        assert generation.cache.capacity == 64
        assert generation.tokens == greedy(adapter.model, ids, 4)
        assert generation.finish_reason == reason


def test_kv06_every_draft_is_right_at_the_end_of_the_cache(adapter):
    ids = prompt(60)
    decoder = all_accepted(adapter, ids)
    result, _ = run_oracle(decoder, ids, max_new_tokens=50, capacity=67)
    assert result.tokens == greedy(adapter.model, ids, 7)
    with pytest.raises(ValueError, match=r"ids must be at most 59 tokens long \(the cache slots\), got 60"):
        decoder.generate(ids, capacity=59)


def test_kv06_positions_stay_inside_the_rotary_table():
    model = build(transformers.LlamaConfig, transformers.LlamaForCausalLM, max_position_embeddings=64)
    adapter = Adapter(model)
    ids = prompt(62)
    seen = []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    decoder = all_accepted(adapter, ids, length=2)
    seen.clear()
    result, _ = run_oracle(decoder, ids, max_new_tokens=50)
    assert result.tokens == greedy(model, ids, 2)
    assert result.finish_reason == "context"
    assert max(seen) < 64
    assert Decoder(adapter).generate(prompt(64), max_new_tokens=5).tokens == []
    with pytest.raises(ValueError, match=r"ids must be at most 64 tokens long \(the positions\), got 65"):
        Decoder(adapter).generate(prompt(65))


def test_dec09_known_accepts(adapter):
    ids = prompt(7)
    accepts = [2, 4]
    decoder = all_accepted(adapter, ids, choices=CHAIN5[:4], right=lambda call: accepts[call])
    result, steps = run_oracle(decoder, ids, max_new_tokens=9)
    metrics = result.metrics
    assert [step.num_accepted for step in steps] == [0, 2, 4]
    assert metrics.accepted_per_step == 2.0
    assert metrics.tokens_per_step == 3.0
    assert metrics.tokens == len(result.tokens) == metrics.accepted + metrics.own_tokens == 9
    assert metrics.proposed == 8
    assert metrics.acceptance == 0.75
    assert metrics.gate_open_share == 1.0


def test_dec09_a_draft_behind_the_cut_is_not_accepted(adapter):
    ids, tokens = distinct_prompt(adapter)
    decoder = all_accepted(adapter, ids)
    result, steps = run_oracle(decoder, ids, max_new_tokens=12, eos_token_id=tokens[3])
    assert [(len(step.tokens), step.num_accepted) for step in steps] == [(1, 0), (3, 3)]
    assert result.metrics.accepted == 3
    assert result.metrics.own_tokens == 1
    assert result.metrics.tokens == 4


@pytest.mark.parametrize("policy", [AutoRegressive(), Gated(threshold=-float("inf"))])
def test_gat06_acceptance_is_not_a_number_without_drafts(adapter, policy):
    metrics = Decoder(adapter, random_heads(), policy).generate(prompt(5), max_new_tokens=50).metrics
    assert metrics.proposed == metrics.accepted == metrics.open_steps == 0
    assert metrics.acceptance is None
    assert metrics.tokens_per_step == 1.0
    assert metrics.steps == metrics.tokens == 50
    assert metrics.gated_steps == 48


def test_gat06_some_open_steps(adapter):
    ids = prompt(5)
    entropies = []

    class Watch(Gated):
        def num_drafts(self, hidden, entropy):
            entropies.append(float(entropy))
            return super().num_drafts(hidden, entropy)

    Decoder(adapter, random_heads(), Watch(threshold=-float("inf"))).generate(ids, max_new_tokens=50)
    threshold = sorted(entropies)[5]
    metrics = Decoder(adapter, random_heads(), Gated(threshold=threshold)).generate(ids, max_new_tokens=50).metrics
    assert 0 < metrics.open_steps < metrics.gated_steps
    assert metrics.proposed > 0
    assert metrics.acceptance == metrics.accepted / metrics.proposed


def test_times_add_up(adapter):
    metrics = Decoder(adapter, random_heads()).generate(prompt(5), max_new_tokens=20).metrics
    parts = metrics.draft_s, metrics.forward_s, metrics.verify_s, metrics.commit_s, metrics.other_s
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(metrics.total_s)
    assert metrics.prefill_s < metrics.forward_s
    assert metrics.tokens_per_second == metrics.tokens / metrics.total_s


def test_metrics_add_up():
    total = Metrics(tokens=4, steps=2, proposed=3) + Metrics(tokens=5, steps=4, total_s=1.0)
    assert (total.tokens, total.steps, total.proposed, total.total_s) == (9, 6, 3, 1.0)
    assert Metrics().tokens_per_step is None
    assert Metrics().gate_open_share is None
    assert sum([total, total], Metrics()).tokens == 18
