"""`cerberus train`: draft heads for a base model, from nothing but the model itself."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .messages import tell

if TYPE_CHECKING:
    from ..train.trainer import Progress


def train(
    output: Annotated[Path, typer.Option("--output", metavar="FOLDER", help="Where the finished heads go.")],
    kind: Annotated[
        str, options.choice("--kind", ("cerberus", "medusa"), "Linked (cerberus) or independent (medusa) heads.")
    ] = "cerberus",
    work: Annotated[
        Path | None,
        typer.Option(
            "--work",
            metavar="FOLDER",
            help="Answers, hidden states and checkpoints; a killed run that is started again continues from there. "
            "By default OUTPUT with .work added.",
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers",
            metavar="FILE",
            help="Train on these answers (safetensors with tokens, offsets, answer_start) instead of making some.",
        ),
    ] = None,
    num_answers: Annotated[
        int, options.number("--num-answers", int, 64, 10_000_000, "Answers that the base model writes to train on.")
    ] = 6000,
    model: options.Model = None,
    dtype: options.Dtype = "float32",
    num_heads: Annotated[int, options.number("--num-heads", int, 1, 16, "Draft heads K.")] = 4,
    num_blocks: Annotated[int, options.number("--num-blocks", int, 1, 8, "Residual blocks L of every head.")] = 2,
    draft_vocab_size: Annotated[
        int,
        options.number(
            "--draft-vocab-size", int, 0, 10_000_000, "Most frequent tokens that heads may propose; 0: every token."
        ),
    ] = 8192,
    sequence_layer: Annotated[
        bool, typer.Option("--sequence-layer/--no-sequence-layer", help="Put a sequence layer in front of the heads.")
    ] = False,
    epochs: Annotated[int, options.number("--epochs", int, 1, 1000, "Passes over the answers.")] = 1,
    max_tokens: Annotated[
        int,
        options.number("--max-tokens", int, 0, 10**12, "Positions to stop training after; 0: whole passes."),
    ] = 0,
    soft_weight: Annotated[
        float,
        options.number("--soft-weight", float, 0.0, 1.0, "Share of the loss on the base model's own distribution."),
    ] = 0.5,
    learning_rate: Annotated[float, options.number("--learning-rate", float, 1e-8, 1.0, "Peak learning rate.")] = 3e-3,
    tokens_per_step: Annotated[
        int, options.number("--tokens-per-step", int, 16, 1_000_000, "Positions in an optimiser step.")
    ] = 1024,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> None:
    """Train draft heads; started again after a kill, it continues where it stopped."""
    if answers is not None and not answers.is_file():
        raise typer.BadParameter(f"must be a file, got {answers}", param_hint="--answers")
    import torch

    from ..adapter import Adapter
    from ..models import load
    from ..optimize import optimize
    from ..train.run import HeadsOptions, train_heads
    from ..train.trainer import TrainOptions

    if threads is not None:
        torch.set_num_threads(threads)
    base = load(model, dtype=dtype, report=tell)
    optimize(base.model)
    work, name = work or output.with_name(output.name + ".work"), output.name
    chosen = HeadsOptions(
        kind=kind,
        num_heads=num_heads,
        num_blocks=num_blocks,
        sequence_layer=sequence_layer,
        draft_vocab_size=draft_vocab_size,
        train=TrainOptions(
            epochs=epochs,
            learning_rate=learning_rate,
            tokens_per_step=tokens_per_step,
            seed=seed,
            max_tokens=max_tokens,
            soft_weight=soft_weight,
        ),
    )
    with Display() as display:
        adapter = Adapter(base.model)
        if answers:
            shards = answer_shards(adapter, answers_file(answers), work / "text", display)
        else:
            shards = make_answers(adapter, base.tokenizer, work / "text", num_answers, seed, display)
        heads = train_heads(base.model, base.name, shards, work / name / "checkpoint.pt", chosen, display.reports())
    heads.save(output)
    first = ", ".join(f"{row[0]:.3f}" for row in heads.config.accuracy)
    tell(f"heads in {output}; held-out accuracy of head 1, 2, ...: {first}")


def answers_file(path: Path) -> dict[str, Any]:
    """Training text from a file, checked for the three tensors that training needs."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    missing = {"tokens", "offsets", "answer_start"} - set(found)
    if missing:
        raise ValueError(f"{path} must hold tokens, offsets and answer_start, got no {', '.join(sorted(missing))}")
    return found


class Display:
    """A bar per stage on a terminal, a line now and then elsewhere, both on standard error."""

    LINES_PER_STAGE = 20

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True, highlight=False)
        self._live = console.is_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not self._live)
        self._task: Any = None
        self._stage = ""
        self._said = -1

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def stage(self, name: str) -> None:
        """A new stage begins."""
        self._stage, self._said = name, -1
        self._task = self._progress.add_task(name, total=None, note="")
        if not self._live:
            tell(name)

    def advance(self, done: int, total: int, note: str = "") -> None:
        """``done`` of ``total`` units of the stage are done."""
        self._progress.update(self._task, completed=done, total=total, note=note)
        part = done * self.LINES_PER_STAGE // max(total, 1)
        if not self._live and part != self._said:
            self._said = part
            tell(f"{self._stage}: {done} of {total} {note}".rstrip())

    def training(self, progress: Progress) -> None:
        """Training moved on."""
        accuracy = " ".join(f"{value:.2f}" for value in progress.accuracy)
        note = f"loss {progress.loss:.3f}, accuracy per head {accuracy}, {progress.tokens_per_second:.0f} tokens/s"
        self.advance(progress.step, progress.total_steps, note)

    def reports(self) -> Any:
        """The callbacks that training takes."""
        from ..train.run import Reports

        return Reports(stage=self.stage, shard=self.advance, progress=self.training)


def make_answers(adapter: Any, tokenizer: Any, folder: Path, count: int, seed: int, display: Display) -> list[Path]:
    """Let the base model write conversations, shard by shard, or take those of an earlier run."""
    from ..train.answers import AnswerOptions, AnswerWriter

    display.stage("answers")
    options = AnswerOptions(seed=seed)
    options = dataclasses.replace(options, conversations_per_shard=min(options.conversations_per_shard, count))
    writer = AnswerWriter(adapter, tokenizer, options)
    total, start = -(-count // options.conversations_per_shard), time.perf_counter()
    paths: list[Path] = []
    for path in writer.write(folder, count):
        paths.append(path)
        rate = writer.tokens / (time.perf_counter() - start)
        display.advance(len(paths), total, f"{rate:.0f} tokens/s" if writer.tokens else "")
    return sorted(paths)


def answer_shards(adapter: Any, answers: dict[str, Any], folder: Path, display: Display) -> list[Path]:
    """Run the base model over answers that were made elsewhere."""
    from ..train.features import SEQUENCES_PER_SHARD, write_shards

    display.stage("hidden states")
    total = -(-len(answers["answer_start"]) // SEQUENCES_PER_SHARD)
    paths: list[Path] = []
    for path in write_shards(adapter, answers, folder):
        paths.append(path)
        display.advance(len(paths), total)
    return paths
