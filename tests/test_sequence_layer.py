"""The sequence layer: training and decoding run the same function, and a chunked run is the whole run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cerberus_decode.heads import DraftHeads, DraftState, HeadsConfig, HeadsMismatch
from cerberus_decode.sequence_layer import CHUNK, SequenceConfig
from cerberus_decode.train.sequence import SequenceLayer as TrainedLayer

CONFIG = SequenceConfig(hidden_size=48, num_heads=3, num_kv_heads=1, head_dim=16, inner_size=96)
VOCAB = 50


@pytest.fixture
def layer() -> TrainedLayer:
    """Nothing in it is the identity any more."""
    trained = TrainedLayer(CONFIG)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return trained


def heads_with(layer: TrainedLayer, **changes) -> DraftHeads:
    settings = {
        "kind": "cerberus", "num_heads": 2, "num_blocks": 1, "hidden_size": 48, "vocab_size": VOCAB,
        "root_embedding": True, "root_scale": 2.0, "draft_vocab_size": VOCAB, "sequence": CONFIG,
    } | changes  # fmt: skip
    config = HeadsConfig(**settings)
    weights = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    return DraftHeads(
        config, torch.randn(config.weight_shape) * 0.1, torch.zeros(config.weight_shape[:3]), None, weights
    )


def test_a_fresh_layer_is_the_identity():
    hidden, following = torch.randn(2, 7, 48), torch.randn(2, 7, 48)
    assert torch.equal(TrainedLayer(CONFIG)(hidden, following), hidden)


@pytest.mark.parametrize("cuts", [[9], [4, 5], [1] * 9])
def test_decoding_runs_what_was_trained(layer, cuts):
    embedding, vocab = torch.randn(VOCAB, 48), torch.randn(VOCAB, 48)
    heads = heads_with(layer).bind(embedding, vocab)
    hidden, tokens = torch.randn(1, 9, 48), torch.randint(VOCAB, (1, 9))
    expected = layer(hidden, embedding[tokens] * 2.0)[:, -1]
    state = DraftState(heads, capacity=9)
    first = 0
    for count in cuts:
        part = slice(first, first := first + count)
        state.observe(hidden[:, part], tokens[:, part].to(torch.int32))
        if count > 1:
            state.propose()  # or not: what was not drafted on is caught up with
    assert state.needs_all_positions
    found, log_probs = state.propose(4)
    want, want_log_probs = heads.propose(expected, tokens[:, -1], 4)
    torch.testing.assert_close(log_probs, want_log_probs, atol=1e-4, rtol=1e-4)
    assert torch.equal(found, want)
    assert torch.equal(state.propose(4)[0], want)


def test_a_long_prompt_runs_in_chunks(layer):
    length = CHUNK + 30
    embedding = torch.randn(VOCAB, 48)
    heads = heads_with(layer).bind(embedding, torch.randn(VOCAB, 48))
    hidden, tokens = torch.randn(1, length, 48), torch.randint(VOCAB, (1, length))
    cache = heads.sequence.new_cache(length)
    last = heads.sequence.extend(hidden, embedding[tokens], cache)
    torch.testing.assert_close(last, layer(hidden, embedding[tokens])[:, -1], atol=1e-4, rtol=1e-4)
    assert cache.lengths == [length]


def test_heads_without_the_layer_remember_the_newest_position_only(layer):
    heads = heads_with(layer)
    plain = DraftHeads(dataclasses.replace(heads.config, sequence=None), heads.weight, heads.bias)
    plain = plain.bind(torch.randn(VOCAB, 48), torch.randn(VOCAB, 48))
    state = DraftState(plain, capacity=0)
    assert not state.needs_all_positions
    hidden, tokens = torch.randn(1, 3, 48), torch.tensor([[4, 5, 6]])
    state.observe(hidden[:, :1], tokens[:, :1])
    state.observe(hidden[:, 1:], tokens[:, 1:])
    assert torch.equal(state.propose()[0], plain.propose(hidden[:, -1], tokens[:, -1])[0])


def test_files_keep_the_layer_and_contradictions_are_refused(layer, tmp_path):
    heads = heads_with(layer)
    heads.save(tmp_path)
    loaded = DraftHeads.load(tmp_path)
    assert loaded.config == heads.config
    for name, tensor in heads.sequence_weights.items():
        assert torch.equal(loaded.sequence_weights[name], tensor.to(torch.bfloat16))
    with pytest.raises(HeadsMismatch, match="the sequence layer's weights must be of shapes"):
        DraftHeads(
            dataclasses.replace(heads.config, sequence=None), heads.weight, heads.bias, None, loaded.sequence_weights
        )
    text = heads.config.to_json().replace('"num_kv_heads"', '"num_rows"')
    with pytest.raises(HeadsMismatch, match=r"sequence in config.json must be a sequence layer's: .*num_rows"):
        HeadsConfig.from_json(text)
