"""`cerberus generate`: text as it comes, then one line about how it came."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .messages import tell
from .prompts import TextStream, encode, prompt_text
from .session import Session, activity

if TYPE_CHECKING:
    from ..metrics import Metrics

ACCEPTED_COLOUR, PLAIN = "\x1b[32m", "\x1b[0m"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The user's turn; by default standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    model: options.Model = None,
    heads: options.Heads = None,
    method: Annotated[str, options.choice("--method", options.METHODS, "How to decode.")] = "cerberus",
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: Annotated[
        float,
        options.number(
            "--temperature",
            float,
            0,
            100,
            "0: greedy, the text of plain decoding. Above 0: typical acceptance, which keeps every draft that is "
            "not improbable at this temperature and so is not plain sampling.",
        ),
    ] = 0.0,
    tree_size: options.TreeSize = "auto",
    gate_threshold: options.GateThreshold = None,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour the tokens that were accepted drafts (on a terminal).")
    ] = False,
    optimize: options.Optimize = True,
) -> None:
    """Generate text.

    The text goes to standard output, everything else to standard error.
    """
    text = prompt_text(prompt, prompt_file)
    if gate_threshold is not None and method != "cerberus_gated":
        raise typer.BadParameter("must come with --method cerberus_gated", param_hint="--gate-threshold")
    with activity() as report:
        session = Session(
            model=model,
            heads=heads,
            methods=[method],
            dtype=dtype,
            threads=threads,
            optimize=optimize,
            tree_size=tree_size,
            gate_threshold=gate_threshold,
            report=report,
        )
        ids = encode(session.base.tokenizer, text, system=system, raw=raw)
    sampling: dict[str, Any] = {"mode": "greedy"}
    if temperature > 0:
        sampling = {"mode": "typical", "temperature": temperature, "seed": seed}
    generation = session.decoders[method].stream(ids, max_new_tokens=max_new_tokens, **sampling)
    colour = show_drafts and sys.stdout.isatty()
    if show_drafts and not colour:
        tell("--show-drafts: standard output is no terminal, so drafts are not coloured")
    write_steps(generation, TextStream(session.base.tokenizer), colour)
    tell(summary(generation.metrics, generation.finish_reason))


def write_steps(generation: Any, stream: TextStream, colour: bool) -> None:
    """Write the text of every step as soon as its characters are complete."""
    for step in generation:
        for ids, is_draft in ((step.tokens[: step.num_accepted], True), (step.tokens[step.num_accepted :], False)):
            piece = stream.push(ids) if ids else ""
            sys.stdout.write(f"{ACCEPTED_COLOUR}{piece}{PLAIN}" if colour and is_draft and piece else piece)
        sys.stdout.flush()
    sys.stdout.write(stream.finish() + "\n")
    sys.stdout.flush()


def summary(metrics: Metrics, finish_reason: str) -> str:
    """One line: tokens emitted, tokens per second, tokens per step (the model's own included), gate-open share."""
    ended = {"eos": "end token", "length": "--max-new-tokens reached", "context": "context full"}
    share = "-" if metrics.gate_open_share is None else f"{metrics.gate_open_share:.0%}"
    return (
        f"{metrics.tokens} tokens ({ended.get(finish_reason, finish_reason)}), "
        f"{metrics.tokens_per_second or 0:.1f} tokens/s, {metrics.tokens_per_step or 0:.2f} tokens per step "
        f"({metrics.accepted_per_step or 0:.2f} accepted drafts), gate open in {share} of steps"
    )
