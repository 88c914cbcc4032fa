"""Training draft heads on stored hidden states, with checkpoints that survive a kill.

The base model is frozen: a step reads a batch of whole sequences from the shards, runs the heads on every position
of an answer, and compares head i with the token i places after the root token and with the base model's own
distribution there. Held-out sequences, see :func:`.shards.is_held_out`, and repeated prompts are never trained on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cerberus_kernels as ck
from cerberus_kernels._checks import refuse

from ..heads import DraftHeads, HeadsConfig
from .muon import Muon
from .sequence import SequenceLayer
from .shards import Shard, is_held_out, read_columns, read_shard, repeated

CHECKPOINT_EVERY_STEPS = 100
WARM_UP_SHARE = 0.05
IGNORED = -1


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        epochs: passes over the shards.
        tokens_per_step: positions per optimiser step, reached with whole sequences.
        learning_rate: peak rate of Muon for the matrices, and a third of it of AdamW for the vectors; it rises
            linearly, then falls to a tenth along a cosine.
        soft_weight: share of the loss on the base model's distribution, the rest is on the token itself.
        head_decay: weight of head i's loss is ``head_decay ** (i - 1)``.
        seed: order of shards and sequences.
        max_tokens: positions after which training stops, the last pass cut short; 0 for whole passes.
    """

    epochs: int = 1
    tokens_per_step: int = 1024
    learning_rate: float = 3e-3
    soft_weight: float = 0.5
    head_decay: float = 0.9
    seed: int = 0
    max_tokens: int = 0


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
    """Whole sequences, padded at the end, and which of their positions heads learn at.

    Attributes:
        hidden: bfloat16 ``[S, L, H]``.
        following: int64 ``[S, L]``, the token behind each position, the root token of a step taken there.
        rows: int64 ``[T]``, indices into the ``S * L`` positions: those whose root token is in an answer.
        targets: int64 ``[T, K]`` token ids, -1 past the end.
        teacher_rows: int64 ``[T, K]``, which of the T rows has the distribution that the head should match; 0 where
            there is none.
    """

    hidden: torch.Tensor
    following: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    teacher_rows: torch.Tensor

    @property
    def root(self) -> torch.Tensor:
        """int64 ``[T]``."""
        return self.following.flatten()[self.rows]

    @property
    def states(self) -> torch.Tensor:
        """fp32 ``[T, H]``, the base model's."""
        return self.hidden.flatten(0, 1)[self.rows].float()


def make_batch(shard: Shard, sequences: list[int], num_heads: int) -> Batch:
    """The batch of some sequences of a shard; targets never cross from one sequence into the next."""
    offsets, starts = shard["offsets"].tolist(), shard["answer_start"].tolist()
    lengths = [offsets[s + 1] - offsets[s] - 1 for s in sequences]  # positions that a token follows
    longest = max(lengths)
    hidden = torch.zeros(len(sequences), longest, shard["hidden"].shape[1], dtype=torch.bfloat16)
    following = torch.zeros(len(sequences), longest, dtype=torch.int64)
    rows, targets, teachers, before = [], [], [], 0
    ahead = torch.arange(1, num_heads + 1)
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        first = offsets[sequence]
        hidden[index, :length] = shard["hidden"][first : first + length]
        following[index, :length] = shard["tokens"][first + 1 : first + 1 + length].to(torch.int64)
        learned = torch.arange(starts[sequence] - 1, length)
        place = learned.unsqueeze(1) + ahead  # [rows, K], positions of the heads' targets
        inside = place < length
        rows.append(index * longest + learned)
        targets.append(following[index][place.clamp_max(length - 1)].where(inside, IGNORED))
        teachers.append((place - (starts[sequence] - 1) + before).where(inside, 0))
        before += len(learned)
    return Batch(hidden, following, torch.cat(rows), torch.cat(targets), torch.cat(teachers))


def chosen_sequences(shard: Shard, repeats: set[tuple[int, int]], held_out: bool = False) -> list[int]:
    """Sequences of a shard to train on, or those that are held out; at least two answer tokens, no repeats."""
    columns = (shard[name].tolist() for name in ("key", "conversation", "answer_start"))
    lengths = shard["offsets"].diff().tolist()
    return [
        index
        for index, (key, number, start) in enumerate(zip(*columns, strict=True))
        if is_held_out(key) == held_out and (key, number) not in repeats and lengths[index] - start >= 2
    ]


def training_batches(
    shards: list[Path], repeats: set[tuple[int, int]], epoch: int, num_heads: int, options: TrainOptions
) -> Iterator[Batch]:
    """All batches of one epoch, in an order that depends on the seed and the epoch alone."""
    generator = torch.Generator().manual_seed(options.seed * 1000 + epoch)
    for index in torch.randperm(len(shards), generator=generator).tolist():
        shard = read_shard(shards[index])
        answers = (shard["offsets"].diff() - shard["answer_start"]).tolist()
        able = chosen_sequences(shard, repeats)
        chosen: list[int] = []
        for place in torch.randperm(len(able), generator=generator).tolist():
            chosen.append(able[place])
            if sum(answers[s] for s in chosen) >= options.tokens_per_step:
                yield make_batch(shard, chosen, num_heads)
                chosen = []


def count_steps(shards: list[Path], repeats: set[tuple[int, int]], options: TrainOptions) -> int:
    """Optimiser steps of a whole run."""
    steps = 0
    tokens = 0
    for epoch in range(options.epochs):
        generator = torch.Generator().manual_seed(options.seed * 1000 + epoch)
        for index in torch.randperm(len(shards), generator=generator).tolist():
            shard = read_columns(shards[index], ("offsets", "answer_start", "key", "conversation"))
            answers = (shard["offsets"].diff() - shard["answer_start"]).tolist()
            able = chosen_sequences(shard, repeats)
            taken = 0
            for place in torch.randperm(len(able), generator=generator).tolist():
                taken += answers[able[place]]
                if taken >= options.tokens_per_step:
                    steps += 1
                    tokens += taken
                    taken = 0
                    if options.max_tokens and tokens >= options.max_tokens:
                        return steps
    return steps


class Trainer:
    """Heads in fp32 under training, with the optimiser's state.

    Args:
        config: the heads to train.
        embedding: fp32 ``[V, H]`` token embeddings of the base model.
        vocab_weight: fp32 ``[V, H]`` its LM head.
        token_map: int32 ``[draft_vocab_size]`` ascending, or None.
        options: how to train.

    Attributes:
        sequence: the sequence layer, or None.
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
        torch.manual_seed(options.seed)
        self.sequence = SequenceLayer(config.sequence) if config.sequence else None
        parameters: list[Any] = [self.weight, *(self.sequence.parameters() if self.sequence else ())]
        vectors = [self.bias, *(parameter for parameter in parameters if parameter.ndim == 1)]
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": Muon([parameter for parameter in parameters if parameter.ndim > 1]),
            "adamw": torch.optim.AdamW(vectors, weight_decay=0.0),
        }
        self.head_weights = options.head_decay ** torch.arange(config.num_heads)
        self.step = 0

    def states(self, batch: Batch) -> torch.Tensor:
        """The heads' states ``[T, K, H]`` at a batch's rows."""
        scale = self.config.root_scale
        hidden = batch.states
        if self.sequence is not None:
            following = self.embedding[batch.following] * scale
            hidden = self.sequence(batch.hidden.float(), following).flatten(0, 1)[batch.rows]
        root_embedding = self.embedding[batch.root] * scale if self.config.root_embedding else None
        return ck.head_states(hidden, self.weight, self.bias, root_embedding=root_embedding)

    def learn(self, batch: Batch, total_steps: int) -> tuple[float, torch.Tensor, torch.Tensor]:
        """One optimiser step; returns the loss, and per head how many targets were its best candidate, of how many."""
        rate = self.options.learning_rate * rate_factor(self.step, total_steps)
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate if name == "muon" else rate / 3
        soft = self.options.soft_weight > 0
        loss, correct, counted = ck.head_loss(
            self.states(batch),
            self.vocab_weight,
            self.row_of_token[batch.targets],
            teacher_states=batch.states if soft else None,
            teacher_index=batch.teacher_rows if soft else None,
            head_weights=self.head_weights,
            soft_weight=self.options.soft_weight,
            return_correct=True,
        )
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.step += 1
        return loss.item(), correct, counted

    def save(self, path: Path) -> None:
        """Write a checkpoint that :meth:`restore` continues from; it appears whole or not at all."""
        partial = path.with_suffix(".partial")
        state: dict[str, Any] = {"weight": self.weight.detach(), "bias": self.bias.detach()}
        state["optimizers"] = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        state["sequence"] = self.sequence.state_dict() if self.sequence else {}
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
        if self.sequence:
            self.sequence.load_state_dict(state["sequence"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.step = state["step"]

    def identity(self) -> str:
        """What a checkpoint must agree on."""
        config = self.config
        method = (config.kind, config.weight_shape, config.root_embedding, config.root_scale, config.draft_vocab_size)
        return repr((method, config.sequence, dataclasses.astuple(self.options)))

    def heads(self) -> DraftHeads:
        """The heads as they stand."""
        trained = self.sequence.state_dict() if self.sequence else {}
        sequence = {name: tensor.detach() for name, tensor in trained.items()}
        return DraftHeads(self.config, self.weight.detach(), self.bias.detach(), self.token_map, sequence)


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
    repeats = repeated(shards)
    total_steps = count_steps(shards, repeats, options)
    if total_steps == 0:
        refuse(
            "train", "tokens_per_step", "at most the positions that there are to learn from", options.tokens_per_step
        )
    if checkpoint.exists():
        trainer.restore(checkpoint)
    done = trainer.step
    losses, tokens, started = [], 0, time.perf_counter()
    correct, counted = torch.zeros(num_heads), torch.zeros(num_heads)
    epochs = (training_batches(shards, repeats, e, num_heads, options) for e in range(options.epochs))
    for index, batch in enumerate(itertools.islice(itertools.chain.from_iterable(epochs), total_steps)):
        if index < done:
            continue
        loss, right, seen = trainer.learn(batch, total_steps)
        losses.append(loss)
        tokens += len(batch.rows)
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
