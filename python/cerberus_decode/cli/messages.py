"""One line for every refusal."""

from __future__ import annotations

import sys
from typing import Any

from .options import ACCEPTS


def usage_line(error: Any) -> str:
    """The line for a wrong command line: the option, what it takes, what it got."""
    option = _option_of(error)
    message = " ".join(error.format_message().split())
    if "requires an argument" in message:
        message = f"option {option} must be followed by {ACCEPTS.get(option, 'a value')}, got nothing"
    elif error.message.startswith("must ") and option:
        message = f"{'option ' if option.startswith('-') else ''}{option} {error.message}"
    command = error.ctx.command_path if getattr(error, "ctx", None) else "cerberus"
    return f"{message.rstrip('.')} (see `{command} --help`)"


def _option_of(error: Any) -> str:
    if getattr(error, "option_name", None):
        return error.option_name
    hint = getattr(error, "param_hint", None)
    if hint:
        return str(hint)
    names = getattr(getattr(error, "param", None), "opts", None) or []
    return names[0] if names else ""


def is_expected(error: BaseException) -> bool:
    """Whether an error is of a kind that says in its own words what is missing or wrong."""
    if isinstance(error, BrokenPipeError):
        return False
    named = ("BackendUnavailable", "ModelUnavailable")
    return isinstance(error, (ValueError, ImportError, OSError)) or type(error).__name__ in named


def one_line(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def tell(line: str) -> None:
    """A line about progress, on standard error so that standard output holds results alone."""
    print(f"cerberus: {line}", file=sys.stderr, flush=True)
