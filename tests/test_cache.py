"""KVCache: lengths, roll-back, commit, capacity."""

from __future__ import annotations

import pytest
import torch
from cerberus_decode import KVCache


def filled(length: int, batch: int = 1, capacity: int = 12) -> KVCache:
    cache = KVCache(num_layers=2, batch=batch, capacity=capacity, num_kv_heads=2, head_dim=4)
    cache.keys.copy_(torch.arange(cache.keys.numel()).view_as(cache.keys))
    cache.values.copy_(-cache.keys)
    cache.advance(length)
    return cache


def test_kv01_lengths():
    cache = filled(4)
    cache.set_length(0)
    assert cache.lengths == [0]
    assert cache.committed(0)[0].shape[0] == 0
    cache = filled(4)
    cache.remove(4)
    assert cache.lengths == [0]
    cache = filled(4)
    with pytest.raises(ValueError, match=r"KVCache.remove: count must be in \[0, 4\], got 6"):
        cache.remove(6)
    with pytest.raises(ValueError, match=r"KVCache.remove: count must be in \[0, 4\], got -1"):
        cache.remove(-1)
    assert cache.lengths == [4]
    cache.remove(0)
    assert cache.lengths == [4]
    for length in (9, -1):
        with pytest.raises(ValueError, match=rf"KVCache.set_length: length must be in \[0, 4\], got {length}"):
            cache.set_length(length)
    assert cache.lengths == [4]
    assert cache.prefix_lens.tolist() == [4]


def test_kv05_roll_back_leaves_the_prefix_alone():
    cache = filled(6)
    before = cache.committed(1)[0].clone()
    cache.write(1, torch.full((1, 5, 2, 4), 7.0), torch.full((1, 5, 2, 4), 8.0))
    cache.advance(5)
    cache.set_length(6)
    assert torch.equal(cache.committed(1)[0], before)


def test_write_goes_behind_each_row():
    cache = filled(0, batch=2)
    cache.lengths, cache.prefix_lens = [3, 5], torch.tensor([3, 5], dtype=torch.int32)
    before = cache.keys.clone()
    new = torch.randn(2, 4, 2, 4)
    keys, values = cache.write(1, new, -new)
    for row, start in enumerate((3, 5)):
        assert torch.equal(keys[row, start : start + 4], new[row])
        assert torch.equal(values[row, start : start + 4], -new[row])
        assert torch.equal(keys[row, :start], before[1, row, :start])
        assert torch.equal(keys[row, start + 4 :], before[1, row, start + 4 :])
    assert torch.equal(cache.keys[0], before[0])
    assert cache.lengths == [3, 5]


def test_commit_compacts_all_layers():
    cache = filled(6, capacity=12)
    before = cache.keys.clone()
    accepted = cache.commit(torch.tensor([[0, 2, 4]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
    assert accepted == [2]
    assert cache.lengths == [9]
    assert cache.prefix_lens.tolist() == [9]
    for layer in range(2):
        keys, values = cache.committed(layer)
        assert torch.equal(keys[:6], before[layer, 0, :6])
        assert torch.equal(keys[6:], before[layer, 0, [6, 8, 10]])
        assert torch.equal(values, -keys)


def test_capacity_is_exact():
    cache = filled(8, capacity=10)
    cache.write(0, torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))
    with pytest.raises(ValueError, match="keys must be at most 2 nodes long"):
        cache.write(0, torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2, 4))
    with pytest.raises(ValueError, match=r"count must be in \[0, 2\], got 3"):
        cache.advance(3)
    with pytest.raises(ValueError, match=r"values must be of shape \[1, 'N', 2, 4\], got \[1, 2, 1, 4\]"):
        cache.write(0, torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 1, 4))
