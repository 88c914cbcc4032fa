"""commit_kv: every element followed, page borders, refusals that write nothing, mutation seen by the compiler."""

from __future__ import annotations

import pytest
import torch

import cerberus_kernels as ck

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def unique(*shape) -> torch.Tensor:
    """fp32 with a value of its own in every element."""
    count = torch.tensor(shape).prod().item()
    assert count < 2**24
    return torch.arange(count, dtype=torch.float32).view(shape)


def moved(cache, path, num_accepted, prefix_lens, block_table=None):
    """Expected cache, element by element from the old one. cache [layers, rows, slots, Hkv, Dh]."""
    expected = cache.clone()

    def place(b, position):
        if block_table is None:
            return b, position
        block_size = cache.shape[2]
        return int(block_table[b, position // block_size]), position % block_size

    for b, (nodes, accepted, prefix) in enumerate(zip(path, num_accepted, prefix_lens, strict=True)):
        for step in range(1, accepted + 1):
            source, target = place(b, prefix + nodes[step]), place(b, prefix + step)
            for layer in range(cache.shape[0]):
                for head in range(cache.shape[3]):
                    for d in range(cache.shape[4]):
                        expected[(layer, *target, head, d)] = cache[(layer, *source, head, d)]
    return expected


def check(k_cache, v_cache, path, num_accepted, prefix_lens, backend, *, as_list, block_table=None):
    expected = [moved(cache, path, num_accepted, prefix_lens, block_table) for cache in (k_cache, v_cache)]
    caches = [list(cache) if as_list else cache for cache in (k_cache, v_cache)]
    new_lens = ck.commit_kv(
        *caches, int32(path), int32(num_accepted), int32(prefix_lens), block_table=block_table, backend=backend
    )
    assert new_lens.dtype == torch.int32
    assert new_lens.tolist() == [p + n + 1 for p, n in zip(prefix_lens, num_accepted, strict=True)]
    for cache, want in zip((k_cache, v_cache), expected, strict=True):
        assert torch.equal(cache, want)


@pytest.mark.parametrize("as_list", [False, True])
def test_kv_02_slots_6_7_8_hold_old_slots_6_8_10(backend, as_list):
    k_cache = unique(2, 1, 12, 2, 4)
    v_cache = k_cache + 10_000
    before = k_cache.clone()
    check(k_cache, v_cache, [[0, 2, 4, -1]], [2], [6], backend, as_list=as_list)
    assert torch.equal(k_cache[:, :, 6:9], before[:, :, [6, 8, 10]])
    assert torch.equal(k_cache[:, :, 9:], before[:, :, 9:])


@pytest.mark.parametrize("as_list", [False, True])
def test_kv_02_wide_trees_and_batches(backend, as_list):
    check(unique(2, 1, 40, 3, 8), -unique(2, 1, 40, 3, 8), [[0, 3, 9, 14]], [3], [6], backend, as_list=as_list)
    path = [[0, -1, -1, -1], [0, 3, 9, 14], [0, 1, 2, 3], [0, 5, -1, -1]]
    k_cache = unique(3, 4, 40, 3, 8)
    check(k_cache, k_cache + 0.5, path, [0, 3, 3, 1], [20, 0, 7, 25], backend, as_list=as_list)


@pytest.mark.parametrize("path", [[0, 1, 2, 3, 4], [0, 2, 3, 4, 5], [0, 1, 3, 5, 6], [0, 4, 5, 6, 7]], ids=str)
def test_overlapping_source_and_destination(backend, path):
    for accepted in range(5):
        cut = path[: accepted + 1] + [-1] * (4 - accepted)
        check(unique(2, 1, 16, 1, 8), -unique(2, 1, 16, 1, 8), [cut], [accepted], [5], backend, as_list=False)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16])
def test_across_page_borders(backend, block_size):
    blocks = -(-24 // block_size)
    table = torch.randperm(2 * blocks + 1)[: 2 * blocks].view(2, blocks).to(torch.int32)
    # entries past the last node are never read
    last = (13 + 9) // block_size + 1
    table[0, last:] = -1
    k_cache = unique(2, 2 * blocks + 1, block_size, 2, 4)
    path = [[0, 1, 4, 9, -1], [0, 3, 5, 8, 9]]
    check(k_cache, -k_cache.clone(), path, [3, 4], [13, 2], backend, as_list=True, block_table=table)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_strides(backend, dtype):
    backing = torch.randint(0, 200, (2, 3, 2, 20, 16)).to(dtype)  # heads before slots
    untouched = backing.clone()
    k_cache = backing[:, :, :, 2:, :8].transpose(2, 3)
    v_cache = torch.randint(0, 200, (2, 3, 18, 1, 24)).to(dtype)  # fewer and wider heads than the keys
    path = [[0, 2, 5], [0, -1, -1], [0, 1, 3]]
    check(k_cache, v_cache, path, [2, 0, 1], [3, 11, 12], backend, as_list=False)
    assert torch.equal(backing[..., 8:], untouched[..., 8:])
    assert torch.equal(backing[:, :, :, :2], untouched[:, :, :, :2])


@pytest.mark.parametrize("offsets", [(0, 40, 80), (0, 40, 64), (80, 0, 40), (1, 50, 90)], ids=str)
def test_layers_that_lie_anywhere(backend, offsets):
    """Evenly spaced, with gaps, out of order, at addresses of their own."""
    rows = [torch.randn(120, 2, 8), torch.randn(120, 2, 8)]
    before = [memory.clone() for memory in rows]
    caches = [[memory[first : first + 24].view(2, 12, 2, 8) for first in offsets] for memory in rows]
    path, accepted, prefix = int32([[0, 2, 4, 5], [0, 1, 3, -1]]), int32([3, 2]), int32([2, 7])
    for _ in range(2):  # the second call finds what the first one kept
        for memory, start in zip(rows, before, strict=True):
            memory.copy_(start)
        ck.commit_kv(*caches, path, accepted, prefix, backend=backend)
        for layers, start in zip(caches, before, strict=True):
            for layer, first in zip(layers, offsets, strict=True):
                old = start[first : first + 24].view(2, 12, 2, 8)
                want = moved(old.unsqueeze(0), path.tolist(), accepted.tolist(), prefix.tolist())[0]
                assert torch.equal(layer, want)


def test_kv_05_rejecting_everything_keeps_the_prefix(backend):
    k_cache, v_cache = unique(2, 1, 60, 1, 8), -unique(2, 1, 60, 1, 8)
    before = k_cache.clone(), v_cache.clone()
    path, zero, prefix = int32([[0, -1, -1]]), int32([0]), int32([40])
    assert ck.commit_kv(k_cache, v_cache, path, zero, prefix, backend=backend).tolist() == [41]
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
    assert prefix.tolist() == [40]


def test_empty_batch(backend):
    cache = torch.empty(2, 0, 8, 1, 8)
    empty = int32([])
    new_lens = ck.commit_kv(cache, cache, torch.empty(0, 4, dtype=torch.int32), empty, empty, backend=backend)
    assert new_lens.shape == (0,)


def test_every_element_of_many_layers_with_threads(backend):
    k_cache = torch.randn(12, 3, 64, 4, 32)
    v_cache = torch.randn(12, 3, 64, 4, 32)
    path, accepted, prefix = [[0, 4, 9, 17, 30]] * 3, [4, 2, 0], [30, 11, 3]
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for want, cache in zip(expected, (k_cache, v_cache), strict=True):
        for b in range(3):
            for step in range(1, accepted[b] + 1):
                want[:, b, prefix[b] + step] = cache[:, b, prefix[b] + path[b][step]]
    ck.commit_kv(list(k_cache), list(v_cache), int32(path), int32(accepted), int32(prefix), backend=backend)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize(
    ("path", "num_accepted", "prefix_lens", "message"),
    [
        ([[0, 2, 4], [0, 1, 2]], [2, 3], [1, 1], r"num_accepted must be in \[0, 2\], got 3 in row 1"),
        ([[0, 2, 4], [0, 1, 2]], [2, -1], [1, 1], r"num_accepted must be in \[0, 2\], got -1 in row 1"),
        ([[0, 2, 4], [0, 1, -1]], [2, 2], [1, 1], r"path must be 0, then ascending .*, got -1 at step 2 in row 1"),
        ([[0, 2, 4], [1, 2, 3]], [2, 2], [1, 1], r"path must be 0, then ascending .*, got 1 at step 0 in row 1"),
        ([[0, 2, 4], [0, 3, 2]], [2, 2], [1, 1], r"path must be 0, then ascending .*, got 2 at step 2 in row 1"),
        ([[0, 2, 4], [0, 3, 9]], [2, 2], [1, 1], r"path must be .* below 9, got 9 at step 2 in row 1"),
        ([[0, 2, 4], [0, 1, 2]], [2, 1], [1, 10], r"prefix_lens must be in \[0, 10\), got 10 in row 1"),
        ([[0, 2, 4], [0, 1, 2]], [2, 1], [1, -1], r"prefix_lens must be in \[0, 10\), got -1 in row 1"),
    ],
)
def test_refused_steps_write_nothing(backend, path, num_accepted, prefix_lens, message):
    k_cache, v_cache = unique(2, 2, 10, 1, 8), -unique(2, 2, 10, 1, 8)
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(ValueError, match="^commit_kv: " + message):
        ck.commit_kv(k_cache, v_cache, int32(path), int32(num_accepted), int32(prefix_lens), backend=backend)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


def test_block_ids_out_of_range_are_refused(backend):
    cache = unique(1, 4, 5, 1, 8)
    table = int32([[0, 1], [2, 4]])
    with pytest.raises(ValueError, match=r"^commit_kv: block_table must be in \[0, 4\) .*, got 4 in row 1"):
        ck.commit_kv(
            cache,
            cache.clone(),
            int32([[0, 2], [0, 3]]),
            int32([1, 1]),
            int32([1, 2]),
            block_table=table,
            backend=backend,
        )
    assert torch.equal(cache, unique(1, 4, 5, 1, 8))


def test_refusals_name_argument_constraint_and_value():
    cache, path, one = unique(2, 1, 10, 1, 8), int32([[0, 2]]), int32([1])

    def refused(message, *args, **options):
        with pytest.raises(ValueError, match="^commit_kv: " + message):
            ck.commit_kv(*args, **options)

    refused("path must be 2-dimensional", cache, cache, path[0], one, one)
    refused("path must be of dtype int32, got int64", cache, cache, path.long(), one, one)
    refused(r"path must be of shape \[any, at least 1\]", cache, cache, path[:, :0], one, one)
    refused(r"num_accepted must be of shape \[1\], got \[2\]", cache, cache, path, int32([1, 1]), one)
    refused("k_caches must be 5-dimensional", cache[0], cache, path, one, one)
    refused("k_caches must be a tensor or a non-empty list", [], [], path, one, one)
    refused(r"v_caches must be of as many layers as k_caches \(2\), got 1", list(cache), [cache[0]], path, one, one)
    refused("v_caches must be of shape", cache, cache[:, :, :9], path, one, one)
    refused("k_caches must be of shape", cache.repeat(1, 2, 1, 1, 1), cache, path, one, one)
    narrow = unique(2, 1, 10, 1, 16)[..., ::2]
    refused("k_caches must be contiguous in its last dimension", narrow, cache, path, one, one)


@pytest.mark.parametrize("as_list", [False, True])
def test_bld_11_opcheck_and_compile_see_the_change(as_list):
    stacked = unique(2, 1, 12, 1, 8)

    def caches(tensor):
        return [layer.clone() for layer in tensor] if as_list else [tensor.clone()]

    arguments = (int32([[0, 2, 4, -1]]), int32([2]), int32([6]))
    torch.library.opcheck(torch.ops.cerberus_kernels.commit_kv.default, (caches(stacked), caches(-stacked), *arguments))

    def step(k_caches, v_caches, path, num_accepted, prefix_lens):
        if not as_list:
            k_caches, v_caches = k_caches[0], v_caches[0]
        new_lens = ck.commit_kv(k_caches, v_caches, path, num_accepted, prefix_lens)
        return new_lens, k_caches[0] * 2, v_caches[1] * 2

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    keys, values = caches(stacked), caches(-stacked)
    eager = step(caches(stacked), caches(-stacked), *arguments)
    for actual, expected in zip(compiled(keys, values, *arguments), eager, strict=True):
        assert torch.equal(actual, expected)
    expected = moved(stacked, [[0, 2, 4, -1]], [2], [6])
    assert torch.equal(torch.stack(keys).view_as(expected), expected)
    assert torch.equal(torch.stack(values).view_as(expected), -expected)
