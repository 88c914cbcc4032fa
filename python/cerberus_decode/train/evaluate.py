"""What trained heads are worth on held-out text: accuracies, the best static trees, and the gate's calibration."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cerberus_kernels as ck

from ..context import ContextMatcher
from ..cost_tree import CONTEXT_DEPTH
from ..drafting import MOST_CERTAIN
from .shards import read_columns, read_shard, repeated
from .trainer import IGNORED, Trainer, chosen_sequences, make_batch

GATE_TREE_SIZES = (4, 8, 16, 32, 63)
GATE_BINS = 12


@dataclass(frozen=True)
class HeldOut:
    """Held-out positions: ``ranks`` int64 [T, K], rank of the right token among each head's k candidates, -1 when it
    is not among them or there is none; ``log_probs`` fp32 [T, K, k] of the candidates; ``entropy`` fp32 [T] in nats of
    the distribution of the root token; ``whole`` bool [T], whether all K targets exist."""

    ranks: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor
    whole: torch.Tensor


@torch.inference_mode()
def held_out_ranks(trainer: Trainer, full_vocab_weight: torch.Tensor, shards: list[Path]) -> HeldOut:
    """Run heads under training over the held-out sequences of ``shards``."""
    config = trainer.config
    found: dict[str, list[torch.Tensor]] = {"ranks": [], "log_probs": [], "entropy": [], "whole": []}
    repeats = repeated(shards)
    for path in shards:
        shard = read_shard(path)
        for sequence in chosen_sequences(shard, repeats, held_out=True):
            batch = make_batch(shard, [sequence], config.num_heads)
            states = trainer.states(batch)
            tokens, log_probs, _ = ck.head_topk(
                states, trainer.vocab_weight, config.num_candidates, token_map=trainer.token_map
            )
            hits = tokens == batch.targets.unsqueeze(-1)  # [T, K, k]
            found["ranks"].append(hits.int().argmax(-1).where(hits.any(-1), -1))
            found["log_probs"].append(log_probs)
            base = (batch.states @ full_vocab_weight.t()).log_softmax(-1)
            found["entropy"].append(-(base.exp() * base).sum(-1))
            found["whole"].append((batch.targets != IGNORED).all(-1))
    return HeldOut(**{name: torch.cat(parts) for name, parts in found.items()})


def accuracy_table(found: HeldOut, num_candidates: int) -> tuple[tuple[float, ...], ...]:
    """Share of positions at which head i's candidate of each rank is right, ``[K][k]``."""
    ranks = found.ranks[found.whole]
    shares = (ranks.unsqueeze(-1) == torch.arange(num_candidates)).float().mean(0)
    return tuple(tuple(round(value, 5) for value in row) for row in shares.tolist())


def best_tree(found: HeldOut, num_drafts: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """The static tree whose nodes were accepted most often, best node first.

    A node is a path of ranks, and it is accepted where the right tokens have exactly these ranks; the counts are of
    whole paths, so no independence between heads is assumed. A prefix is accepted at least as often as the path, so
    sorting by count keeps prefixes first.

    Returns:
        choices and, for each, the share of positions at which it is accepted; a sum of the first n shares is the
        expected number of accepted drafts of the n-draft tree.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    ranks = found.ranks[found.whole].tolist()
    for row in ranks:
        path: tuple[int, ...] = ()
        for rank in row:
            if rank < 0:
                break
            path += (rank,)
            counts[path] += 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[:num_drafts]
    return [path for path, _ in ordered], [round(count / max(1, len(ranks)), 5) for _, count in ordered]


def accepted_drafts(found: HeldOut, choices: list[tuple[int, ...]]) -> torch.Tensor:
    """Drafts accepted at every whole held-out position with the tree of ``choices``, int64 [T]."""
    known = set(choices)
    accepted = []
    for row in found.ranks[found.whole].tolist():
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in known:
            depth += 1
        accepted.append(depth)
    return torch.tensor(accepted)


def calibrate(found: HeldOut) -> tuple[tuple[float, float], ...]:
    """Offset and factor per head that turn its log-probabilities into those of acceptance.

    A node is judged only where the drafts before it were accepted, and there later heads are right more often than
    they think. Fitted by maximum likelihood over the candidates of the positions where all earlier heads have the
    right token among theirs.
    """
    table = []
    kept = found.whole.clone()
    for head in range(found.ranks.shape[1]):
        rank = found.ranks[kept, head]
        log_probs = found.log_probs[kept, head]  # [T, k]
        hits = rank.unsqueeze(1) == torch.arange(log_probs.shape[1])
        table.append(_fit(log_probs.double(), hits) if hits.any() else (0.0, 1.0))
        kept &= found.ranks[:, head] >= 0
    return tuple(table)


def _fit(log_probs: torch.Tensor, hits: torch.Tensor) -> tuple[float, float]:
    line = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([line], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        likely = (line[0] + line[1] * log_probs).clamp_max(math.log(MOST_CERTAIN))
        value = -likely.where(hits, torch.log1p(-likely.exp())).sum(-1).mean()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    offset, factor = line.detach().tolist()
    return round(offset, 4), round(factor, 4)


def gate_calibration(found: HeldOut, choices: list[tuple[int, ...]]) -> dict[str, Any]:
    """Mean accepted drafts by entropy of the next-token distribution, for trees of several sizes.

    Returns:
        ``{"edges": [bins + 1], "accepted": {size: [bins]}}``; bins hold equally many positions.
    """
    entropy = found.entropy[found.whole]
    edges = torch.quantile(entropy, torch.linspace(0, 1, GATE_BINS + 1))
    bins = torch.bucketize(entropy, edges[1:-1])
    table = {}
    for size in GATE_TREE_SIZES:
        accepted = accepted_drafts(found, choices[:size]).float()
        means = [accepted[bins == b].mean().item() for b in range(GATE_BINS)]
        table[str(size)] = [round(mean, 4) for mean in means]
    return {"edges": [round(edge, 4) for edge in edges.tolist()], "accepted": table}


def context_agreement(shards: list[Path], longest: int = 14) -> list[tuple[float, int]]:
    """How often a greedy answer goes on as it did the last time, by the length of the run that agrees.

    Args:
        shards: training text; answers at other temperatures are left out.
        longest: length that stands for itself and all above.

    Returns:
        Share and number of tokens for every length from 1 on; the shares are
        :data:`cerberus_decode.context.AGREEMENT`.
    """
    right, counted = [0] * (longest + 1), [0] * (longest + 1)
    for path in shards:
        shard = read_columns(path, ("tokens", "offsets", "answer_start", "temperature"))
        tokens, offsets = shard["tokens"].to(torch.int64).tolist(), shard["offsets"].tolist()
        columns = zip(shard["answer_start"].tolist(), shard["temperature"].tolist(), strict=True)
        for index, (start, temperature) in enumerate(columns):
            text = tokens[offsets[index] : offsets[index + 1]]
            if temperature > 0:
                continue
            matcher = ContextMatcher()
            matcher.extend(text[:start])
            for place in range(start, len(text) - 1):
                matcher.extend([text[place]])
                for length, chain in matcher.matches(CONTEXT_DEPTH):
                    for step, (guess, token) in enumerate(zip(chain, text[place + 1 :], strict=False)):
                        bucket = min(length + step, longest)
                        counted[bucket] += 1
                        right[bucket] += guess == token
                        if guess != token:
                            break
    return [(right[n] / max(1, counted[n]), counted[n]) for n in range(1, longest + 1)]
