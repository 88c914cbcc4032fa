"""The whole way from a base model to a heads folder: answers, features, training, evaluation.

Every stage writes into the work folder and is skipped when its result is there, so a killed run continues where it
stopped: answers and features by shard, training by checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..heads import DraftHeads, HeadsConfig, fingerprint
from .evaluate import accuracy_table, best_tree, gate_calibration, held_out_ranks
from .features import SEQUENCES_PER_SHARD, read_shard, write_shards
from .trainer import Progress, Trainer, TrainOptions, train

TREE_DRAFTS = 63
ORDER_SEED = 0


@dataclass(frozen=True)
class HeadsOptions:
    """Which heads to train.

    Attributes:
        kind: ``"cerberus"`` (linked) or ``"medusa"``.
        num_heads: K.
        num_blocks: L; the first block's link carries only the root embedding, so linked heads want two.
        root_embedding: give the first head the newest token's embedding (linked heads only).
        draft_vocab_size: the most frequent tokens of the answers that heads may propose; 0 for the whole vocabulary.
        train: how to train.
    """

    kind: str = "cerberus"
    num_heads: int = 4
    num_blocks: int = 2
    root_embedding: bool = True
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


def sequence_order(num_sequences: int) -> list[int]:
    """Order in which sequences go to shards: the same on every run, so that shards can be made one by one."""
    return torch.randperm(num_sequences, generator=torch.Generator().manual_seed(ORDER_SEED)).tolist()


def frequent_tokens(answers: dict[str, torch.Tensor], vocab_size: int, count: int) -> torch.Tensor | None:
    """The ``count`` most frequent answer tokens, int32 ascending; None when that is the whole vocabulary."""
    if count == 0 or count >= vocab_size:
        return None
    tokens, offsets = answers["tokens"].to(torch.int64), answers["offsets"].to(torch.int64)
    position = torch.arange(len(tokens)) - offsets[:-1].repeat_interleave(offsets.diff())
    in_answer = position >= answers["answer_start"].to(torch.int64).repeat_interleave(offsets.diff())
    counts = torch.bincount(tokens[in_answer], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values.to(torch.int32)


def root_scale(embedding: torch.Tensor, shard: dict[str, torch.Tensor]) -> float:
    """Power of two nearest to the ratio of the hidden states' magnitude to the embeddings'."""
    hidden = shard["hidden"].float().square().mean().sqrt()
    tokens = embedding[shard["tokens"].to(torch.int64)].square().mean().sqrt()
    return float(2.0 ** torch.log2(hidden / tokens).round())


def train_heads(
    model: Any,
    base_name: str,
    answers: dict[str, torch.Tensor],
    work: Path,
    options: HeadsOptions,
    reports: Reports | None = None,
) -> DraftHeads:
    """Train one set of heads for ``model`` and measure its trees and gate on held-out text.

    Args:
        model: transformers causal LM in fp32.
        base_name: what to call it in the heads' configuration.
        answers: training text, see :mod:`.answers`.
        work: folder for features (shared between kinds of heads) and checkpoints.
        options: which heads, and how.
        reports: callbacks.

    Returns:
        The trained heads with accuracies, tree and gate calibration in their configuration; not yet saved.
    """
    reports = reports or Reports()
    reports.stage("hidden states")
    order = sequence_order(len(answers["answer_start"]))
    shards: list[Path] = []
    total = -(-len(order) // SEQUENCES_PER_SHARD)
    for path in write_shards(model, answers, order, work / "features"):
        shards.append(path)
        reports.shard(len(shards), total)
    return fit(model, base_name, answers, shards, work / options.kind / "checkpoint.pt", options, reports)


def fit(
    model: Any,
    base_name: str,
    answers: dict[str, torch.Tensor],
    shards: list[Path],
    checkpoint: Path,
    options: HeadsOptions,
    reports: Reports,
) -> DraftHeads:
    """The part of :func:`train_heads` after the features: optimise, then evaluate."""
    embedding = model.get_input_embeddings().weight.detach().float()
    vocab_weight = model.get_output_embeddings().weight.detach().float()
    vocab_size, hidden_size = vocab_weight.shape
    token_map = frequent_tokens(answers, vocab_size, options.draft_vocab_size)
    linked = options.kind == "cerberus"
    with_root = linked and options.root_embedding
    config = HeadsConfig(
        kind=options.kind,
        num_heads=options.num_heads,
        num_blocks=options.num_blocks,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        root_embedding=with_root,
        root_scale=root_scale(embedding, read_shard(shards[0])) if with_root else 1.0,
        draft_vocab_size=vocab_size if token_map is None else len(token_map),
        base_model=base_name,
        base_sha256=fingerprint(vocab_weight),
    )
    trainer = Trainer(config, embedding, vocab_weight, token_map, options.train)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    reports.stage("training")
    train(trainer, shards, checkpoint, reports.progress)
    reports.stage("evaluation on held-out text")
    return evaluated(trainer.heads(), embedding, vocab_weight, shards, dataclasses.asdict(options.train))


def evaluated(
    heads: DraftHeads,
    embedding: torch.Tensor,
    vocab_weight: torch.Tensor,
    shards: list[Path],
    training: dict[str, Any],
) -> DraftHeads:
    """The same heads with measured accuracies, best-first tree and gate calibration in their configuration."""
    config = heads.config
    found = held_out_ranks(heads.bind(embedding, vocab_weight), vocab_weight, shards)
    choices, gains = best_tree(found, TREE_DRAFTS)
    measured = dataclasses.replace(
        config,
        tree=tuple(choices),
        tree_gains=tuple(gains),
        accuracy=accuracy_table(found, config.num_candidates),
        gate=gate_calibration(found, choices),
        training={**training, "held_out_positions": int(found.whole.sum()), "shards": len(shards)},
    )
    return DraftHeads(measured, heads.weight, heads.bias, heads.token_map)
