"""`cerberus bench`: decoding methods on the same prompts in one process, taking turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .messages import tell
from .prompts import encode, read_prompts
from .session import Session, activity

if TYPE_CHECKING:
    from ..compare import Difference, Outcome

WARM_UP_TOKENS = 8
TABLE_WIDTH = 110  # where no terminal says its own
TIME_PARTS = ("draft_s", "forward_s", "verify_s", "commit_s", "other_s")


def bench(
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="JSON lines with question_id, category and turns (the first is used) or prompt; "
            "by default twelve prompts that come with the package.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        options.number(
            "--limit",
            int,
            1,
            1_000_000,
            "Use this many prompts, in rounds over the categories: the first of each, then the second of each, ...",
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    dtype: options.Dtype = "float32",
    methods: Annotated[
        str, options.choices("--methods", options.METHODS, "What to compare, from " + ", ".join(options.METHODS) + ".")
    ] = ",".join(options.METHODS),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the rows to this file as JSON.")
    ] = None,
    model: options.Model = None,
    heads: options.Heads = None,
    tree_size: options.TreeSize = "auto",
    gate_threshold: options.GateThreshold = None,
    threads: options.Threads = None,
    optimize: options.Optimize = True,
) -> None:
    """Compare decoding methods: greedy text, tokens counted after end-token and length cuts, for all alike.

    Which method goes first changes from prompt to prompt. tokens/s includes the prompt's forward pass.
    """
    chosen = read_prompts(prompts, limit)
    names = methods.split(",")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"must be a file in an existing folder, got {json_file}", param_hint="--json")
    with activity() as report:
        session = Session(
            model=model,
            heads=heads,
            methods=names,
            dtype=dtype,
            threads=threads,
            optimize=optimize,
            tree_size=tree_size,
            gate_threshold=gate_threshold,
            report=report,
        )
        encoded = [
            (prompt.category, encode(session.base.tokenizer, prompt.text, max_tokens=max_prompt_tokens))
            for prompt in chosen
        ]
        outcomes = run_all(session, encoded, max_new_tokens, report)
    import torch

    from ..compare import BASELINE, differences, rows

    num_rows = 1 + max(decoder.policy.max_drafts for decoder in session.decoders.values())
    found = differences(session.adapter, outcomes, encoded, num_rows) if BASELINE in names else []
    table = rows(outcomes, found)
    if json_file is not None:
        partial = json_file.with_name(json_file.name + ".partial")
        partial.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        partial.rename(json_file)
    show(table, found, [prompt.identity for prompt in chosen], dtype)
    setting = f"{session.base.name}, {dtype}, {torch.get_num_threads()} threads, linear layers: {session.packing}"
    trees = [f"{name} {decoder.policy.max_drafts}" for name, decoder in session.decoders.items() if name != "ar"]
    print("\n".join([setting, *([f"drafts in a tree at most: {', '.join(trees)}"] if trees else [])]))


def run_all(session: Session, encoded: list[tuple[str, list[int]]], max_new_tokens: int, report: Any) -> list[Outcome]:
    """Warm every method up on a few tokens, then let them take turns."""
    from ..compare import take_turns

    def runner(method: str) -> Any:
        def run(ids: list[int]) -> Any:
            result = session.decoders[method].generate(ids, max_new_tokens=max_new_tokens)
            return result.tokens, result.metrics

        return run

    for decoder in session.decoders.values():
        decoder.generate(encoded[0][1], max_new_tokens=min(max_new_tokens, WARM_UP_TOKENS))
    outcomes: list[Outcome] = []
    total = len(encoded)
    for outcome in take_turns({method: runner(method) for method in session.decoders}, encoded):
        outcomes.append(outcome)
        if len(outcomes) % len(session.decoders) == 0:
            report(f"prompt {outcome.prompt_index + 1} of {total}")
    return outcomes


def show(table: list[dict[str, Any]], found: list[Difference], identities: list[str], dtype: str) -> None:
    """Print the comparison over all prompts, the speed-up by category, and every differing text."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)
    total = {row["method"]: row for row in table if row["category"] == "all"}
    console.print(_overall(total))
    if len({row["category"] for row in table}) > 2:
        console.print(_by_category(table, list(total)))
    console.print(
        "tokens/step: the model's own token of each step and the accepted drafts. time split: draft/forward/verify/"
        "commit/other. identical: greedy text equal to that of ar.",
        style="dim",
    )
    for difference in found:
        verdict = "explained by rounding" if difference.is_explained else "NOT explained by rounding"
        tell(
            f"{difference.method} differs from ar on prompt {identities[difference.prompt_index]} at token "
            f"{difference.position}: top-two gap of ar {difference.gap:.3g}, "
            f"row-count noise of the model in {dtype} {difference.noise:.3g}: {verdict}"
        )


def _overall(total: dict[str, dict[str, Any]]) -> Any:
    from rich.table import Table

    prompts = next(iter(total.values()))["prompts"]
    table = Table(title=f"{prompts} prompts", title_justify="left")
    table.add_column("method", no_wrap=True)
    for name in ("tokens/s", "speed-up", "tokens/step", "gate open", "time split %", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for method, row in total.items():
        parts = [row[part] / row["seconds"] if row["seconds"] else 0.0 for part in TIME_PARTS]
        table.add_row(
            method,
            f"{row['tokens_per_second']:.1f}",
            _speed_up(row, total.get("ar")),
            f"{row['tokens_per_step']:.2f}",
            f"{row['gate_open_share']:.0%}",
            "/".join(f"{100 * part:.0f}" for part in parts),
            _identical(row),
        )
    return table


def _identical(row: dict[str, Any]) -> str:
    if row["identical_to_ar"] is None:
        return "-"
    if row["identical_to_ar"]:
        return "yes"
    return f"no, {row['differing_prompts']} differ"


def _speed_up(row: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    if not baseline or not baseline["tokens_per_second"]:
        return "-"
    return f"{row['tokens_per_second'] / baseline['tokens_per_second']:.2f}x"


def _by_category(rows: list[dict[str, Any]], methods: list[str]) -> Any:
    from rich.table import Table

    table = Table(title="by category: speed-up against ar (tokens/step)", title_justify="left")
    table.add_column("category")
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["category"], {})[row["method"]] = row
    shown = [method for method in methods if method != "ar"]
    for method in shown:
        table.add_column(method, justify="right")
    for category, by_method in cells.items():
        table.add_row(
            category,
            *(
                f"{_speed_up(by_method[method], by_method.get('ar'))} ({by_method[method]['tokens_per_step']:.2f})"
                for method in shown
            ),
        )
    return table
