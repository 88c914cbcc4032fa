"""Training draft heads on stored hidden states, with checkpoints that survive a kill.

The base model is frozen: a step reads a batch of whole sequences from the feature shards, runs the heads on every
position, and compares head i with the token i places after the root token and with the base model's own distribution
there. Sequences whose number is a multiple of ``HELD_OUT_EVERY`` are never trained on.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import cerberus_kernels as ck

from ..heads import DraftHeads, HeadsConfig
from .features import read_shard

HELD_OUT_EVERY = 32
CHECKPOINT_EVERY_STEPS = 100
WARM_UP_SHARE = 0.05
IGNORED = -1


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        epochs: passes over the shards.
        tokens_per_step: positions per optimiser step, reached with whole sequences.
        learning_rate: AdamW's peak rate; it rises linearly, then falls to a tenth along a cosine.
        soft_weight: share of the loss on the base model's distribution, the rest is on the token itself.
        head_decay: weight of head i's loss is ``head_decay ** (i - 1)``.
        seed: order of shards and sequences.
    """

    epochs: int = 1
    tokens_per_step: int = 1024
    learning_rate: float = 1e-3
    soft_weight: float = 0.5
    head_decay: float = 0.9
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """One report: ``step`` of ``total_steps``, mean ``loss`` and top-1 ``accuracy`` per head since the last one."""

    step: int
    total_steps: int
    loss: float
    accuracy: tuple[float, ...]
    tokens_per_second: float


@dataclass
class Batch:
    """Rows of several sequences: ``hidden`` [T, H], ``root`` int64 [T], ``targets`` int64 [T, K] token ids or -1, and
    ``teacher_rows`` int64 [T, K], the row of ``hidden`` whose distribution the head should match (0 where ignored)."""

    hidden: torch.Tensor
    root: torch.Tensor
    targets: torch.Tensor
    teacher_rows: torch.Tensor


def make_batch(shard: dict[str, torch.Tensor], sequences: list[int], num_heads: int) -> Batch:
    """Rows of ``sequences`` of a shard, with targets that never cross from one sequence into the next."""
    offsets = shard["offsets"]
    spans = [torch.arange(int(offsets[s]), int(offsets[s + 1])) for s in sequences]
    lengths = torch.tensor([len(span) for span in spans])
    rows = torch.cat(spans)
    left = torch.cat([torch.arange(int(n), 0, -1) for n in lengths]) - 1  # rows after each one in its sequence
    ahead = torch.arange(1, num_heads + 1)
    inside = left.unsqueeze(1) >= ahead
    teacher_rows = (torch.arange(len(rows)).unsqueeze(1) + ahead).where(inside, 0)
    tokens = shard["tokens"][rows].to(torch.int64)
    targets = tokens[teacher_rows].where(inside, torch.tensor(IGNORED))
    return Batch(shard["hidden"][rows], tokens, targets, teacher_rows)


def held_out(shard: dict[str, torch.Tensor]) -> list[int]:
    """Sequences of a shard that training leaves out."""
    return list(range(0, len(shard["offsets"]) - 1, HELD_OUT_EVERY))


def training_batches(shards: list[Path], epoch: int, num_heads: int, options: TrainOptions) -> Iterator[Batch]:
    """All batches of one epoch, in an order that depends on the seed and the epoch alone."""
    generator = torch.Generator().manual_seed(options.seed * 1000 + epoch)
    for index in torch.randperm(len(shards), generator=generator).tolist():
        shard = read_shard(shards[index])
        lengths = shard["offsets"].diff().tolist()
        order = torch.randperm(len(lengths), generator=generator).tolist()
        chosen: list[int] = []
        for sequence in order:
            if sequence % HELD_OUT_EVERY == 0 or lengths[sequence] < 2:
                continue
            chosen.append(sequence)
            if sum(lengths[s] for s in chosen) >= options.tokens_per_step:
                yield make_batch(shard, chosen, num_heads)
                chosen = []


def count_steps(shards: list[Path], options: TrainOptions) -> int:
    """Optimiser steps of a whole run."""
    return options.epochs * sum(1 for _ in training_batches(shards, 0, 1, options))


class Trainer:
    """Heads in fp32 under training, with the optimiser's state.

    Args:
        config: the heads to train.
        embedding: fp32 ``[V, H]`` token embeddings of the base model.
        vocab_weight: fp32 ``[V, H]`` its LM head.
        token_map: int32 ``[draft_vocab_size]`` ascending, or None.
        options: how to train.
    """

    def __init__(
        self,
        config: HeadsConfig,
        embedding: torch.Tensor,
        vocab_weight: torch.Tensor,
        token_map: torch.Tensor | None,
        options: TrainOptions,
    ) -> None:
        self.config, self.options, self.token_map = config, options, token_map
        self.embedding = embedding
        rows = torch.arange(config.vocab_size) if token_map is None else token_map.to(torch.int64)
        self.vocab_weight = vocab_weight.index_select(0, rows)
        self.row_of_token = torch.full((config.vocab_size + 1,), IGNORED)  # entry -1 stays -1
        self.row_of_token[rows] = torch.arange(len(rows))
        self.weight = torch.zeros(config.weight_shape, requires_grad=True)
        self.bias = torch.zeros(config.weight_shape[:3], requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.weight, self.bias], lr=options.learning_rate, weight_decay=0.0)
        self.head_weights = options.head_decay ** torch.arange(config.num_heads)
        self.step = 0

    def states(self, hidden: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], root int64 [T] -> the heads' states [T, K, H]."""
        root_embedding = self.embedding[root] * self.config.root_scale if self.config.root_embedding else None
        return ck.head_states(hidden, self.weight, self.bias, root_embedding=root_embedding)

    def learn(self, batch: Batch, total_steps: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        """One optimiser step; returns the loss, and per head how many targets were its best candidate, of how many."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * rate_factor(self.step, total_steps)
        hidden, soft = batch.hidden.float(), self.options.soft_weight > 0
        loss, correct, counted = ck.head_loss(
            self.states(hidden, batch.root),
            self.vocab_weight,
            self.row_of_token[batch.targets],
            teacher_states=hidden if soft else None,
            teacher_index=batch.teacher_rows if soft else None,
            head_weights=self.head_weights,
            soft_weight=self.options.soft_weight,
            return_correct=True,
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item(), correct, counted

    def save(self, path: Path) -> None:
        """Write a checkpoint that :meth:`restore` continues from; it appears whole or not at all."""
        partial = path.with_suffix(".partial")
        state = {"weight": self.weight.detach(), "bias": self.bias.detach(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": self.step, "identity": self.identity()}, partial)
        partial.rename(path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint of the same configuration and options."""
        state = torch.load(path, weights_only=True)
        if state["identity"] != self.identity():
            raise ValueError(f"train: {path} must be a checkpoint of the same options, got {state['identity']}")
        with torch.no_grad():
            self.weight.copy_(state["weight"])
            self.bias.copy_(state["bias"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def identity(self) -> str:
        """What a checkpoint must agree on."""
        config = self.config
        method = (config.kind, config.weight_shape, config.root_embedding, config.root_scale, config.draft_vocab_size)
        return repr((method, dataclasses.astuple(self.options)))

    def heads(self) -> DraftHeads:
        """The heads as they stand."""
        return DraftHeads(self.config, self.weight.detach(), self.bias.detach(), self.token_map)


def rate_factor(step: int, total_steps: int) -> float:
    """Learning rate over its peak: linear warm-up, then a cosine down to a tenth."""
    warm_up = max(1, int(total_steps * WARM_UP_SHARE))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, total_steps - warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(
    trainer: Trainer,
    shards: list[Path],
    checkpoint: Path,
    report: Callable[[Progress], None] = lambda progress: None,
    report_every_steps: int = 10,
) -> None:
    """Run all epochs, from ``checkpoint`` on where there is one; it is rewritten as training goes.

    Args:
        trainer: fresh heads; restored here.
        shards: feature shards, all of them present.
        checkpoint: file of the checkpoint.
        report: called every ``report_every_steps`` steps.
        report_every_steps: steps per report.
    """
    options, num_heads = trainer.options, trainer.config.num_heads
    total_steps = count_steps(shards, options)
    if checkpoint.exists():
        trainer.restore(checkpoint)
    done = trainer.step
    losses, tokens, started = [], 0, time.perf_counter()
    correct, counted = torch.zeros(num_heads), torch.zeros(num_heads)
    batches = (batch for e in range(options.epochs) for batch in training_batches(shards, e, num_heads, options))
    for index, batch in enumerate(batches):
        if index < done:
            continue
        loss, right, seen = trainer.learn(batch, total_steps)
        losses.append(loss)
        tokens += len(batch.root)
        correct += right
        counted += seen
        if trainer.step % report_every_steps == 0 or trainer.step == total_steps:
            accuracy = tuple((correct / counted.clamp_min(1)).tolist())
            rate = tokens / (time.perf_counter() - started)
            report(Progress(trainer.step, total_steps, sum(losses) / len(losses), accuracy, rate))
            losses, tokens, started = [], 0, time.perf_counter()
            correct, counted = torch.zeros(num_heads), torch.zeros(num_heads)
        if trainer.step % CHECKPOINT_EVERY_STEPS == 0:
            trainer.save(checkpoint)
    trainer.save(checkpoint)
