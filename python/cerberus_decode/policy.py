"""When to draft, and how much: fixed trees, the gate, plain decoding, and sizes chosen from measured costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import cerberus_kernels as ck
from cerberus_kernels._checks import refuse

from .costs import CostTable
from .drafting import best_count
from .layout import Choice, best_first


class Policy:
    """Decides before every step how many drafts the tree may have.

    Subclasses set ``choices`` (best-first draft tree; empty: never drafts) and override :meth:`num_drafts`. A policy
    holds no state of a generation, so one object may serve any number of decoders.
    """

    choices: tuple[Choice, ...] = ()

    @property
    def max_drafts(self) -> int:
        """Drafts of the largest tree that it may ask for."""
        return len(self.choices)

    def resolve(self, heads_config: Any, costs: Callable[[], CostTable]) -> Policy:
        """The same policy with everything filled in that depends on the heads and on this machine.

        Args:
            heads_config: the heads' configuration, None without heads.
            costs: measures, or reads, the cost table; only called by a policy that needs it.
        """
        return self

    def num_drafts(self, hidden: torch.Tensor, entropy: torch.Tensor) -> int:
        """Drafts of the next step, 0 for a plain one.

        Args:
            hidden: ``[B, H]`` last hidden state of the last accepted node.
            entropy: fp32 ``[B]`` entropy in nats of the next-token distribution there.
        """
        return len(self.choices)


class AutoRegressive(Policy):
    """Never drafts: every step is the root-only tree."""


@dataclass(frozen=True, eq=False)
class FixedTree(Policy):
    """The same tree in every step.

    Args:
        size: drafts in the tree (nodes without the root); None takes all choices, ``"auto"`` the number with the
            most expected tokens per second by the heads' measured gains and this machine's costs.
        choices: draft tree, best first; by default the heads' own.

    Raises:
        ValueError: a negative size, or choices that are not a best-first tree.
    """

    size: int | Literal["auto"] | None = None
    choices: tuple[Choice, ...] = ()

    def __post_init__(self) -> None:
        if self.size not in (None, "auto") and (not isinstance(self.size, int) or self.size < 0):
            refuse("FixedTree", "size", "a number of drafts >= 0, None or 'auto'", self.size)
        object.__setattr__(self, "choices", best_first(self.choices))

    def resolve(self, heads_config: Any, costs: Callable[[], CostTable]) -> FixedTree:
        """Fill in the heads' tree and the best size."""
        choices = self.choices
        if not choices:
            choices = best_first(getattr(heads_config, "tree", ()))
            if not choices and self.size != 0:
                raise ValueError("FixedTree: choices must be given, got none here and none in the heads")
        size = self.size
        if size == "auto":
            gains = getattr(heads_config, "tree_gains", ())
            if choices[: len(gains)] != best_first(getattr(heads_config, "tree", ()))[: len(choices)] or not gains:
                raise ValueError("FixedTree: size must be a number, got 'auto' for a tree without measured gains")
            size = best_size(gains, costs())
        elif size is not None and size > len(choices):
            refuse("FixedTree", "size", f"at most {len(choices)}, the choices of this tree", size)
        return dataclasses.replace(self, size=size, choices=choices[:size])


@dataclass(frozen=True, eq=False)
class Gated(Policy):
    """A tree in the steps whose gate is open, a plain step otherwise.

    Args:
        tree: what is drafted when the gate is open.
        threshold: nats for the two entropies (open below it), a probability for ``"learned"`` (open from it on), or
            ``"auto"``: for ``"entropy"``, the value with the most expected tokens per second by the heads' calibration
            and this machine's costs.
        kind: ``"entropy"`` of the next-token distribution, ``"hidden_entropy"``, or ``"learned"``.
        weights: the learned gate's weights, see ``cerberus_kernels.gate``.
    """

    tree: FixedTree = FixedTree()
    threshold: float | Literal["auto"] = "auto"
    kind: Literal["entropy", "hidden_entropy", "learned"] = "entropy"
    weights: Any = None

    def __post_init__(self) -> None:
        if self.threshold == "auto" and self.kind != "entropy":
            refuse("Gated", "threshold", f"a number for kind {self.kind!r}", "'auto'")
        if self.threshold != "auto" and (isinstance(self.threshold, str) or self.threshold != self.threshold):
            refuse("Gated", "threshold", "a number or 'auto'", self.threshold)

    @property
    def choices(self) -> tuple[Choice, ...]:  # type: ignore[override]
        """The tree's choices."""
        return self.tree.choices

    def resolve(self, heads_config: Any, costs: Callable[[], CostTable]) -> Policy:
        """Fill in the tree and the threshold."""
        tree = self.tree.resolve(heads_config, costs)
        threshold = self.threshold
        if threshold == "auto":
            calibration = getattr(heads_config, "gate", None)
            if not calibration:
                raise ValueError("Gated: threshold must be a number, got 'auto' for heads without a calibration")
            threshold = best_threshold(calibration, len(tree.choices), costs())
        return dataclasses.replace(self, tree=tree, threshold=threshold)

    def num_drafts(self, hidden: torch.Tensor, entropy: torch.Tensor) -> int:
        """All of the tree where the gate is open in any sequence, else nothing."""
        assert not isinstance(self.threshold, str), "resolve comes first"
        if self.kind == "entropy":
            _, is_open = ck.gate(hidden, entropy=entropy, kind="entropy", threshold=self.threshold)
        else:
            _, is_open = ck.gate(hidden, kind=self.kind, threshold=self.threshold, weights=self.weights)
        return len(self.tree.choices) if bool(is_open.any()) else 0


def best_size(gains: Sequence[float], costs: CostTable) -> int:
    """Drafts with the most expected tokens per second: the n that maximises (1 + first n gains) / cost of n + 1 nodes.

    Args:
        gains: probability that each node is accepted, best first.
        costs: seconds by number of nodes.

    Returns:
        0 (plain decoding) to ``len(gains)``; the smallest where several are best.

    Example:
        >>> from cerberus_decode.costs import CostTable
        >>> best_size([0.5, 0.25, 0.01], CostTable({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}))
        2
    """
    return best_count(gains, costs.step)


def best_threshold(calibration: dict[str, Any], size: int, costs: CostTable) -> float:
    """Entropy in nats below which drafting ``size`` nodes gives the most expected tokens per second.

    Args:
        calibration: ``{"edges": [bins + 1], "accepted": {size: [bins]}}``, mean accepted drafts by entropy bin with
            equally many positions each; the nearest calibrated size stands for ``size``.
        size: drafts in the tree.
        costs: seconds by number of nodes.

    Returns:
        An edge, or infinity where the gate had best stay open, minus infinity where it never pays.
    """
    accepted = calibration["accepted"]
    means = accepted[min(accepted, key=lambda key: abs(int(key) - size))]
    plain, drafted = costs.step(0), costs.step(size)
    edges = [-float("inf"), *calibration["edges"][1:-1], float("inf")]
    rates = []
    for num_open in range(len(means) + 1):
        tokens = len(means) + sum(means[:num_open])
        rates.append(tokens / (num_open * drafted + (len(means) - num_open) * plain))
    return edges[rates.index(max(rates))]
