"""Plain decoding of many independent requests at once: a fixed number of rows, each refilled as soon as it ends.

Training text is made by the million tokens, and there a draft tree gains nothing: with some dozens of sequences in a
pass the arithmetic of the pass is what costs, and plain decoding wastes none of it. What the base model computes on
the way, the hidden state of every token, is kept, because it is what draft heads are trained on. A request that
begins as what a free row still holds (the system prompt, or a conversation that goes on) starts from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

import cerberus_kernels as ck
from cerberus_kernels._checks import refuse

from ..adapter import Adapter
from ..layout import LayoutCache

LONGEST_PERIOD = 64


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: tokens at most, at least one.
        temperature: 0 is greedy.
        top_p: nucleus of sampled tokens.
        seed: of the noise; up to rounding, the text depends on the request alone and not on what else runs.
        keep_hidden: whether the hidden states are wanted.
        max_repeated: tokens of a text that only repeats its last :data:`LONGEST_PERIOD` or fewer, after which it is
            given up; 0 for no such limit.
    """

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    keep_hidden: bool = False
    max_repeated: int = 0


@dataclass
class Continuation:
    """What a request became.

    Attributes:
        tokens: new token ids, the end token included if one was reached.
        ended: whether an end token was reached.
        hidden: bfloat16 ``[prompt + new - 1, H]``, the LM head's input at every token but the last; None if unwanted.
        repeated: for every period, how many of the newest tokens equal the one that many places before.
    """

    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    hidden: torch.Tensor | None = None
    repeated: np.ndarray = field(default_factory=lambda: np.zeros(LONGEST_PERIOD, dtype=np.int64))

    def add(self, token: int) -> None:
        """Take the next token."""
        before = np.array(self.tokens[: -LONGEST_PERIOD - 1 : -1])  # newest first
        self.repeated[: len(before)] += 1
        self.repeated[: len(before)][before != token] = 0
        self.tokens.append(token)


class Pool:
    """Rows that run together.

    Args:
        adapter: the model.
        num_rows: rows B.
        capacity: cache slots per row: the longest prompt with its continuation.
        end_token_ids: tokens that end a request.

    Example:
        >>> import torch, transformers
        >>> from cerberus_decode.adapter import Adapter
        >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
        >>> pool = Pool(Adapter(transformers.LlamaForCausalLM(config).eval()), num_rows=2, capacity=16)
        >>> for index in range(3):
        ...     pool.add(index, Request([5, 7, 11], max_new_tokens=4 + index))
        >>> [(index, len(made.tokens)) for index, made in pool.run()]
        [(0, 4), (1, 5), (2, 6)]
    """

    def __init__(
        self, adapter: Adapter, num_rows: int, capacity: int, end_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._adapter = adapter
        self._ends = end_token_ids
        self._cache = adapter.new_cache(capacity, batch=num_rows)
        self._root_only = LayoutCache(adapter.device).layout((), 0, 0)
        self._waiting: list[tuple[int, Request]] = []
        self._running: list[tuple[int, Request, Continuation] | None] = [None] * num_rows
        self._held: list[list[int]] = [[] for _ in range(num_rows)]  # tokens whose keys and values a row has
        self._hidden: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]  # their states, [n, H] pieces
        self._roots = [0] * num_rows
        self.tokens = 0
        """Tokens made so far, of all requests."""

    @property
    def num_free(self) -> int:
        """Rows that no request runs in or waits for."""
        return sum(row is None for row in self._running) - len(self._waiting)

    def add(self, key: int, request: Request) -> None:
        """Queue a request under a key of the caller's.

        Raises:
            ValueError: an empty prompt or continuation, or more tokens than a row has slots.
        """
        if not request.prompt or request.max_new_tokens < 1:
            refuse("Pool.add", "request", "a prompt and a continuation of at least one token each", request)
        length = len(request.prompt) + request.max_new_tokens
        if length > self._cache.capacity:
            refuse("Pool.add", "request", f"at most {self._cache.capacity} tokens long (the row)", length)
        self._waiting.append((key, request))

    def run(self) -> Iterator[tuple[int, Continuation]]:
        """Run until all is done; yields requests as they end, and takes what is added meanwhile."""
        while True:
            with torch.inference_mode():
                ended = self._fill()
                if not ended and any(self._running):
                    ended = self._step()
            yield from ended
            if not (ended or self._waiting or any(self._running)):
                return

    def _fill(self) -> list[tuple[int, Continuation]]:
        """Run the prompts of waiting requests in free rows; what ends with its first token is given back."""
        ended = []
        free = [row for row, running in enumerate(self._running) if running is None]
        while free and self._waiting:
            key, request = self._waiting.pop(0)
            row = max(free, key=lambda row: _common(self._held[row], request.prompt))
            free.remove(row)
            ended += self._start(row, key, request)
        return ended

    def _start(self, row: int, key: int, request: Request) -> list[tuple[int, Continuation]]:
        shared = min(_common(self._held[row], request.prompt), len(request.prompt) - 1)
        cache = self._cache.row(row)
        cache.set_length(shared)
        prompt = torch.tensor([request.prompt[shared:]], device=self._adapter.device)
        hidden, logits = self._adapter.prefill(prompt, cache, keep_hidden=True)
        self._cache.adopt(row, cache)
        before = torch.cat(self._hidden[row])[:shared] if shared else hidden.new_empty(0, hidden.shape[2])
        self._hidden[row] = [torch.cat([before, hidden[0]])]
        self._held[row] = list(request.prompt)
        self._running[row] = (key, request, Continuation())
        return self._choose([row], logits)

    def _step(self) -> list[tuple[int, Continuation]]:
        """One token of every running row; free rows run along, and what they write is past their length."""
        tokens = torch.tensor(self._roots, dtype=torch.int32, device=self._adapter.device).unsqueeze(1)
        hidden, logits = self._adapter.forward(tokens, self._root_only, self._cache)
        rows = [row for row, running in enumerate(self._running) if running]
        self._cache.advance_rows(rows)
        for row in rows:
            self._hidden[row].append(hidden[row])
            self._held[row].append(self._roots[row])
        return self._choose(rows, logits[rows])

    def _choose(self, rows: list[int], logits: torch.Tensor) -> list[tuple[int, Continuation]]:
        """The next token of each of ``rows`` from ``logits`` ``[rows, 1, V]``."""
        requests, positions = [], []
        for row in rows:
            running = self._running[row]
            assert running is not None
            requests.append(running[1])
            positions.append(len(running[1].prompt) + len(running[2].tokens))
        device = self._adapter.device
        verdict = ck.verify_tree(
            logits,
            torch.zeros(len(rows), 1, dtype=torch.int32, device=device),
            self._root_only.parents,
            mode="sample",
            temperature=torch.tensor([float(request.temperature) for request in requests], device=device),
            top_p=torch.tensor([request.top_p if request.temperature else 1.0 for request in requests], device=device),
            seed=torch.tensor([request.seed for request in requests], device=device),
            position=torch.tensor(positions, device=device),
            vocab_size=self._adapter.vocab_size,
            max_depth=0,
        )
        tokens = verdict.tokens[:, 0].tolist()
        self.tokens += len(tokens)
        ended = []
        for row, token in zip(rows, tokens, strict=True):
            running = self._running[row]
            assert running is not None
            key, request, made = running
            made.add(token)
            made.ended = token in self._ends
            self._roots[row] = token
            loops = 0 < request.max_repeated <= made.repeated.max()
            if made.ended or loops or len(made.tokens) == request.max_new_tokens:
                if request.keep_hidden:
                    self._hidden[row] = [torch.cat(self._hidden[row])]
                    made.hidden = self._hidden[row][0].to(torch.bfloat16)
                self._running[row] = None
                ended.append((key, made))
        return ended


def _common(held: list[int], prompt: list[int]) -> int:
    """Tokens that two sequences begin with alike."""
    pairs = zip(held, prompt, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(held), len(prompt)))
