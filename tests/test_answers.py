"""Training text made by a tiny random model: format, mix, independence, resumption, refusals."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from cerberus_decode.adapter import Adapter
from cerberus_decode.train.answers import AnswerOptions, AnswerWriter, Opening, chat_frame
from cerberus_decode.train.pool import Pool, Request
from cerberus_decode.train.shards import Sequence, is_held_out, read_shard, repeated, shard_path, text_key, write_shard
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 40
SYSTEM, USER, ASSISTANT, END = 36, 37, 38, 39
SPECIAL = {"<s>": SYSTEM, "<u>": USER, "<a>": ASSISTANT, "<e>": END}
OPTIONS = AnswerOptions(
    mix=((0.0, 0.5), (0.7, 0.25), (1.0, 0.25)),
    openings=(Opening(("a", "bc"), 0.7, max_tokens=48), Opening(("",), 0.3, max_tokens=6, may_be_cut=True)),
    max_answer_tokens=12,
    second_turns=0.5,
    conversations_per_shard=8,
)


class ToyTokenizer:
    """One letter, one token; four marks of a chat."""

    eos_token_id = END

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        turns = list(messages)
        system = turns.pop(0)["content"] if turns[0]["role"] == "system" else "be brief"
        marks = {"user": "<u>", "assistant": "<a>"}
        return f"<s>{system}<e>" + "".join(f"{marks[turn['role']]}{turn['content']}<e>" for turn in turns) + "<a>"

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


def writer(model, num_rows=5, **changes):
    return AnswerWriter(Adapter(model), ToyTokenizer(), dataclasses.replace(OPTIONS, **changes), num_rows)


def sequences(shard):
    """Tokens, answer start, temperature, conversation of every sequence."""
    offsets, tokens = shard["offsets"].tolist(), shard["tokens"].to(torch.int64).tolist()
    columns = (shard[name].tolist() for name in ("answer_start", "temperature", "conversation"))
    return [(tokens[offsets[i] : offsets[i + 1]], *rest) for i, rest in enumerate(zip(*columns, strict=True))]


def made(model, folder, count, **changes):
    return [
        entry for path in sorted(writer(model, **changes).write(folder, count)) for entry in sequences(read_shard(path))
    ]


def test_chat_frame_is_the_template_around_the_turn():
    frame = chat_frame(ToyTokenizer())
    assert frame.before[0] == SYSTEM
    assert frame.before[-2:] == [END, USER]
    assert frame.after == [END, ASSISTANT]
    assert frame.between == [END, USER]
    assert chat_frame(ToyTokenizer(), "ab").before == [SYSTEM, 97 % 36, 98 % 36, END, USER]


def test_a_template_that_hides_the_turn_is_refused():
    class Deaf(ToyTokenizer):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            return "<s>"

    with pytest.raises(ValueError, match="answers: the chat template must show the user's turn once, got 0 times"):
        chat_frame(Deaf())


def test_format_and_mix(model, tmp_path):
    (path,) = writer(model, max_answer_tokens=60, second_turns=1.0).write(tmp_path, 8)
    shard, frame = read_shard(path), chat_frame(ToyTokenizer())
    assert {name: tensor.dtype for name, tensor in shard.items()} == {
        "tokens": torch.uint16,
        "hidden": torch.bfloat16,
        "offsets": torch.int64,
        "answer_start": torch.int32,
        "temperature": torch.float32,
        "conversation": torch.int32,
        "key": torch.int64,
    }
    found = sequences(shard)
    assert {round(temperature, 3) for _, _, temperature, _ in found} <= {0.0, 0.7, 1.0}
    conversations = [conversation for *_, conversation in found]
    assert conversations == sorted(conversations)
    assert len(set(conversations)) < len(conversations)  # second turns
    for index, (tokens, start, _, conversation) in enumerate(found):
        prompt, answer = tokens[:start], tokens[start:]
        assert prompt[-2:] == frame.after
        assert 1 <= len(answer) <= 60
        assert END not in answer[:-1]
        assert answer[-1] == END or len(answer) == 60
        if index and conversations[index - 1] == conversation:
            before = found[index - 1][0]
            assert tokens[: len(before) + 1] == [*before, USER]
        else:
            turn = prompt[len(frame.before) : -2]
            assert prompt == frame.before + turn + frame.after
            assert turn
            assert END not in turn


def test_answers_and_states_are_the_models_own(model, tmp_path):
    """Rows that start from another's keys, or run beside longer ones, change nothing."""
    for path in writer(model).write(tmp_path, 16):
        shard = read_shard(path)
        for first, (tokens, start, temperature, _) in zip(shard["offsets"].tolist(), sequences(shard), strict=False):
            with torch.inference_mode():
                states = model.model(torch.tensor([tokens])).last_hidden_state[0]
            kept = shard["hidden"][first : first + len(tokens)].float()
            torch.testing.assert_close(kept[:-1], states[:-1], atol=0.02, rtol=0.02)
            assert not kept[-1].any()
            if temperature == 0:
                with torch.inference_mode():
                    assert model.lm_head(states)[start - 1 : -1].argmax(-1).tolist() == tokens[start:]


def test_a_conversation_does_not_depend_on_the_others(model, tmp_path):
    together = made(model, tmp_path / "together", 16, num_rows=7)
    assert together == made(model, tmp_path / "alone", 16, num_rows=1)
    assert together != made(model, tmp_path / "other", 16, seed=1)


def test_a_stopped_run_continues_as_if_it_had_not(model, tmp_path):
    whole = made(model, tmp_path / "whole", 24)
    made(model, tmp_path / "stopped", 16)
    shard_path(tmp_path / "stopped", 0).unlink()
    left_over = shard_path(tmp_path / "stopped", 2).with_suffix(".partial")
    left_over.write_bytes(b"half a shard")
    again = writer(model)
    asked, conversation = [], again.conversation
    again.conversation = lambda number: asked.append(number) or conversation(number)
    list(again.write(tmp_path / "stopped", 24))
    assert sorted(asked) == [*range(8), *range(16, 24)]
    assert made(model, tmp_path / "stopped", 24) == whole
    assert not left_over.exists()


def test_repeated_prompts_are_found_and_keys_are_of_words():
    assert text_key("What  is it?\n") == text_key("what is IT?") != text_key("what was it?")
    assert 0 < sum(map(is_held_out, map(text_key, map(str, range(1000))))) < 100


def test_a_prompt_counts_once(tmp_path):
    def sequence(conversation, key):
        return Sequence([1, 2, 3], 1, 0.0, torch.zeros(2, 4, dtype=torch.bfloat16), conversation, key)

    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    write_shard(paths[0], [sequence(0, 7), sequence(0, 7), sequence(1, 8)], VOCAB)
    write_shard(paths[1], [sequence(2, 7), sequence(3, 9)], VOCAB)
    assert repeated(paths) == {(7, 2)}


def test_other_options_are_refused(model, tmp_path):
    list(writer(model).write(tmp_path, 8))
    with pytest.raises(ValueError, match="must be made with"):
        list(writer(model, top_p=0.5).write(tmp_path, 8))


def test_a_mix_that_is_no_distribution_is_refused():
    with pytest.raises(ValueError, match="mix must be temperatures with shares that sum to 1"):
        AnswerOptions(mix=((0.0, 0.5),))
    with pytest.raises(ValueError, match="openings must be sorts of turns"):
        AnswerOptions(openings=())


def test_turns_that_never_end_leave_no_sequence(model, tmp_path):
    openings = (Opening(("a",), 1.0, max_tokens=1),)
    (path,) = writer(model, openings=openings).write(tmp_path, 8)
    shard = read_shard(path)
    assert len(shard["answer_start"]) == 0
    assert shard["offsets"].tolist() == [0]


def test_a_text_that_only_repeats_itself_is_cut(model):
    with torch.no_grad():
        stuck = copy.deepcopy(model)
        stuck.lm_head.weight.zero_()
        stuck.lm_head.weight[7] = stuck.model.norm.weight.sign()  # token 7 wherever the states' sum is positive
        stuck.lm_head.weight[8] = -stuck.lm_head.weight[7]
    free, cut = (Request([1, 2, 3], 40, max_repeated=limit) for limit in (0, 9))
    for number, request in enumerate((free, cut)):
        pool = Pool(Adapter(stuck), num_rows=1, capacity=64)
        pool.add(number, request)
        ((_, made),) = pool.run()
        tokens = made.tokens
        if request is free:
            whole = tokens
            assert len(whole) == 40
    assert len(tokens) < 40
    assert tokens == whole[: len(tokens)]
    period = next(p for p in range(1, 40) if tokens[-9:] == tokens[-9 - p : -p])
    assert tokens[-9:] == tokens[-9 - period : -period]


def test_the_pool_refuses_what_no_row_can_hold(model):
    pool = Pool(Adapter(model), num_rows=1, capacity=8)
    with pytest.raises(ValueError, match=r"Pool.add: request must be at most 8 tokens long \(the row\), got 9"):
        pool.add(0, Request([1, 2, 3], max_new_tokens=6))
    with pytest.raises(ValueError, match=r"Pool.add: request must be a prompt and a continuation"):
        pool.add(0, Request([], max_new_tokens=1))
    assert list(pool.run()) == []
