"""Files of training text with the base model's hidden states, read by the trainer while more of them are made.

One forward pass of the frozen base model per sequence is the dearest part of training heads, and its result never
changes, so it is done once and kept. A shard holds, for ``n`` sequences with ``P`` tokens altogether:

- ``tokens`` uint16 ``[P]`` (int32 for vocabularies past 65,536): prompts and answers;
- ``hidden`` bfloat16 ``[P, H]``: the LM head's input at each token, whose logits are of the token behind it; the last
  row of a sequence is zero, because nothing was ever asked behind it;
- ``offsets`` int64 ``[n + 1]``: where each sequence begins and ends;
- ``answer_start`` int32 ``[n]``: index within the sequence of the answer's first token;
- ``temperature`` float32 ``[n]`` of the answer; ``conversation`` int32 ``[n]``, its number;
- ``key`` int64 ``[n]``: of the first user turn's words. Equal keys are one prompt: the first conversation stands for
  all, and a key decides alone whether a sequence is held out from training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HELD_OUT_EVERY = 32
_UINT16_VOCABULARY = 65536

Shard = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sequence:
    """One prompt with its answer.

    Attributes:
        tokens: ids of both.
        answer_start: index of the answer's first token.
        temperature: of the answer.
        hidden: bfloat16 ``[len(tokens) - 1, H]``.
        conversation: number of the conversation that it is of.
        key: see :func:`text_key`.
    """

    tokens: list[int]
    answer_start: int
    temperature: float
    hidden: torch.Tensor
    conversation: int
    key: int


def text_key(text: str) -> int:
    """A number for the words of a text, whatever the case and the spaces between.

    Example:
        >>> text_key("What is  it?") == text_key("what is it?")
        True
    """
    words = " ".join(text.split()).casefold()
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "little")


def is_held_out(key: int) -> bool:
    """Whether sequences of this key are kept from training."""
    return key % HELD_OUT_EVERY == 0


def shard_path(folder: Path, index: int) -> Path:
    """File of shard ``index`` in ``folder``."""
    return folder / f"text-{index:05d}.safetensors"


def write_shard(path: Path, sequences: list[Sequence], vocab_size: int, options: str = "") -> None:
    """Write a shard, which appears whole or not at all.

    Args:
        path: where.
        sequences: what; may be empty.
        vocab_size: of the base model.
        options: how the text was made, kept as metadata.
    """
    dtype = torch.uint16 if vocab_size <= _UINT16_VOCABULARY else torch.int32
    lengths = [len(sequence.tokens) for sequence in sequences]
    width = sequences[0].hidden.shape[1] if sequences else 0
    hidden = torch.zeros(sum(lengths), width, dtype=torch.bfloat16)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    for first, sequence in zip(offsets.tolist(), sequences, strict=False):
        hidden[first : first + len(sequence.hidden)] = sequence.hidden
    shard = {
        "tokens": torch.tensor([token for sequence in sequences for token in sequence.tokens]).to(dtype),
        "hidden": hidden,
        "offsets": offsets,
        "answer_start": torch.tensor([sequence.answer_start for sequence in sequences], dtype=torch.int32),
        "temperature": torch.tensor([sequence.temperature for sequence in sequences], dtype=torch.float32),
        "conversation": torch.tensor([sequence.conversation for sequence in sequences], dtype=torch.int32),
        "key": torch.tensor([sequence.key for sequence in sequences], dtype=torch.int64),
    }
    partial = path.with_suffix(".partial")
    save_file(shard, partial, metadata={"options": options})
    partial.rename(path)


def read_options(path: Path) -> str:
    """How a shard's text was made, as :func:`write_shard` was told."""
    with safe_open(path, "pt") as shard:
        return (shard.metadata() or {}).get("options", "")


def read_shard(path: Path) -> Shard:
    """Load one shard."""
    return load_file(path)


def read_columns(path: Path, names: Iterable[str]) -> Shard:
    """Some of a shard's tensors; without ``hidden`` they are small."""
    with safe_open(path, "pt") as shard:
        return {name: shard.get_tensor(name) for name in names}


def repeated(paths: Iterable[Path]) -> set[tuple[int, int]]:
    """Conversations, as pairs of key and number, whose first turn an earlier conversation has already."""
    first: dict[int, int] = {}
    found = set()
    for path in paths:
        columns = read_columns(path, ("key", "conversation"))
        keys, numbers = columns["key"].tolist(), columns["conversation"].tolist()
        for key, number in zip(keys, numbers, strict=True):
            if first.setdefault(key, number) != number:
                found.add((key, number))
    return found
