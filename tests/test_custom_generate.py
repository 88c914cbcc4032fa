"""custom_generate: transformers' own call with our loop inside gives transformers' text, or says what it cannot do."""

from __future__ import annotations

import copy
import functools
import gc
import re
import weakref

import pytest
import torch
import transformers
from cerberus_decode import Decoder, custom_generate, transformers_generate
from decoding_models import OracleHeads, build, greedy, prompt, random_heads, tiny_llama


def ids(length: int = 9, batch: int = 1) -> torch.Tensor:
    return torch.tensor([prompt(length, seed) for seed in range(batch)])


@pytest.fixture
def oracle(monkeypatch) -> OracleHeads:
    """Heads that are right every time, so that steps emit several tokens."""
    stream = Decoder.stream

    def follow(self, *args, **options):
        generation = stream(self, *args, **options)
        if isinstance(self.heads, OracleHeads):
            self.heads.generation = generation
        return generation

    monkeypatch.setattr(Decoder, "stream", follow)
    return OracleHeads(prompt(9) + greedy(tiny_llama(), prompt(9), 40))


def both(tokens, **options):
    """Ours and transformers' own result of the same call."""
    model = tiny_llama()
    heads = options.pop("heads", None)
    plain = model.generate(tokens, pad_token_id=0, **options)
    ours = model.generate(tokens, pad_token_id=0, custom_generate=custom_generate, heads=heads, **options)
    return ours, plain


@pytest.mark.parametrize("make_heads", [lambda: None, random_heads], ids=["no heads", "random heads"])
def test_greedy_text_is_transformers(make_heads):
    ours, plain = both(ids(), max_new_tokens=30, do_sample=False, heads=make_heads())
    assert torch.equal(ours, plain)


def test_several_tokens_a_step_give_the_same_text(oracle):
    ours, plain = both(ids(), max_new_tokens=30, do_sample=False, heads=oracle)
    assert torch.equal(ours, plain)
    assert len(oracle.calls) < 10


def test_end_tokens_and_limits_cut_within_a_step(oracle):
    text = both(ids(), max_new_tokens=30, do_sample=False)[1][0, 9:].tolist()
    for end in (text[0], text[7], [text[12], text[5]]):
        ours, plain = both(ids(), max_new_tokens=30, do_sample=False, eos_token_id=end, heads=oracle)
        assert torch.equal(ours, plain)
    for limit in (1, 2, 17):
        ours, plain = both(ids(), max_new_tokens=limit, do_sample=False, heads=oracle)
        assert torch.equal(ours, plain)
    ours, plain = both(ids(), max_length=15, do_sample=False, heads=oracle)
    assert torch.equal(ours, plain)


def test_stopping_criteria_are_asked_after_every_token(oracle):
    class AfterTwelve(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 9 + 12)

    criteria = transformers.StoppingCriteriaList([AfterTwelve()])
    ours, plain = both(ids(), max_new_tokens=30, do_sample=False, stopping_criteria=criteria, heads=oracle)
    assert ours.shape == (1, 21)
    assert torch.equal(ours, plain)


def test_a_batch_equals_its_rows():
    tokens = ids(batch=3)
    text = both(tokens, max_new_tokens=20, do_sample=False)[1]
    ours, plain = both(tokens, max_new_tokens=20, do_sample=False, eos_token_id=int(text[1, 14]), heads=random_heads())
    assert torch.equal(ours, plain)


def test_sampling_is_seeded_by_torch_and_follows_the_filters():
    def run(seed, **options):
        torch.manual_seed(seed)
        model = tiny_llama()
        options = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0, **options}
        return model.generate(ids(), custom_generate=custom_generate, heads=random_heads(), **options)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    greedy = both(ids(), max_new_tokens=20, do_sample=False)[1]
    assert torch.equal(run(3, top_k=1), greedy)
    assert torch.equal(run(3, temperature=1e-4, top_k=0), greedy)
    assert run(4, num_return_sequences=3).unique(dim=0).shape[0] == 3


def test_a_streamer_gets_every_token():
    class Keep(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Keep()
    text = tiny_llama().generate(
        ids(),
        custom_generate=functools.partial(custom_generate, streamer=streamer),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )
    assert streamer.tokens == text[0, 9:].tolist()
    assert streamer.ended


@pytest.mark.parametrize(  # VER-17
    ("options", "message"),
    [
        ({"repetition_penalty": 1.3}, "logits_processor must be free of rules but temperature, top_k, top_p and min_p"),
        ({"min_new_tokens": 8, "eos_token_id": 3}, "MinNewTokensLengthLogitsProcessor"),
        ({"num_beams": 2}, "generation_config must be for greedy_search or sample, got beam_search"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate must be False"),
        ({"attention_mask": torch.tensor([[0] + [1] * 8])}, "attention_mask must be all ones"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options, message):
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_llama().generate(ids(), custom_generate=custom_generate, **options)


def test_the_decoder_is_kept_while_its_parts_are_the_same(monkeypatch):
    made = []

    class Counted(Decoder):
        def __init__(self, *parts):
            made.append(parts)
            super().__init__(*parts)

    monkeypatch.setattr(transformers_generate, "Decoder", Counted)
    model, heads = copy.deepcopy(tiny_llama()), random_heads()
    for given in (heads, heads, None):
        model.generate(ids(), custom_generate=custom_generate, max_new_tokens=2, pad_token_id=0, heads=given)
    assert len(made) == 2
    copied = copy.deepcopy(model)
    copied.generate(ids(), custom_generate=custom_generate, max_new_tokens=2, pad_token_id=0)
    assert len(made) == 3
    kept = weakref.ref(model)
    made.clear()
    del model
    gc.collect()
    assert kept() is None


def test_filters_that_the_caller_passes_count_too():
    cold = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(1e-4)])
    options = {"custom_generate": custom_generate, "max_new_tokens": 12, "do_sample": True, "pad_token_id": 0}
    greedy_text = both(ids(), max_new_tokens=12, do_sample=False)[1]
    assert torch.equal(tiny_llama().generate(ids(), logits_processor=cold, top_k=0, **options), greedy_text)
    twice = transformers.LogitsProcessorList([transformers.TopPLogitsWarper(0.9)])
    with pytest.raises(ValueError, match="in the order temperature, top_k, top_p, min_p, each once"):
        tiny_llama().generate(ids(), logits_processor=twice, top_k=5, top_p=0.5, **options)
    several = transformers.LogitsProcessorList([transformers.TopPLogitsWarper(0.9, min_tokens_to_keep=2)])
    with pytest.raises(ValueError, match="min_tokens_to_keep must be 1, got 2"):
        tiny_llama().generate(ids(), logits_processor=several, top_k=0, **options)


def test_the_models_last_position_ends_the_text_with_a_word():
    model = build(transformers.LlamaConfig, transformers.LlamaForCausalLM, max_position_embeddings=16)
    with pytest.warns(UserWarning, match="the text ends at 16 tokens, where the model's positions do"):
        text = model.generate(
            ids(), custom_generate=custom_generate, max_new_tokens=20, do_sample=False, pad_token_id=0
        )
    assert text.shape == (1, 16)
