"""Model, GGUF and heads folders small enough to be made on the fly, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch

VOCAB_SIZE = 260
HIDDEN_SIZE = 32
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
TREE = [(rank,) for rank in range(5)] + [(rank, deeper) for rank in range(3) for deeper in range(5)] + [(0, 0, 0)]
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_symbols() -> list[str]:
    """The 256 symbols that byte-level tokenizers write for bytes, in byte order."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def tiny_tokenizer():
    import tokenizers
    import transformers

    vocab = {symbol: index for index, symbol in enumerate([*SPECIAL_TOKENS, *byte_symbols()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_model(*, tied: bool = True, hidden_size: int = HIDDEN_SIZE, seed: int = 0):
    """A two-layer llama whose greedy text is long and does not repeat one token."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    return transformers.LlamaForCausalLM(config).eval()


def save_tiny_model(folder: Path, **settings) -> Path:
    tiny_model(**settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_heads(folder: Path, kind: str = "cerberus", **changes) -> Path:
    """Untrained heads: what they propose is noise, so most drafts are refused and some are kept."""
    from cerberus_decode.heads import DraftHeads, HeadsConfig

    settings = {
        "kind": kind,
        "num_heads": 3,
        "num_blocks": 1,
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "root_embedding": kind == "cerberus",
        "root_scale": 1.0,
        "draft_vocab_size": VOCAB_SIZE,
        "tree": tuple(TREE),
        "tree_gains": tuple(0.9 / (index + 1) for index in range(len(TREE))),
    } | changes
    config = HeadsConfig(**settings)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(config.weight_shape, generator=generator) * 0.1
    DraftHeads(config, weight, torch.zeros(config.weight_shape[:3])).save(folder)
    return folder


def save_tiny_answers(path: Path, num_sequences: int = 96) -> Path:
    """Random answers in the form that training reads."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 30, (num_sequences,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.randint(4, VOCAB_SIZE, (int(offsets[-1]),), generator=generator).to(torch.int32)
    starts = torch.full((num_sequences,), 4, dtype=torch.int32)
    save_file({"tokens": tokens, "offsets": offsets, "answer_start": starts}, path)
    return path
