"""What one generation was asked for, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cerberus_kernels._checks import refuse

ACCEPTANCE_MODES = ("greedy", "typical", "sample")
ACTIVE_UNLESS = {
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None,),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "sequence_bias": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}
CACHE_OPTIONS = ("past_key_values", "cache", "cache_implementation")


@dataclass(frozen=True)
class Options:
    """Options of one generation, see :meth:`cerberus_decode.decode.Decoder.stream`."""

    max_new_tokens: int = 256
    eos_token_ids: frozenset[int] = frozenset()
    mode: str = "greedy"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    epsilon: float = 0.09
    delta: float = 0.3
    seed: int = 0
    capacity: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            _check_count("generate", name, getattr(self, name))
        if self.capacity is not None:
            _check_count("generate", "capacity", self.capacity)
        if self.mode not in ACCEPTANCE_MODES:
            refuse("generate", "mode", f"one of {', '.join(ACCEPTANCE_MODES)}", repr(self.mode))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            refuse("generate", "temperature", "finite and >= 0", self.temperature)

    def verify_arguments(self) -> dict[str, Any]:
        """Keywords for ``verify_tree`` that stay the same in every step."""
        if self.mode == "greedy":
            return {"mode": "greedy"}
        filters = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        if self.mode == "typical":
            filters |= {"epsilon": self.epsilon, "delta": self.delta}
        return {"mode": self.mode, "seed": self.seed, **filters}


def refuse_unknown(unknown: dict[str, Any]) -> None:
    """Refuse options that the decoder does not have, saying why for the well-known ones of ``generate``."""
    for name, value in unknown.items():
        if name in CACHE_OPTIONS:
            kind = value if isinstance(value, str) else type(value).__name__
            refuse("generate", name, "absent (the decoder keeps its own cache, which it can roll back)", kind)
        if name in ACTIVE_UNLESS:
            refuse("generate", name, "absent (rules that change logits from token to token are not applied)", value)
        refuse("generate", name, "absent (no such option)", repr(value))


def prompt_tokens(ids: torch.Tensor | Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Prompt as int64 ``[1, S]``; one sequence only, as ``[S]``, ``[1, S]`` or a list of ids."""
    tokens = ids if isinstance(ids, torch.Tensor) else torch.tensor(ids)
    if tokens.ndim == 1:
        tokens = tokens.unsqueeze(0)
    if tokens.ndim != 2 or tokens.shape[0] != 1:
        refuse("generate", "ids", "one sequence, [S] or [1, S] (batch 1 only)", f"shape {list(tokens.shape)}")
    if tokens.shape[1] == 0:
        refuse("generate", "ids", "at least one token long", f"shape {list(tokens.shape)}")
    if tokens.dtype.is_floating_point or tokens.dtype in (torch.bool, torch.complex64):
        refuse("generate", "ids", "of an integer dtype", str(tokens.dtype).removeprefix("torch."))
    for bound in (int(tokens.min()), int(tokens.max())):
        if not 0 <= bound < vocab_size:
            refuse("generate", "ids", f"in [0, {vocab_size})", bound)
    return tokens.to(device, torch.int64)


def end_token_ids(given: int | Iterable[int] | None, model: Any) -> frozenset[int]:
    """End tokens: the given ones, or for None the model's own from its generation configuration."""
    if given is None:
        given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        if given is None:
            given = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if given is None:
        return frozenset()
    return frozenset({int(given)} if isinstance(given, int) else (int(token) for token in given))


def active_rules(model: Any) -> list[str]:
    """Rules in the model's own generation configuration that the decoder does not apply."""
    config = getattr(model, "generation_config", None)
    return [name for name, neutral in ACTIVE_UNLESS.items() if getattr(config, name, None) not in neutral]


def _check_count(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        refuse(op, name, "an integer >= 0", repr(value))
