"""From training text to a heads folder: configuration, training, evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..heads import DraftHeads, HeadsConfig, fingerprint
from ..sequence_layer import SequenceConfig
from .evaluate import accuracy_table, best_tree, calibrate, gate_calibration, held_out_ranks
from .shards import Shard, read_columns, read_shard
from .trainer import Progress, Trainer, TrainOptions, train

TREE_DRAFTS = 63


@dataclass(frozen=True)
class HeadsOptions:
    """Which heads to train.

    Attributes:
        kind: ``"cerberus"`` (linked) or ``"medusa"``.
        num_heads: K.
        num_blocks: L; the first block's link carries only the root embedding, so linked heads want two.
        root_embedding: give the first head the newest token's embedding (linked heads only).
        sequence_layer: put a sequence layer in front of the heads, see :mod:`..sequence_layer`.
        draft_vocab_size: the most frequent tokens of the answers that heads may propose; 0 for the whole vocabulary.
        train: how to train.
    """

    kind: str = "cerberus"
    num_heads: int = 4
    num_blocks: int = 2
    root_embedding: bool = True
    sequence_layer: bool = False
    draft_vocab_size: int = 8192
    train: TrainOptions = field(default_factory=TrainOptions)


@dataclass(frozen=True)
class Reports:
    """Callbacks for a progress display; each may be left out.

    Attributes:
        stage: name of the stage that begins.
        shard: shards done, shards in all.
        progress: training progress.
    """

    stage: Callable[[str], None] = lambda name: None
    shard: Callable[[int, int], None] = lambda done, total: None
    progress: Callable[[Progress], None] = lambda progress: None


def frequent_tokens(shards: list[Path], vocab_size: int, count: int) -> torch.Tensor | None:
    """The ``count`` most frequent answer tokens, int32 ascending; None when that is the whole vocabulary."""
    if count == 0 or count >= vocab_size:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for path in shards:
        shard = read_columns(path, ("tokens", "offsets", "answer_start"))
        tokens, lengths = shard["tokens"].to(torch.int64), shard["offsets"].diff()
        position = torch.arange(len(tokens)) - shard["offsets"][:-1].repeat_interleave(lengths)
        in_answer = position >= shard["answer_start"].to(torch.int64).repeat_interleave(lengths)
        counts += torch.bincount(tokens[in_answer], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values.to(torch.int32)


def root_scale(embedding: torch.Tensor, shard: Shard) -> float:
    """Power of two nearest to the ratio of the hidden states' magnitude to the embeddings'."""
    following = torch.ones(len(shard["tokens"]), dtype=torch.bool)
    following[shard["offsets"][1:] - 1] = False  # no state at a sequence's last token
    hidden = shard["hidden"][following].float().square().mean().sqrt()
    tokens = embedding[shard["tokens"].to(torch.int64)].square().mean().sqrt()
    return float(2.0 ** torch.log2(hidden / tokens).round())


def train_heads(
    model: Any,
    base_name: str,
    shards: list[Path],
    checkpoint: Path,
    options: HeadsOptions,
    reports: Reports | None = None,
) -> DraftHeads:
    """Train one set of heads for ``model`` and measure its trees and gate on held-out text.

    Args:
        model: transformers causal LM.
        base_name: what to call it in the heads' configuration.
        shards: training text with hidden states, see :mod:`.shards`.
        checkpoint: file that a killed run continues from.
        options: which heads, and how.
        reports: callbacks.

    Returns:
        The trained heads with accuracies, tree and gate calibration in their configuration; not yet saved.
    """
    reports = reports or Reports()
    embedding = model.get_input_embeddings().weight.detach().float()
    vocab_weight = model.get_output_embeddings().weight.detach().float()
    config = heads_config(embedding, vocab_weight, shards, options)
    config = dataclasses.replace(config, base_model=base_name)
    token_map = frequent_tokens(shards, config.vocab_size, options.draft_vocab_size)
    trainer = Trainer(config, embedding, vocab_weight, token_map, options.train)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    reports.stage("training")
    train(trainer, shards, checkpoint, reports.progress)
    reports.stage("evaluation on held-out text")
    return evaluated(trainer, vocab_weight, shards)


def heads_config(
    embedding: torch.Tensor, vocab_weight: torch.Tensor, shards: list[Path], options: HeadsOptions
) -> HeadsConfig:
    """The configuration of heads that are yet to be trained."""
    vocab_size, hidden_size = vocab_weight.shape
    linked = options.kind == "cerberus"
    uses_embedding = (linked and options.root_embedding) or options.sequence_layer
    sequence = None
    if options.sequence_layer:
        heads, kv_heads, head_dim, inner = sequence_sizes(hidden_size)
        sequence = SequenceConfig(hidden_size, heads, kv_heads, head_dim, inner)
    return HeadsConfig(
        kind=options.kind,
        num_heads=options.num_heads,
        num_blocks=options.num_blocks,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        root_embedding=linked and options.root_embedding,
        root_scale=root_scale(embedding, read_shard(shards[0])) if uses_embedding else 1.0,
        draft_vocab_size=min(options.draft_vocab_size or vocab_size, vocab_size),
        base_sha256=fingerprint(vocab_weight),
        sequence=sequence,
    )


def sequence_sizes(hidden_size: int) -> tuple[int, int, int, int]:
    """Query heads, key and value heads, head size and inner width of a sequence layer for a model's width."""
    head_dim = next(size for size in (64, 32, 16, 8) if hidden_size % size == 0)
    heads = hidden_size // head_dim
    kv_heads = next(count for count in (heads // 3, heads // 2, heads, 1) if count and heads % count == 0)
    return heads, kv_heads, head_dim, -(-8 * hidden_size // 3 // 48) * 48


def evaluated(trainer: Trainer, vocab_weight: torch.Tensor, shards: list[Path]) -> DraftHeads:
    """Trained heads with measured accuracies, best-first tree and gate calibration in their configuration."""
    heads, config = trainer.heads(), trainer.config
    found = held_out_ranks(trainer, vocab_weight, shards)
    choices, gains = best_tree(found, TREE_DRAFTS)
    training = dataclasses.asdict(trainer.options)
    measured = dataclasses.replace(
        config,
        tree=tuple(choices),
        tree_gains=tuple(gains),
        accuracy=accuracy_table(found, config.num_candidates),
        gate=gate_calibration(found, choices),
        calibration=calibrate(found),
        training={**training, "held_out_positions": int(found.whole.sum()), "shards": len(shards)},
    )
    return DraftHeads(measured, heads.weight, heads.bias, heads.token_map, heads.sequence_weights)
