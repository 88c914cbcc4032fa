"""Draft trees: the parents encoding, packed masks, and the host-side description of one static tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ._checks import refuse

Choice = tuple[int, ...]
WORD_BITS = 32


def first_malformed_node(parents: Sequence[int]) -> int:
    """Index of the first node that breaks ``parents[0] == -1, 0 <= parents[i] < i``; -1 if none does."""
    for node, parent in enumerate(parents):
        if (parent != -1) if node == 0 else not 0 <= parent < node:
            return node
    return -1


def check_parents(op: str, parents: torch.Tensor, num_nodes: torch.Tensor | None = None) -> None:
    """Refuse malformed trees: wrong root, a cycle, a parent at or after its node, a second root.

    Args:
        op: operator's name for the message.
        parents: int32 ``[B, N]``.
        num_nodes: int32 ``[B]`` or None; entries past it are not looked at.
    """
    nodes = parents.shape[1]
    counts = [nodes] * parents.shape[0] if num_nodes is None else num_nodes.tolist()
    for b, (row, count) in enumerate(zip(parents.tolist(), counts, strict=True)):
        if not 1 <= count <= nodes:
            raise ValueError(f"{op}: num_nodes must lie in [1, {nodes}], got {count} in row {b}")
        bad = first_malformed_node(row[:count])
        if bad >= 0:
            raise ValueError(
                f"{op}: parents must be -1 for the root and lie in [0, node) for every other node, "
                f"got {row[bad]} for node {bad} in row {b}"
            )


def mask_words(num_nodes: int) -> int:
    """Words in a row of a packed mask: ceil(N / 32)."""
    return (num_nodes + WORD_BITS - 1) // WORD_BITS


def pack_mask(visible: torch.Tensor) -> torch.Tensor:
    """Bool [.., N, N] -> int32 [.., N, W], bit j % 32 of word j // 32."""
    nodes = visible.shape[-1]
    padded = torch.nn.functional.pad(visible.to(torch.int64), (0, mask_words(nodes) * WORD_BITS - nodes))
    words = padded.unflatten(-1, (mask_words(nodes), WORD_BITS)) << torch.arange(WORD_BITS, device=visible.device)
    return words.sum(-1).to(torch.int32)


def unpack_mask(mask: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """int32 [.., N, W] -> bool [.., N, num_nodes]."""
    bits = mask.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32, device=mask.device)
    return (bits & 1).flatten(-2)[..., :num_nodes].to(torch.bool)


@dataclass(frozen=True)
class Tree:
    """One static draft tree, canonical: any order of the same choices gives an equal tree.

    A choice is a path of candidate ranks, Medusa's notation: ``(0, 2)`` is the third candidate of the second head
    under the best candidate of the first. Node 0 is the root; nodes are ordered by depth, then by path, so a parent
    comes before its children and the children of a node stand in rank order.

    Example:
        >>> from cerberus_kernels import Tree
        >>> tree = Tree.from_choices([(0, 0), (0,), (1,)])
        >>> tree.parents.tolist(), tree.depths.tolist(), tree.slots.tolist()
        ([-1, 0, 0, 1], [0, 1, 1, 2], [[-1, -1], [0, 0], [0, 1], [1, 0]])
    """

    choices: tuple[Choice, ...]

    @staticmethod
    def from_choices(choices: Iterable[Sequence[int]]) -> Tree:
        """Build from rank paths; an empty list is the root-only tree.

        Args:
            choices: paths of ranks, each with at least one entry, every prefix present, none twice.

        Raises:
            ValueError: an empty path, a negative rank, a duplicate, or a path whose prefix is missing.
        """
        paths = [tuple(int(rank) for rank in choice) for choice in choices]
        known = set(paths)
        if len(known) != len(paths):
            refuse("Tree", "choices", "free of duplicates", next(p for p in paths if paths.count(p) > 1))
        for path in paths:
            if not path or min(path) < 0:
                refuse("Tree", "choices", "non-empty paths of ranks >= 0", path)
            if len(path) > 1 and path[:-1] not in known:
                refuse("Tree", "choices", f"closed under prefixes (missing {path[:-1]})", path)
        return Tree(tuple(sorted(paths, key=lambda path: (len(path), path))))

    @staticmethod
    def from_paths(paths: Iterable[Sequence[int]]) -> Tree:
        """Build from root-to-leaf rank paths; their prefixes are added."""
        closed = {tuple(path[: depth + 1]) for path in paths for depth in range(len(path))}
        return Tree.from_choices(closed)

    @staticmethod
    def chain(depth: int) -> Tree:
        """The best candidate of each head, one below the other; ``chain(0)`` is the root alone."""
        if depth < 0:
            refuse("Tree.chain", "depth", ">= 0", depth)
        return Tree.from_choices([(0,) * (d + 1) for d in range(depth)])

    @staticmethod
    def star(width: int) -> Tree:
        """The ``width`` best candidates of the first head, all below the root."""
        if width < 0:
            refuse("Tree.star", "width", ">= 0", width)
        return Tree.from_choices([(rank,) for rank in range(width)])

    @property
    def num_nodes(self) -> int:
        """Nodes with the root."""
        return len(self.choices) + 1

    @property
    def max_depth(self) -> int:
        """Greatest depth below the root; 0 for the root alone."""
        return max((len(path) for path in self.choices), default=0)

    @property
    def max_rank(self) -> int:
        """Greatest candidate rank in use, so heads must give ``max_rank + 1`` candidates; -1 for the root alone."""
        return max((max(path) for path in self.choices), default=-1)

    @property
    def parents(self) -> torch.Tensor:
        """int32 ``[N]``, -1 for the root."""
        index = {path: node for node, path in enumerate(self.choices, start=1)}
        return torch.tensor([-1] + [index.get(path[:-1], 0) for path in self.choices], dtype=torch.int32)

    @property
    def depths(self) -> torch.Tensor:
        """int32 ``[N]``, 0 for the root."""
        return torch.tensor([0] + [len(path) for path in self.choices], dtype=torch.int32)

    @property
    def slots(self) -> torch.Tensor:
        """int32 ``[N, 2]``: head (0-based) and candidate rank of each node; -1, -1 for the root."""
        return torch.tensor([[-1, -1]] + [[len(path) - 1, path[-1]] for path in self.choices], dtype=torch.int32)

    @property
    def paths(self) -> torch.Tensor:
        """int32 ``[leaves, max_depth + 1]``: node ids from the root to each leaf, then -1."""
        index = {path: node for node, path in enumerate(self.choices, start=1)}
        inner = {path[:-1] for path in self.choices}
        leaves = [path for path in self.choices if path not in inner] or [()]
        rows = [[0] + [index[path[: d + 1]] for d in range(len(path))] for path in leaves]
        return torch.tensor([row + [-1] * (self.max_depth + 1 - len(row)) for row in rows], dtype=torch.int32)

    def draft_tokens(self, root: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Token of every node.

        Args:
            root: integer ``[B]``, the newest token of each sequence.
            candidates: integer ``[B, K, k]``, the heads' candidates by rank, from ``head_topk``.

        Returns:
            int32 ``[B, N]``.

        Raises:
            ValueError: the tree is deeper than the heads, or uses more ranks than there are candidates.
        """
        heads, ranks = candidates.shape[-2:]
        if self.max_depth > heads or self.max_rank >= ranks:
            need = f"at least [{self.max_depth}, {self.max_rank + 1}] heads and candidates for this tree"
            refuse("Tree.draft_tokens", "candidates", need, list(candidates.shape[-2:]))
        slots = self.slots[1:].to(candidates.device, torch.int64)
        drafts = candidates.flatten(-2)[..., slots[:, 0] * ranks + slots[:, 1]]
        return torch.cat([root.unsqueeze(-1).to(torch.int32), drafts.to(torch.int32)], dim=-1)
