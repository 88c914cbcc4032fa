"""The decoder's own key-value cache: preallocated once, written by the forward pass, compacted after verification."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import cerberus_kernels as ck
from cerberus_kernels._checks import refuse


class KVCache:
    """Keys and values of all layers in two tensors, and how many slots of each sequence are in use.

    The first ``lengths[b]`` slots of sequence ``b`` hold its committed text. A forward pass over N tree nodes writes
    the slots behind them, and :meth:`commit` keeps the accepted ones; everything past the length is undefined and
    never read. Memory is not initialised.

    Args:
        num_layers: attention layers.
        batch: sequences ``B``.
        capacity: slots per sequence ``S_max``.
        num_kv_heads: ``Hkv``.
        head_dim: ``Dh``.
        dtype: element type.
        device: where the tensors live.

    Attributes:
        keys: ``[layers, B, S_max, Hkv, Dh]``.
        values: as ``keys``.
        lengths: committed slots of each sequence, on the host.
        prefix_lens: the same as int32 ``[B]`` on the device.

    Example:
        >>> import torch
        >>> cache = KVCache(num_layers=2, batch=1, capacity=8, num_kv_heads=1, head_dim=4)
        >>> cache.advance(3)
        >>> cache.remove(1)
        >>> cache.lengths, cache.prefix_lens.tolist()
        ([2], [2])
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, batch, capacity, num_kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.lengths = [0] * batch
        self.prefix_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._layers = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    @property
    def capacity(self) -> int:
        """Slots per sequence."""
        return self.keys.shape[2]

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return self.keys.shape[0]

    @property
    def free_slots(self) -> int:
        """Slots that the fullest sequence has left."""
        return self.capacity - max(self.lengths, default=0)

    def row(self, index: int) -> KVCache:
        """One sequence's slots as a cache of their own, sharing memory; :meth:`adopt` brings its length back."""
        part = object.__new__(KVCache)
        part.keys, part.values = self.keys[:, index : index + 1], self.values[:, index : index + 1]
        part.lengths = [self.lengths[index]]
        part.prefix_lens = self.prefix_lens[index : index + 1].clone()
        part._layers = list(zip(part.keys.unbind(0), part.values.unbind(0), strict=True))
        return part

    def adopt(self, index: int, part: KVCache) -> None:
        """Take over the length of what :meth:`row` gave for ``index``."""
        self._set_row_lengths({index: part.lengths[0]})

    def advance_rows(self, rows: Sequence[int]) -> None:
        """Commit one more slot of each of ``rows``, as after a pass over their roots alone."""
        self._set_row_lengths({row: self.lengths[row] + 1 for row in rows})

    def reserve(self, layer: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's whole caches, ``[B, S_max, Hkv, Dh]`` each, for a call that writes ``nodes`` slots itself.

        Raises:
            ValueError: fewer than ``nodes`` free slots.
        """
        if nodes > self.free_slots:
            refuse("KVCache.reserve", "nodes", f"at most {self.free_slots} (the free slots)", nodes)
        return self._layers[layer]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a forward pass's keys and values behind the committed slots of one layer; lengths stay as they are.

        Args:
            layer: layer index.
            keys: ``[B, N, Hkv, Dh]``.
            values: as ``keys``.

        Returns:
            The layer's whole caches, ``[B, S_max, Hkv, Dh]`` each.

        Raises:
            ValueError: another shape than the cache was made for, or fewer than N free slots.
        """
        key_cache, value_cache = self._layers[layer]
        nodes = keys.shape[1]
        for name, new in (("keys", keys), ("values", values)):
            if new.shape[0] != key_cache.shape[0] or new.shape[2:] != key_cache.shape[2:]:
                want = [key_cache.shape[0], "N", *key_cache.shape[2:]]
                refuse("KVCache.write", name, f"of shape {want}", list(new.shape))
        if nodes > self.free_slots:
            refuse("KVCache.write", "keys", f"at most {self.free_slots} nodes long (the free slots)", nodes)
        if len(set(self.lengths)) == 1:
            start = self.lengths[0]
            key_cache[:, start : start + nodes] = keys
            value_cache[:, start : start + nodes] = values
        else:
            for row, start in enumerate(self.lengths):
                key_cache[row, start : start + nodes] = keys[row]
                value_cache[row, start : start + nodes] = values[row]
        return key_cache, value_cache

    def advance(self, count: int) -> None:
        """Commit the next ``count`` slots as they were written, as after a chunk of the prompt."""
        if not 0 <= count <= self.free_slots:
            refuse("KVCache.advance", "count", f"in [0, {self.free_slots}]", count)
        self._set_lengths([length + count for length in self.lengths])

    def commit(self, path: torch.Tensor, num_accepted: torch.Tensor) -> list[int]:
        """Keep the root and the accepted nodes of the tree that was just written; drop the rest.

        Args:
            path: int32 ``[B, D+1]`` node ids from the root, from ``verify_tree``.
            num_accepted: int32 ``[B]`` accepted drafts.

        Returns:
            ``num_accepted`` on the host.
        """
        self.prefix_lens = ck.commit_kv(self.keys, self.values, path, num_accepted, self.prefix_lens)
        accepted = num_accepted.tolist()
        self.lengths = [length + count + 1 for length, count in zip(self.lengths, accepted, strict=True)]
        return accepted

    def set_length(self, length: int) -> None:
        """Cut every sequence to its first ``length`` slots; 0 empties the cache.

        Raises:
            ValueError: a negative length, or more than a sequence holds.
        """
        held = min(self.lengths, default=0)
        if not 0 <= length <= held:
            refuse("KVCache.set_length", "length", f"in [0, {held}]", length)
        self._set_lengths([length] * len(self.lengths))

    def remove(self, count: int) -> None:
        """Drop the last ``count`` slots of every sequence.

        Raises:
            ValueError: a negative count, or more than a sequence holds.
        """
        held = min(self.lengths, default=0)
        if not 0 <= count <= held:
            refuse("KVCache.remove", "count", f"in [0, {held}]", count)
        self._set_lengths([length - count for length in self.lengths])

    def committed(self, layer: int, row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence's committed slots, ``[length, Hkv, Dh]`` views."""
        key_cache, value_cache = self._layers[layer]
        return key_cache[row, : self.lengths[row]], value_cache[row, : self.lengths[row]]

    def _set_row_lengths(self, lengths: dict[int, int]) -> None:
        self._set_lengths([lengths.get(row, length) for row, length in enumerate(self.lengths)])

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.prefix_lens = torch.tensor(lengths, dtype=torch.int32, device=self.keys.device)
