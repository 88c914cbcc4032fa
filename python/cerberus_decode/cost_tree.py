"""Trees made anew in every step from what is likely and what it costs."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cerberus_kernels as ck
from cerberus_kernels._checks import refuse

from .context import ContextMatcher, agreement
from .costs import CostTable
from .drafting import Candidates, DraftTree, best_count, calibrated
from .heads import DraftState
from .policy import Policy

CONTEXT_DEPTH = 12


@dataclass(frozen=True)
class Limits:
    """What a step has room for: ``depth`` of the tree and ``drafts`` in it."""

    depth: int
    drafts: int


@dataclass(frozen=True)
class HeadGains:
    """What drafting with heads brings, by the entropy of the next-token distribution.

    Attributes:
        edges: inner edges of the bins, in nats.
        accepted: per bin and size, the mean number of accepted drafts.
        seconds: per size, what its step costs.
    """

    edges: tuple[float, ...]
    accepted: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    @staticmethod
    def of(calibration: dict[str, Any], costs: CostTable, most: int) -> HeadGains:
        """From the gate's calibration in a heads configuration."""
        sizes = [size for size in sorted(map(int, calibration["accepted"])) if size <= most]
        columns = [calibration["accepted"][str(size)] for size in sizes]
        rows = tuple(zip(*columns, strict=True))
        return HeadGains(tuple(calibration["edges"][1:-1]), rows, tuple(costs.step(size) for size in sizes))

    def best_rate(self, entropy: float, expected: float) -> float:
        """Most tokens per second of a step at this entropy; other sources promise ``expected`` drafts already."""
        accepted = self.accepted[bisect.bisect_left(self.edges, entropy)] if self.accepted else ()
        pairs = zip(accepted, self.seconds, strict=False)
        return max(((1 + max(drafts, expected)) / seconds for drafts, seconds in pairs), default=0.0)


@dataclass(frozen=True, eq=False)
class CostTree(Policy):
    """A tree of its own for every step: the nodes, from all sources, that bring the most expected tokens per second.

    The heads' log-probabilities, calibrated on held-out text, say how likely every path is; a match in the text so
    far says the same of its continuation. Of all these nodes, likeliest first, the step takes as many as this machine's
    costs make worth while; none is a plain step. Heads run only where they can better what the text offers.

    Args:
        size: drafts in a tree at most.
        context: whether the text so far is a source, beside the heads or alone.
        costs: this machine's; these three are filled in by :meth:`resolve`.
        calibration: from the heads' configuration.
        head_gains: from the heads' configuration and the costs.
    """

    size: int = 48
    context: bool = False
    costs: CostTable | None = None
    calibration: tuple[tuple[float, ...], ...] = ()
    head_gains: HeadGains | None = None

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 0:
            refuse("CostTree", "size", "a number of drafts >= 0", self.size)

    @property
    def max_drafts(self) -> int:
        """Drafts of the largest tree that it may ask for."""
        return self.size

    def resolve(self, heads_config: Any, costs: Callable[[], CostTable]) -> CostTree:
        """Fill in this machine's costs and what the heads' configuration knows of them."""
        table = costs()
        gate = getattr(heads_config, "gate", None)
        calibration = tuple(tuple(row) for row in getattr(heads_config, "calibration", ()))
        gains = HeadGains.of(gate, table, self.size) if gate else None
        return dataclasses.replace(self, costs=table.up_to(self.size), calibration=calibration, head_gains=gains)

    def tree(
        self, state: DraftState, matcher: ContextMatcher | None, root: int, entropy: float, limits: Limits
    ) -> DraftTree | None:
        """The next step's tree, or None for a plain step.

        Args:
            state: the heads' state; heads that are None propose nothing.
            matcher: the text so far with the root, None without that source.
            root: newest token.
            entropy: of the next-token distribution behind the last accepted node, in nats.
            limits: what there is room for.
        """
        assert self.costs is not None, "resolve comes first"
        found = Candidates()
        if matcher is not None:
            for length, chain in matcher.matches(min(limits.depth, CONTEXT_DEPTH)):
                found.add_chain(chain, agreement(length, len(chain)))
        probabilities = [found.probability[node] for node in found.best_first()]
        drafting = 0.0
        if state.has_heads and self._heads_pay(probabilities, entropy):
            drafting = self.costs.draft_s
            tokens, log_probs = state.propose()
            likely = calibrated(log_probs, self.calibration)[:, : limits.depth]
            add_grown(found, tokens[0].tolist(), likely, self.size)
        order = found.best_first()[: min(self.size, limits.drafts)]
        count = best_count([found.probability[node] for node in order], lambda n: self._cost(n, drafting))
        return found.tree(root, order[:count]) if count else None

    def _cost(self, num_drafts: int, drafting: float) -> float:
        assert self.costs is not None
        return self.costs.forward(num_drafts + 1) + drafting

    def _heads_pay(self, context: Sequence[float], entropy: float) -> bool:
        """Whether heads promise more tokens per second than the context's drafts alone, by the calibration."""
        if self.head_gains is None or self.costs is None:
            return True
        count = best_count(context, lambda n: self._cost(n, 0.0))
        without = (1 + sum(context[:count])) / self._cost(count, 0.0)
        return self.head_gains.best_rate(entropy, sum(context)) > without


def add_grown(found: Candidates, tokens: list[list[int]], log_probs: torch.Tensor, size: int) -> None:
    """Add the ``size`` likeliest nodes of the heads' candidates.

    Args:
        found: receives them; nodes that are there keep the greater probability.
        tokens: of every head and rank.
        log_probs: fp32 ``[1, K, k]``, of acceptance.
        size: nodes.
    """
    grown = ck.grow_tree(log_probs, size + 1)
    parents, slots = grown.parents[0].tolist(), grown.slots[0].tolist()
    probabilities = grown.score[0].exp().tolist()
    nodes = [-1]
    for index in range(1, int(grown.num_nodes)):
        head, rank = slots[index]
        nodes.append(found.add(nodes[parents[index]], tokens[head][rank], probabilities[index]))
