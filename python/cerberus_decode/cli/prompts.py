"""Prompts from files and arguments, and their form as token ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

BUILT_IN = Path(__file__).resolve().parent.parent / "assets" / "prompts.jsonl"
CONTEXT_TOKENS = 8


@dataclass(frozen=True)
class Prompt:
    """A prompt of a benchmark: ``identity`` as in its file, ``category``, and the ``text`` of the user's turn."""

    identity: str
    category: str
    text: str


def read_prompts(path: Path | None, limit: int | None = None) -> list[Prompt]:
    """Read JSON lines with ``question_id``, ``category`` and ``turns`` (the first is used) or ``prompt``.

    Args:
        path: the file; None for the prompts that ship with this package.
        limit: keep this many, taken in rounds: the first of every category, then the second of every category, and
            so on, so that a short run still covers all of them; the order of the file is kept otherwise.

    Raises:
        typer.BadParameter: the file is missing, or a line is not such a prompt.
    """
    source = path or BUILT_IN
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"must be a readable file, got {source} ({error})", param_hint="--prompts") from error
    prompts = [_parse(line, number, source) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise typer.BadParameter(f"must be a file with prompts, got {source} without any", param_hint="--prompts")
    return prompts if limit is None else spread(prompts, limit)


def _parse(line: str, number: int, source: Path) -> Prompt:
    try:
        fields = json.loads(line)
        text = fields["prompt"] if "prompt" in fields else fields["turns"][0]
        if not isinstance(text, str):
            raise TypeError
    except (ValueError, TypeError, LookupError) as error:
        wanted = "must hold JSON lines with turns or prompt"
        raise typer.BadParameter(f"{wanted}, got another in {source} line {number}", param_hint="--prompts") from error
    return Prompt(str(fields.get("question_id", number)), str(fields.get("category", "prompts")), text)


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first ``limit`` prompts, taken in rounds over the categories, in the order of ``prompts``."""
    seen: dict[str, int] = {}
    rounds = []
    for index, prompt in enumerate(prompts):
        rounds.append((seen.setdefault(prompt.category, 0), index))
        seen[prompt.category] += 1
    return [prompts[index] for index in sorted(index for _, index in sorted(rounds)[:limit])]


def prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the argument, a file, or a pipe on standard input.

    Raises:
        typer.BadParameter: none or two of them.
    """
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("must not come with a prompt argument", param_hint="--prompt-file")
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(
                f"must be a readable text file, got {prompt_file} ({error})", param_hint="--prompt-file"
            ) from error
    if prompt is not None:
        return prompt
    if not sys.stdin.isatty():
        return sys.stdin.read()
    raise typer.BadParameter("must be given, or --prompt-file, or text on standard input", param_hint="PROMPT")


def encode(
    tokenizer: Any, text: str, *, system: str | None = None, raw: bool = False, max_tokens: int | None = None
) -> list[int]:
    """Token ids of a user's turn in the model's chat template, ready for the answer.

    Args:
        tokenizer: a transformers tokenizer.
        text: what the user says.
        system: system prompt; None leaves the template's own.
        raw: take ``text`` as it is, without the template; also for tokenizers that have none.
        max_tokens: longest allowed result. The text loses its end until the whole, template included, fits; where
            the template alone is longer, the result is cut.
    """
    ids = _encode_whole(tokenizer, text, system, raw)
    if max_tokens is None or len(ids) <= max_tokens:
        return ids
    text_ids = tokenizer.encode(text, add_special_tokens=False)
    keep = len(text_ids)
    while len(ids) > max_tokens and keep > 0:
        keep = max(0, keep - (len(ids) - max_tokens))
        ids = _encode_whole(tokenizer, tokenizer.decode(text_ids[:keep]), system, raw)
    return ids[:max_tokens]


def _encode_whole(tokenizer: Any, text: str, system: str | None, raw: bool) -> list[int]:
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


class TextStream:
    """Text of growing token lists: what is sure is given out, half characters wait for the tokens that end them.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the pending tokens and those just before, which decide about spaces
        self._given = 0  # tokens of _ids whose text has been given out

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens and return the text that became sure."""
        self._ids.extend(ids)
        text = self._text(self._ids)
        if text.endswith("\ufffd"):
            return ""
        return self._give(text)

    def finish(self) -> str:
        """The rest, complete characters or not."""
        return self._give(self._text(self._ids))

    def _give(self, text: str) -> str:
        before = self._text(self._ids[: self._given])
        self._ids = self._ids[-CONTEXT_TOKENS:]
        self._given = len(self._ids)
        return text[len(before) :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
