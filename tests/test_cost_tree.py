"""Trees from what is likely and what it costs: candidates, context matches, calibration, and the text they give."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from cerberus_decode.context import ContextMatcher, agreement
from cerberus_decode.cost_tree import CostTree, HeadGains, Limits, add_grown
from cerberus_decode.costs import CostTable
from cerberus_decode.decode import Decoder
from cerberus_decode.drafting import MOST_CERTAIN, Candidates, best_count, calibrated
from cerberus_decode.heads import DraftHeads, DraftState
from cerberus_decode.policy import FixedTree
from cerberus_decode.sequence_layer import SequenceConfig
from decoding_models import HIDDEN, greedy, prompt, random_heads, tiny_llama

FLAT = CostTable({1: 1.0, 64: 1.0})


def brute_force_match(text, longest, depth):
    """The definition: longest run that ends the text and stands earlier, the latest place; goes on with itself."""
    for length in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                chain = list(text)
                for step in range(depth):
                    chain.append(chain[end + step])
                return length, chain[len(text) :]
    return None


@pytest.mark.parametrize("seed", range(20))
def test_matches_are_the_longest_and_latest(seed):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, (40,), generator=generator).tolist()
    matcher = ContextMatcher(longest=5)
    for end, token in enumerate(text, start=1):
        matcher.extend([token])
        expected = brute_force_match(text[:end], 5, 6)
        assert matcher.matches(6) == ([expected] if expected else [])


def test_several_matches_begin_differently():
    matcher = ContextMatcher()
    matcher.extend([1, 2, 7, 1, 2, 8, 2, 9, 1, 2])
    assert matcher.matches(1, count=4) == [(2, [8]), (2, [7]), (1, [9])]


def test_agreement_grows_with_the_run():
    assert agreement(1, 4) == [*agreement(1, 1), *agreement(2, 3)]
    assert all(a <= b for a, b in itertools.pairwise(agreement(1, 30)))
    assert agreement(10**6, 1)[0] < 1


def test_candidates_share_nodes_and_keep_parents_first():
    found = Candidates()
    found.add_chain([5, 6, 7], [0.5, 0.5, 0.5])
    found.add_chain([5, 8], [0.4, 0.9])
    found.add_chain([9], [0.45])
    order = found.best_first()
    tree = found.tree(4, order[:4])
    assert [found.token[node] for node in order] == [5, 9, 8, 6, 7]
    assert found.probability[order[2]] == pytest.approx(0.45)  # 0.9 of the surer 0.5
    assert tree.tokens.tolist() == [[4, 5, 9, 8, 6]]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2]
    assert tree.max_depth == 2
    assert tree.mask.flatten().tolist() == [1, 3, 5, 11, 19]


def test_a_child_promises_no_more_than_its_parent():
    found = Candidates()
    parent = found.add(-1, 1, 0.3)
    assert found.probability[found.add(parent, 2, 0.9)] == 0.3


def test_the_likeliest_paths_of_the_heads_are_added():
    log_probs = torch.tensor([[[0.6, 0.3], [0.5, 0.4]]]).log()
    found = Candidates()
    add_grown(found, [[10, 11], [20, 21]], log_probs, 4)
    order = found.best_first()
    paths = [(found.parent[node], found.token[node]) for node in order]
    assert [round(found.probability[node], 3) for node in order] == [0.6, 0.3, 0.3, 0.24]
    assert {token for _, token in paths} == {10, 11, 20, 21}


def test_best_count_weighs_gain_against_cost():
    assert best_count([0.5, 0.4, 0.05], lambda n: 1 + 0.2 * n) == 2
    assert best_count([0.5, 0.4], lambda n: 1 + 2.0 * n) == 0
    assert best_count([], lambda n: 1.0) == 0


def test_calibration_is_per_head_and_never_certain():
    log_probs = torch.tensor([[[-1.0, -2.0], [0.0, -1.0]]])
    found = calibrated(log_probs, [(0.5, 2.0), (1.0, 1.0)])
    assert torch.equal(found[0, 0], torch.tensor([-1.5, -3.5]))
    assert found[0, 1].tolist() == pytest.approx([math.log(MOST_CERTAIN)] * 2)
    assert torch.equal(calibrated(log_probs[:, :1], ()), log_probs[:, :1])


def test_head_gains_pick_the_bin_and_the_size():
    calibration = {"edges": [0.0, 1.0, 9.0], "accepted": {"4": [0.9, 0.1], "8": [1.5, 0.2], "99": [9.0, 9.0]}}
    gains = HeadGains.of(calibration, CostTable({1: 1.0, 5: 1.0, 9: 2.0, 100: 2.0}), most=48)
    assert gains.best_rate(0.5, 0.0) == pytest.approx(1.9)
    assert gains.best_rate(3.0, 0.0) == pytest.approx(1.1)
    assert gains.best_rate(3.0, 1.0) == pytest.approx(2.0)


class FixedHeads:
    """Heads that always propose the same; counts how often they were asked."""

    sequence = None

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, hidden, root, k=None):
        self.calls += 1
        return torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[0.7, 0.2], [0.6, 0.1]]]).log()


def planned(policy, heads, text, limits, entropy=1.0):
    state = DraftState(heads, 8)
    state.observe(torch.zeros(1, 1, 4), torch.tensor([[text[-1]]]))
    matcher = None
    if policy.context:
        matcher = ContextMatcher()
        matcher.extend(text)
    return policy.tree(state, matcher, text[-1], entropy, limits)


def test_limits_bound_depth_and_size():
    policy = CostTree(size=5).resolve(None, lambda: FLAT)
    assert planned(policy, FixedHeads(), [1], Limits(9, 9)).num_nodes == 6
    assert planned(policy, FixedHeads(), [1], Limits(1, 9)).max_depth == 1
    assert planned(policy, FixedHeads(), [1], Limits(9, 2)).num_nodes == 3
    assert planned(CostTree(size=0).resolve(None, lambda: FLAT), FixedHeads(), [1], Limits(9, 9)) is None


def test_sources_are_merged_and_dear_steps_stay_small():
    text = [3, 5, 9, 8, 3, 5, 9, 8]
    both = CostTree(context=True).resolve(None, lambda: FLAT)
    tree = planned(both, FixedHeads(), text, Limits(3, 9))
    assert [tree.tokens[0, node].item() for node in (1, 2, 3)] == [3, 5, 9]  # the match's chain, likeliest
    assert 4 in tree.tokens[0]
    dear = CostTree(context=True).resolve(None, lambda: CostTable({1: 1.0, 2: 9.0, 64: 99.0}))
    assert planned(dear, FixedHeads(), text, Limits(3, 9)) is None


def test_heads_rest_where_they_promise_nothing():
    config = SimpleNamespace(gate={"edges": [0.0, 2.0, 9.0], "accepted": {"4": [0.8, 0.0]}}, calibration=())
    heads = FixedHeads()
    policy = CostTree().resolve(config, lambda: CostTable({1: 1.0, 64: 1.1}, draft_s=0.2))
    assert planned(policy, heads, [1], Limits(9, 9), entropy=1.0) is not None
    assert heads.calls == 1
    assert planned(policy, heads, [1], Limits(9, 9), entropy=5.0) is None
    assert heads.calls == 1


@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_sizes_are_checked(size):
    with pytest.raises(ValueError, match="CostTree: size must be a number of drafts >= 0"):
        CostTree(size=size)


def test_a_decoder_without_any_source_is_refused():
    with pytest.raises(ValueError, match="Decoder: heads must be given for CostTree without context"):
        Decoder(tiny_llama(), policy=CostTree())


def heads_with_sequence_layer():
    heads = random_heads()
    config = SequenceConfig(HIDDEN, 4, 2, 16, 96)
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in config.shapes().items()}
    return DraftHeads(dataclasses.replace(heads.config, sequence=config), heads.weight, heads.bias, None, weights)


@pytest.mark.parametrize("make_heads", [lambda: None, random_heads, heads_with_sequence_layer])
def test_text_is_that_of_plain_decoding(monkeypatch, make_heads):
    """Also where steps draft from nothing, from the text alone, or from everything; the model repeats itself."""
    model = tiny_llama()
    heads = make_heads()
    costs = CostTable({1: 1.0, 64: 1.3}, draft_s=0.01)
    monkeypatch.setattr(Decoder, "costs", lambda self: costs)
    policies = [CostTree(context=True)] + ([CostTree(), FixedTree()] if heads else [])
    for policy in policies:
        decoder = Decoder(model, heads, policy)
        for length in (1, 9, 40):
            ids = (prompt(9, seed=length) * 5)[:length]
            result = decoder.generate(ids, max_new_tokens=80)
            assert result.tokens == greedy(model, ids, 80)
            if policy.__class__ is CostTree and policy.context and length == 40:
                assert result.metrics.accepted > 0
        assert len(decoder.generate(ids, max_new_tokens=5, capacity=len(ids) + 5).tokens) == 5


def test_sampled_text_is_that_of_plain_decoding(monkeypatch):
    monkeypatch.setattr(Decoder, "costs", lambda self: CostTable({1: 1.0, 64: 1.3}))
    model, ids = tiny_llama(), prompt(6) * 4
    options = {"mode": "sample", "temperature": 0.7, "seed": 3, "max_new_tokens": 60}
    plain = Decoder(model).generate(ids, **options)
    drafted = Decoder(model, heads_with_sequence_layer(), CostTree(context=True)).generate(ids, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.metrics.proposed > 0


@torch.inference_mode()
def test_the_sequence_layer_sees_every_committed_position_once(monkeypatch):
    """What it holds after a generation is what a run over the whole text gives, whatever was drafted on the way."""
    monkeypatch.setattr(Decoder, "costs", lambda self: CostTable({1: 1.0, 64: 1.3}))
    decoder = Decoder(tiny_llama(), heads_with_sequence_layer(), CostTree(context=True))
    ids = prompt(7) * 3
    generation = decoder.stream(ids, max_new_tokens=30)
    for _ in generation:
        pass
    tokens, log_probs = generation._drafts.propose(5)
    text = ids + generation.tokens
    whole = DraftState(decoder.heads, len(text))
    cache = decoder.adapter.new_cache(len(text))
    hidden, _ = decoder.adapter.prefill(torch.tensor([text[:-1]]), cache, keep_hidden=True)
    whole.observe(hidden, torch.tensor([text[1:]], dtype=torch.int32))
    expected, expected_log_probs = whole.propose(5)
    torch.testing.assert_close(log_probs, expected_log_probs, atol=1e-3, rtol=1e-3)
    assert torch.equal(tokens, expected)
