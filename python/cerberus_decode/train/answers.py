"""Training text from the base model alone: it writes the user's turns itself, then answers them.

A chat model has seen what users ask, so after the opening of a user turn it continues with a plausible question; no
data set is needed. Left to itself it favours a few openings, which is why most turns are started with words drawn
from a list: of questions, of requests, and of tasks that come with a text, such as a summary. Some conversations go
on to a second turn. Answers are greedy or sampled, in a stated mix, because heads draft for both.

The text is made in shards of the format of :mod:`.shards` that appear whole or not at all. A conversation depends on
the options and its number alone (up to rounding), so a stopped run continues where it stood, and asking for more
keeps what is there.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..adapter import Adapter
from ..options import end_token_ids
from .pool import Continuation, Pool, Request
from .shards import Sequence, read_options, shard_path, text_key, write_shard

_MARKERS = ("CERBERUS-FIRST-TURN", "CERBERUS-ANSWER", "CERBERUS-SECOND-TURN")


@dataclass(frozen=True)
class Opening:
    """How user turns of one sort begin.

    Attributes:
        texts: beginnings, one of which is drawn; the model writes the rest.
        weight: share of the turns, relative to the other sorts'.
        max_tokens: longest turn.
        may_be_cut: whether a longer turn is cut there; else it is dropped, as one that asks nothing yet.
        temperature: of the turn; texts to work on read better below 1.
    """

    texts: tuple[str, ...]
    weight: float
    max_tokens: int = 64
    may_be_cut: bool = False
    temperature: float = 1.0


_QUESTIONS = ("What", "How", "Why", "Which", "Who", "When", "Where", "Can", "Could", "Is", "Are", "Do", "If", "In what")
_REQUESTS = ("Write", "Explain", "Describe", "Give", "List", "Compare", "Create", "Tell", "Help", "Suggest", "Imagine")
_OTHERS = ("Solve", "Find", "Please", "I", "My", "The", "A", "In", "Python", "Act as", "Rewrite", "Classify", "Extract")
_SUMS = ("A farmer has", "If a train", "There are", "A shop sells", "Every day", "Tom has", "Calculate", "How many")
_TRANSLATIONS = ("Translate German to English: ", "Translate the following sentence into French:", "Translate: Die ")
_SUMMARIES = ("Summarize: ", "Summarize the following article:\n\n", "Give a short summary of this text: ", "TL;DR: ")
_READINGS = ("Answer the question based on the text below.\n\n", "Read this passage: ", "Context: ", "Given the text: ")
OPENINGS = (
    Opening(_QUESTIONS, 0.28),
    Opening(_REQUESTS, 0.2),
    Opening(_OTHERS, 0.14),
    Opening(_SUMS, 0.1, max_tokens=96),
    Opening(_TRANSLATIONS, 0.06, max_tokens=96),
    Opening(_SUMMARIES, 0.08, max_tokens=320, may_be_cut=True, temperature=0.7),
    Opening(_READINGS, 0.08, max_tokens=320, may_be_cut=True, temperature=0.7),
    Opening(("",), 0.06),
)


@dataclass(frozen=True)
class AnswerOptions:
    """How to make training text.

    Attributes:
        mix: pairs of an answer's temperature (0 is greedy) and the share of conversations that get it.
        top_p: nucleus of every sampled token.
        max_answer_tokens: longest answer; longer ones are cut.
        max_repeated: a text that has repeated its last few dozen tokens for so long is cut; small models loop, and a
            heads' training learns a loop's beginning as well as all of it. 0 lets it loop.
        openings: sorts of user turns.
        second_turns: share of conversations that go on after an answer that ended.
        system: system prompt; None leaves it to the chat template.
        conversations_per_shard: conversations in a file; those whose turn came to nothing leave no sequence.
        seed: of every draw.
    """

    mix: tuple[tuple[float, float], ...] = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))
    top_p: float = 0.95
    max_answer_tokens: int = 256
    max_repeated: int = 32
    openings: tuple[Opening, ...] = OPENINGS
    second_turns: float = 0.1
    system: str | None = None
    conversations_per_shard: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse shares that are not a distribution."""
        shares = [share for _, share in self.mix]
        if not shares or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"answers: mix must be temperatures with shares that sum to 1, got {self.mix}")
        if not self.openings or min(opening.weight for opening in self.openings) < 0:
            raise ValueError(f"answers: openings must be sorts of turns with weights >= 0, got {self.openings}")

    @property
    def longest(self) -> int:
        """Tokens of user turns and answers in the longest sequence."""
        turn = max(opening.max_tokens for opening in self.openings)
        return 2 * (turn + self.max_answer_tokens) if self.second_turns else turn + self.max_answer_tokens


@dataclass(frozen=True)
class ChatFrame:
    """Token ids around user turns: ``before`` opens the first, ``after`` closes it and opens the answer, ``between``
    stands between an answer (its end token included here) and the next turn; None where the template has no such."""

    before: list[int]
    after: list[int]
    between: list[int] | None


def chat_frame(tokenizer: Any, system: str | None = None) -> ChatFrame:
    """Take the tokenizer's chat template apart around the user's words.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        system: system prompt; None leaves it to the template.

    Raises:
        ValueError: there is no template, or it does not show the user's words once as they are.
    """
    first, answer, second = _MARKERS
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": first})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if text.count(first) != 1:
        raise ValueError(f"answers: the chat template must show the user's turn once, got {text.count(first)} times")
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(first))
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": second}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    between = None
    if text.count(answer) == 1 and text.count(second) == 1:
        between = tokenizer.encode(text.split(answer)[1].split(second)[0], add_special_tokens=False)
    return ChatFrame(before, after, between)


class AnswerWriter:
    """Makes shards of training text.

    Args:
        adapter: the base model; a dtype and a forward pass as decoding will have them.
        tokenizer: its tokenizer, with a chat template.
        options: how.
        num_rows: conversations that run together.
    """

    def __init__(self, adapter: Adapter, tokenizer: Any, options: AnswerOptions, num_rows: int = 64) -> None:
        self.adapter, self.tokenizer, self.options = adapter, tokenizer, options
        self.num_rows = num_rows
        self.frame = chat_frame(tokenizer, options.system)
        self.ends = end_token_ids(None, adapter.model) | set(self.frame.after[:1])
        self.tokens = 0
        """Tokens made so far, user turns included."""

    def write(self, folder: Path, num_conversations: int) -> Iterator[Path]:
        """Write the shards that ``folder`` lacks for ``num_conversations``; yield every shard's path as it is there.

        Raises:
            ValueError: ``folder`` holds shards made with other options.
        """
        folder.mkdir(parents=True, exist_ok=True)
        identity = json.dumps(dataclasses.asdict(self.options))
        size = self.options.conversations_per_shard
        lacking = []
        for index in range(-(-num_conversations // size)):
            path = shard_path(folder, index)
            if not path.exists():
                lacking.append(index)
                continue
            made_with = read_options(path)
            if made_with != identity:
                raise ValueError(f"answers: {path} must be made with {identity}, got {made_with}")
            yield path
        numbers = (number for index in lacking for number in range(index * size, (index + 1) * size))
        ended: dict[int, dict[int, list[Sequence]]] = {index: {} for index in lacking}
        for number, sequences in self._converse(numbers):
            shard = ended[number // size]
            shard[number] = sequences
            if len(shard) == size:
                made = [sequence for number in sorted(shard) for sequence in shard[number]]
                path = shard_path(folder, number // size)
                write_shard(path, made, self.adapter.vocab_size, identity)
                ended.pop(number // size)
                yield path

    def _converse(self, numbers: Iterator[int]) -> Iterator[tuple[int, list[Sequence]]]:
        """Run conversations together; yields each one's number and sequences as it ends."""
        frame = len(self.frame.before) + 2 * len(self.frame.after) + len(self.frame.between or ())
        pool = Pool(self.adapter, self.num_rows, frame + self.options.longest + 1, self.ends)
        running: dict[int, Generator[Request, Continuation, list[Sequence]]] = {}

        def begin(count: int) -> None:
            for _, number in zip(range(count), numbers, strict=False):
                running[number] = self.conversation(number)
                pool.add(number, next(running[number]))

        begin(self.num_rows)
        for number, made in pool.run():
            self.tokens = pool.tokens
            try:
                pool.add(number, running[number].send(made))
            except StopIteration as stop:
                del running[number]
                begin(1)
                yield number, stop.value

    def conversation(self, number: int) -> Generator[Request, Continuation, list[Sequence]]:
        """One conversation: asks for continuations, and returns its sequences; none where a turn came to nothing."""
        options, frame = self.options, self.frame
        draw = random.Random(f"{options.seed} {number}")
        temperature = draw.choices([t for t, _ in options.mix], [share for _, share in options.mix])[0]
        sequences: list[Sequence] = []
        before, key = list(frame.before), None
        while True:
            turn = yield from self._turn(before, draw)
            if not turn:
                return sequences
            key = key if key is not None else text_key(self.tokenizer.decode(turn))
            prompt = before + turn + frame.after
            seed = draw.getrandbits(62)
            answer = yield Request(
                prompt, options.max_answer_tokens, temperature, options.top_p, seed, True, options.max_repeated
            )
            assert answer.hidden is not None
            sequences.append(Sequence(prompt + answer.tokens, len(prompt), temperature, answer.hidden, number, key))
            goes_on = len(sequences) == 1 and draw.random() < options.second_turns
            if not (goes_on and answer.ended and frame.between):
                return sequences
            before = prompt + answer.tokens[:-1] + frame.between

    def _turn(self, before: list[int], draw: random.Random) -> Generator[Request, Continuation, list[int]]:
        """A user turn after ``before``; empty where the model wrote none."""
        options = self.options
        opening = draw.choices(options.openings, [opening.weight for opening in options.openings])[0]
        text, seed = draw.choice(opening.texts), draw.getrandbits(62)
        begun = self.tokenizer.encode(text, add_special_tokens=False) if text else []
        made = yield Request(
            before + begun, opening.max_tokens, opening.temperature, options.top_p, seed, False, options.max_repeated
        )
        if not made.ended and not opening.may_be_cut:
            return []
        turn = begun + (made.tokens[:-1] if made.ended else made.tokens)
        return turn if self.tokenizer.decode(turn).strip() else []
