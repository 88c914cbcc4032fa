"""Everything a decoding step needs to know about one tree shape, computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import cerberus_kernels as ck

from .drafting import DraftTree

Choice = tuple[int, ...]


class TreeLayout:
    """Tensors of one draft tree on the model's device.

    Args:
        tree: the tree.
        device: where the tensors go.

    Attributes:
        num_nodes: N, root included.
        max_depth: D.
        num_candidates: candidates that each head must give, 0 for the root alone.
        parents: int32 ``[N]``.
        mask: int32 ``[N, W]`` ancestor bits.
        depths: int64 ``[N]``.

    Example:
        >>> from cerberus_kernels import Tree
        >>> layout = TreeLayout(Tree.from_choices([(0,), (0, 0), (1,)]))
        >>> layout.num_nodes, layout.max_depth, layout.num_candidates, layout.depths.tolist()
        (4, 2, 2, [0, 1, 1, 2])
    """

    def __init__(self, tree: ck.Tree, device: torch.device | str = "cpu") -> None:
        self.num_nodes = tree.num_nodes
        self.max_depth = tree.max_depth
        self.num_candidates = tree.max_rank + 1
        parents = tree.parents
        self.parents = parents.to(device)
        self.mask = ck.tree_mask(parents).to(device)
        self.depths = tree.depths.to(device, torch.int64)
        slots = tree.slots[1:].to(torch.int64)
        self._candidate_index = (slots[:, 0] * self.num_candidates + slots[:, 1]).to(device)

    def with_tokens(self, tokens: torch.Tensor) -> DraftTree:
        """The tree of int32 ``tokens`` ``[B, N]``."""
        return DraftTree(tokens, self.parents, self.mask, self.depths, self.max_depth)

    def draft_tokens(self, root: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Token of every node.

        Args:
            root: int32 ``[B]``.
            candidates: int32 ``[B, K, num_candidates]``, by head and rank.

        Returns:
            int32 ``[B, N]``.
        """
        drafts = candidates.flatten(1).index_select(1, self._candidate_index)
        return torch.cat([root.unsqueeze(1), drafts], dim=1)


class LayoutCache:
    """Layouts of the prefixes of best-first choice lists, cut to a depth; each is made once."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._layouts: dict[tuple[tuple[Choice, ...], int, int], TreeLayout] = {}

    def layout(self, choices: tuple[Choice, ...], num_drafts: int, max_depth: int) -> TreeLayout:
        """Layout of the first ``num_drafts`` choices that are at most ``max_depth`` deep.

        Args:
            choices: best first, so that every choice comes after its prefixes.
            num_drafts: nodes below the root at most; 0 or less gives the root alone.
            max_depth: depth at most; 0 or less gives the root alone.
        """
        deepest = max(map(len, choices), default=0)
        key = (choices, max(0, min(num_drafts, len(choices))), max(0, min(max_depth, deepest)))
        if key not in self._layouts:
            kept = [choice for choice in choices if len(choice) <= key[2]][: key[1]]
            self._layouts[key] = TreeLayout(ck.Tree.from_choices(kept), self._device)
        return self._layouts[key]


def best_first(choices: Sequence[Sequence[int]]) -> tuple[Choice, ...]:
    """Choices as tuples, checked to come after their prefixes so that every first n of them are a tree."""
    known: set[Choice] = set()
    ordered = tuple(tuple(int(rank) for rank in choice) for choice in choices)
    for choice in ordered:
        if len(choice) > 1 and choice[:-1] not in known:
            raise ValueError(f"tree: choices must list every prefix before its continuations, got {choice} too early")
        known.add(choice)
    ck.Tree.from_choices(ordered)
    return ordered
