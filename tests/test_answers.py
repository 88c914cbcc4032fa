"""Training text made by a tiny random model: format, mix, determinism, resumption, refusals."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from cerberus_decode.train.answers import AnswerOptions, AnswerWriter, chat_frame, read_answers, save_answers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 40
SYSTEM, USER, ASSISTANT, END = 36, 37, 38, 39
SPECIAL = {"<s>": SYSTEM, "<u>": USER, "<a>": ASSISTANT, "<e>": END}
OPTIONS = AnswerOptions(
    mix=((0.0, 0.5), (0.7, 0.25), (1.0, 0.25)),
    first_words=("a", "bc"),
    max_turn_tokens=48,
    max_answer_tokens=12,
    sequences_per_shard=8,
    batch_size=6,
)


class ToyTokenizer:
    """One letter, one token; four marks of a chat."""

    eos_token_id = END

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        system = "be brief" if messages[0]["role"] == "user" else messages[0]["content"]
        return f"<s>{system}<e><u>{messages[-1]['content']}<e><a>"

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        ids = []
        while text:
            mark = next((m for m in SPECIAL if text.startswith(m)), None)
            ids.append(SPECIAL[mark] if mark else ord(text[0]) % 36)
            text = text[len(mark) if mark else 1 :]
        return ids

    def decode(self, ids):
        return "".join(chr(ord("a") + int(i) % 36) for i in ids)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=END,
        bos_token_id=SYSTEM,
        pad_token_id=END,
    )
    return LlamaForCausalLM(config).eval()


def writer(model, **changes):
    return AnswerWriter(model, ToyTokenizer(), dataclasses.replace(OPTIONS, **changes))


def sequences(answers):
    offsets = answers["offsets"].tolist()
    tokens = answers["tokens"].to(torch.int64).tolist()
    return [tokens[a:b] for a, b in itertools.pairwise(offsets)]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_chat_frame_is_the_template_around_the_turn():
    frame = chat_frame(ToyTokenizer())
    assert frame.before[0] == SYSTEM
    assert frame.before[-2:] == [END, USER]
    assert frame.after == [END, ASSISTANT]
    assert chat_frame(ToyTokenizer(), "ab").before == [SYSTEM, 97 % 36, 98 % 36, END, USER]


def test_a_template_that_hides_the_turn_is_refused():
    class Deaf(ToyTokenizer):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            return "<s>"

    with pytest.raises(ValueError, match="answers: the chat template must show the user's turn once, got 0 times"):
        chat_frame(Deaf())


def test_format_and_mix(model, tmp_path):
    paths = list(writer(model).write(tmp_path, 16))
    answers = read_answers(paths)
    frame = chat_frame(ToyTokenizer())
    assert {name: tensor.dtype for name, tensor in answers.items()} == {
        "tokens": torch.uint16,
        "offsets": torch.int64,
        "answer_start": torch.int32,
        "temperature": torch.float32,
    }
    assert answers["offsets"].shape == (17,)
    assert sorted(answers["temperature"][:8].tolist()) == pytest.approx([0, 0, 0, 0, 0.7, 0.7, 1, 1])
    prompts = set()
    for sequence, start in zip(sequences(answers), answers["answer_start"].tolist(), strict=True):
        prompt, answer = sequence[:start], sequence[start:]
        turn = prompt[len(frame.before) : -2]
        assert prompt == frame.before + turn + frame.after
        assert turn
        assert END not in turn
        assert 1 <= len(answer) <= OPTIONS.max_answer_tokens
        assert END not in answer[:-1]
        assert answer[-1] == END or len(answer) == OPTIONS.max_answer_tokens
        prompts.add(tuple(turn))
    assert len(prompts) == 16


def test_greedy_answers_are_what_the_model_says_next(model, tmp_path):
    """Left padding must not change an answer: compare with one unpadded forward per token."""
    answers = read_answers(list(writer(model).write(tmp_path, 8)))
    for sequence, start, temperature in zip(
        sequences(answers), answers["answer_start"].tolist(), answers["temperature"].tolist(), strict=True
    ):
        if temperature == 0:
            logits = model(torch.tensor([sequence])).logits[0]
            assert logits[start - 1 : -1].argmax(-1).tolist() == sequence[start:]


def test_deterministic_under_a_seed(model, tmp_path):
    first = writer(model).shard(0)
    torch.rand(7)
    assert same(first, writer(model).shard(0))
    assert not same(first, writer(model, seed=1).shard(0))


def test_a_stopped_run_continues_as_if_it_had_not(model, tmp_path):
    whole = read_answers(list(writer(model).write(tmp_path / "whole", 24)))
    list(writer(model).write(tmp_path / "stopped", 16))
    left_over = tmp_path / "stopped" / "answers-00002.partial"
    left_over.write_bytes(b"half a shard")
    made = []
    again = writer(model)
    make = again.shard
    again.shard = lambda index: made.append(index) or make(index)
    resumed = read_answers(list(again.write(tmp_path / "stopped", 24)))
    assert made == [2]
    assert same(resumed, whole)
    assert not left_over.exists()


def test_a_prompt_is_never_written_twice(model, tmp_path):
    """A later shard may not repeat a prompt of an earlier one, also when that one was read from disk."""
    first = writer(model)
    shard = first.shard(0)
    second = writer(model)
    second._remember(shard)
    assert second.prompts == first.prompts
    repeated = second.shard(0)  # the same draws again: all its prompts are known by now
    assert not {tuple(s) for s in sequences(shard)} & {tuple(s) for s in sequences(repeated)}


def test_other_options_are_refused(model, tmp_path):
    list(writer(model).write(tmp_path, 8))
    with pytest.raises(ValueError, match="must be made with"):
        list(writer(model, top_p=0.5).write(tmp_path, 8))


def test_a_mix_that_is_no_distribution_is_refused():
    with pytest.raises(ValueError, match="mix must be temperatures with shares that sum to 1"):
        AnswerOptions(mix=((0.0, 0.5),))


def test_a_model_that_ends_no_turn_is_refused(model):
    with pytest.raises(ValueError, match="must write 8 new user turns of up to 1 tokens"):
        writer(model, max_turn_tokens=1, first_words=(), first_word_share=0.0).shard(0)


def test_one_file_of_the_first_sequences(model, tmp_path):
    paths = list(writer(model).write(tmp_path, 16))
    kept = read_answers(paths, 11)
    save_answers(kept, tmp_path / "set.safetensors")
    loaded = read_answers([tmp_path / "set.safetensors"])
    assert same(loaded, kept)
    assert sequences(loaded) == sequences(read_answers(paths))[:11]
    assert not (tmp_path / "set.partial").exists()
