"""The command's options: every number has a stated range, checked before anything heavy is imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import typer

DTYPES = ("float32", "bfloat16")
METHODS = ("ar", "lookup", "medusa", "cerberus", "cerberus_gated", "cerberus_cost", "cerberus_hybrid")

# What each option takes, in words; the one line of a refusal is made from it.
ACCEPTS: dict[str, str] = {}


def number(
    name: str, kind: type, least: float, most: float, help_text: str, *, words: tuple[str, ...] = (), **settings: Any
) -> Any:
    """An option that takes a number of ``kind`` from ``least`` to ``most``, or one of ``words``."""
    noun = "an integer" if kind is int else "a number"
    accepts = f"{noun} from {least} to {most}" + "".join(f" or {word}" for word in words)
    metavar = f"{least}..{most}" + "".join(f"|{word}" for word in words)
    return _option(name, _number_parser(kind, least, most, words, accepts), accepts, metavar, help_text, **settings)


def choice(name: str, allowed: tuple[str, ...], help_text: str) -> Any:
    """An option that takes one of ``allowed``."""
    accepts = "one of " + ", ".join(allowed)

    def parse(text: str) -> str:
        if text not in allowed:
            raise typer.BadParameter(f"must be {accepts}, got {text!r}")
        return text

    return _option(name, parse, accepts, "|".join(allowed), help_text)


def choices(name: str, allowed: tuple[str, ...], help_text: str) -> Any:
    """An option that takes a comma-separated list from ``allowed``."""
    accepts = "a comma-separated list from " + ", ".join(allowed)

    def parse(text: str) -> str:
        items = text.split(",")
        if not set(items) <= set(allowed) or len(set(items)) < len(items):
            raise typer.BadParameter(f"must be {accepts}, each at most once, got {text!r}")
        return text

    return _option(name, parse, accepts, "A,B,..", help_text)


def _number_parser(
    kind: type, least: float, most: float, words: tuple[str, ...], accepts: str
) -> Callable[[Any], int | float | str]:
    def parse(text: Any) -> int | float | str:
        if text in words:
            return text
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # false for NaN
            raise typer.BadParameter(f"must be {accepts}, got {text!r}")
        return value

    return parse


def _option(name: str, parse: Callable[[Any], Any], accepts: str, metavar: str, help_text: str, **settings: Any) -> Any:
    ACCEPTS[name] = accepts
    return typer.Option(name, parser=parse, metavar=metavar, help=help_text, **settings)


Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Folder, GGUF file or model hub id; by default the embedded model."),
]
Heads = Annotated[
    str | None,
    typer.Option("--heads", metavar="FOLDER", help="Folder of trained draft heads; by default those that ship."),
]
Dtype = Annotated[str, choice("--dtype", DTYPES, "Element type of the weights and of the computation.")]
MaxNewTokens = Annotated[int, number("--max-new-tokens", int, 0, 1_000_000, "Tokens to generate at most.")]
MaxPromptTokens = Annotated[
    int, number("--max-prompt-tokens", int, 1, 1_000_000, "Longer prompts keep this many of their first tokens.")
]
TreeSize = Annotated[
    str,
    number(
        "--tree-size",
        int,
        0,
        1024,
        "Drafts in the tree, its root not counted; 0 drafts nothing; auto: the best size for this machine.",
        words=("auto",),
    ),
]
GateThreshold = Annotated[
    float | None,
    number(
        "--gate-threshold",
        float,
        -math.inf,
        math.inf,
        "Draft only while the next-token entropy (nats) is below this; by default the calibrated value.",
    ),
]
Threads = Annotated[int | None, number("--threads", int, 1, 1024, "CPU threads; by default torch's choice.")]
Seed = Annotated[int, number("--seed", int, 0, 2**63 - 1, "Seed of sampled text.")]
Optimize = Annotated[
    bool,
    typer.Option("--optimize/--no-optimize", help="Repack the weights for this CPU, for every method alike."),
]
