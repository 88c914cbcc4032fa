"""Training text from the base model alone: it writes the user's turns itself, then answers them.

A chat model has seen what users ask, so after the opening of a user turn it continues with a plausible question; no
data set is needed. Left to itself it favours a few openings, which is why most turns are started with a word drawn
from a list. Answers are greedy or sampled, in a stated mix, because heads draft for both.

The text is made in shards that appear whole or not at all; a shard depends on the options, its number and the shards
before it, so a stopped run continues as if it had never stopped, and asking for more sequences keeps the first ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

_QUESTIONS = ("What", "How", "Why", "Which", "Who", "When", "Where", "Can", "Could", "Is", "Are", "Do", "If")
_REQUESTS = ("Write", "Explain", "Describe", "Give", "List", "Compare", "Create", "Tell", "Help", "Summarize")
_OTHERS = ("Translate", "Solve", "Find", "Suggest", "Imagine", "Please", "I", "My", "The", "A", "In", "Python")
FIRST_WORDS = _QUESTIONS + _REQUESTS + _OTHERS
LARGEST_UINT16 = 65535
MAX_ROUNDS_PER_SHARD = 16
_MARKER = "CERBERUS-USER-TURN"


@dataclass(frozen=True)
class AnswerOptions:
    """How to make training text.

    Attributes:
        mix: pairs of an answer's temperature (0 is greedy) and the share of sequences that get it.
        top_p: nucleus of every sampled token.
        max_turn_tokens: longest user turn; longer ones are dropped, not cut.
        max_answer_tokens: longest answer; longer ones are cut.
        first_words: words that may start a turn.
        first_word_share: share of turns that are started with one of them.
        system: system prompt; None leaves it to the chat template.
        sequences_per_shard: sequences in a file.
        batch_size: sequences generated together.
        seed: of every draw.
    """

    mix: tuple[tuple[float, float], ...] = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))
    top_p: float = 0.95
    max_turn_tokens: int = 64
    max_answer_tokens: int = 256
    first_words: tuple[str, ...] = FIRST_WORDS
    first_word_share: float = 0.9
    system: str | None = None
    sequences_per_shard: int = 64
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse shares that are not a distribution."""
        shares = [share for _, share in self.mix]
        if not shares or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"answers: mix must be temperatures with shares that sum to 1, got {self.mix}")


@dataclass(frozen=True)
class ChatFrame:
    """Token ids around a user turn: ``before`` opens it, ``after`` closes it and opens the answer."""

    before: list[int]
    after: list[int]


def chat_frame(tokenizer: Any, system: str | None = None) -> ChatFrame:
    """Take the tokenizer's chat template apart around the user's words.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        system: system prompt; None leaves it to the template.

    Raises:
        ValueError: there is no template, or it does not show the user's words once as they are.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": _MARKER})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if text.count(_MARKER) != 1:
        raise ValueError(f"answers: the chat template must show the user's turn once, got {text.count(_MARKER)} times")
    before, after = text.split(_MARKER)
    return ChatFrame(*(tokenizer.encode(part, add_special_tokens=False) for part in (before, after)))


class AnswerWriter:
    """Makes shards of training text.

    Args:
        model: a transformers causal LM.
        tokenizer: its tokenizer, with a chat template.
        options: how.
    """

    def __init__(self, model: Any, tokenizer: Any, options: AnswerOptions) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.frame = chat_frame(tokenizer, options.system)
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [tokenizer.eos_token_id if ends is None else ends]
        self.ends = sorted({*ends, *self.frame.after[:1]})
        self.prompts: set[str] = set()

    def write(self, folder: Path, num_sequences: int) -> Iterator[Path]:
        """Write the shards that ``folder`` lacks for ``num_sequences`` sequences; yield every shard's path in turn.

        Raises:
            ValueError: ``folder`` holds shards made with other options, or the model no longer writes new prompts.
        """
        folder.mkdir(parents=True, exist_ok=True)
        identity = json.dumps(dataclasses.asdict(self.options))
        for index in range(-(-num_sequences // self.options.sequences_per_shard)):
            path = folder / f"answers-{index:05d}.safetensors"
            if path.exists():
                with safe_open(path, "pt") as shard:
                    made_with = (shard.metadata() or {}).get("options")
                if made_with != identity:
                    raise ValueError(f"answers: {path} must be made with {identity}, got {made_with}")
                self._remember(load_file(path))
            else:
                partial = path.with_suffix(".partial")
                save_file(self.shard(index), partial, metadata={"options": identity})
                partial.rename(path)
            yield path

    def shard(self, index: int) -> dict[str, torch.Tensor]:
        """Make shard ``index``: ``tokens``, ``offsets``, ``answer_start``, ``temperature``."""
        options = self.options
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + index)
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            prompts = [self.frame.before + turn + self.frame.after for turn in self._new_turns(generator)]
            answers: list[list[int]] = [[] for _ in prompts]
            temperatures = self._temperatures(generator)
            for temperature, _ in options.mix:
                rows = [row for row, t in enumerate(temperatures) if t == temperature]
                rows.sort(key=lambda row: (len(prompts[row]), row))
                for first in range(0, len(rows), options.batch_size):
                    batch = rows[first : first + options.batch_size]
                    made = self._continue([prompts[row] for row in batch], options.max_answer_tokens, temperature)
                    for row, (answer, _) in zip(batch, made, strict=True):
                        answers[row] = answer
        sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        dtype = torch.uint16 if self.model.config.vocab_size <= LARGEST_UINT16 + 1 else torch.int32
        return {
            "tokens": torch.tensor([token for sequence in sequences for token in sequence]).to(dtype),
            "offsets": torch.tensor([0] + [len(sequence) for sequence in sequences]).cumsum(0),
            "answer_start": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32),
            "temperature": torch.tensor(temperatures, dtype=torch.float32),
        }

    def _temperatures(self, generator: torch.Generator) -> list[float]:
        """One per sequence of a shard, in the stated mix as nearly as whole numbers allow, shuffled."""
        count, cumulative, shares = self.options.sequences_per_shard, 0.0, []
        for temperature, share in self.options.mix:
            first = round(cumulative * count)
            cumulative += share
            shares += [temperature] * (round(cumulative * count) - first)
        return [shares[i] for i in torch.randperm(count, generator=generator).tolist()]

    def _new_turns(self, generator: torch.Generator) -> list[list[int]]:
        """User turns for one shard, none blank, unfinished or seen before."""
        options = self.options
        turns: list[list[int]] = []
        for _ in range(MAX_ROUNDS_PER_SHARD * -(-options.sequences_per_shard // options.batch_size)):
            started = torch.rand(options.batch_size, generator=generator) < options.first_word_share
            words = torch.randint(max(1, len(options.first_words)), (options.batch_size,), generator=generator)
            openings = [
                self.tokenizer.encode(options.first_words[word], add_special_tokens=False)
                if start and options.first_words
                else []
                for start, word in zip(started.tolist(), words.tolist(), strict=True)
            ]
            made = self._continue([self.frame.before + o for o in openings], options.max_turn_tokens, 1.0)
            for opening, (rest, finished) in zip(openings, made, strict=True):
                turn = opening + rest[:-1]
                key = self._key(turn)
                if finished and key and key not in self.prompts:
                    self.prompts.add(key)
                    turns.append(turn)
                if len(turns) == options.sequences_per_shard:
                    return turns
        raise ValueError(
            f"answers: the model must write {options.sequences_per_shard} new user turns of up to "
            f"{options.max_turn_tokens} tokens per shard, got {len(turns)}"
        )

    def _continue(self, prompts: list[list[int]], limit: int, temperature: float) -> list[tuple[list[int], bool]]:
        """New tokens of each prompt, the end token included, and whether it came within ``limit`` tokens."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self.ends[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left, so that all rows go on at the same place
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": self.options.top_p, "top_k": 0}
        device = self.model.device
        output = self.model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=limit,
            eos_token_id=self.ends,
            pad_token_id=self.ends[0],
            repetition_penalty=1.0,
            **sampling,
        )
        continuations = []
        for row in output[:, longest:].tolist():
            end = next((place for place, token in enumerate(row) if token in self.ends), None)
            continuations.append((row if end is None else row[: end + 1], end is not None))
        return continuations

    def _key(self, turn: list[int]) -> str:
        """What makes two prompts the same: their words, whatever the case and the spaces between."""
        return " ".join(self.tokenizer.decode(turn).split()).casefold()

    def _remember(self, shard: dict[str, torch.Tensor]) -> None:
        """Note a finished shard's prompts, so that later shards do not repeat them."""
        tokens, offsets = shard["tokens"].to(torch.int64).tolist(), shard["offsets"].tolist()
        for first, start in zip(offsets, shard["answer_start"].tolist(), strict=False):
            turn = tokens[first + len(self.frame.before) : first + start - len(self.frame.after)]
            self.prompts.add(self._key(turn))


def read_answers(paths: list[Path], num_sequences: int | None = None) -> dict[str, torch.Tensor]:
    """Join shards into one set, the format of a single file.

    Args:
        paths: shards or whole files, in order.
        num_sequences: how many to keep of the front; None keeps all.

    Returns:
        ``tokens`` uint16 (int32 for large vocabularies) flat ids, ``offsets`` int64 ``[n + 1]``, ``answer_start``
        int32 ``[n]`` (index within the sequence), ``temperature`` float32 ``[n]``.
    """
    shards = [load_file(path) for path in paths]
    lengths = torch.cat([shard["offsets"].diff() for shard in shards])[:num_sequences]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {
        "tokens": torch.cat([shard["tokens"] for shard in shards])[: int(offsets[-1])],
        "offsets": offsets,
        "answer_start": torch.cat([shard["answer_start"] for shard in shards])[:num_sequences],
        "temperature": torch.cat([shard["temperature"] for shard in shards])[:num_sequences],
    }


def save_answers(answers: dict[str, torch.Tensor], path: Path) -> None:
    """Write a set as one file, which appears whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in answers.items()}, partial)
    partial.rename(path)
