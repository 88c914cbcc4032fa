"""tree_attention: agreement with a per-node oracle, the reported faults, memory, refusals."""

from __future__ import annotations

import math

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import (
    NODE_COUNTS,
    T5,
    assert_close,
    available_isa_levels,
    binary,
    isa_level,
    random_parents,
    tree_cases,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHAIN = [-1, 0, 1, 2, 3]


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(prefixes, nodes, *, q_heads=9, kv_heads=3, head_dim=64, dtype=torch.float32, spare=3):
    """q, k_cache, v_cache, prefix_lens; slots past the length are NaN."""
    batch, slots = len(prefixes), max(prefixes, default=0) + nodes + spare
    q = torch.randn(batch, nodes, q_heads, head_dim).to(dtype)
    k_cache, v_cache = (torch.full((batch, slots, kv_heads, head_dim), math.nan, dtype=dtype) for _ in range(2))
    for b, prefix in enumerate(prefixes):
        for cache in (k_cache, v_cache):
            cache[b, : prefix + nodes] = torch.randn(prefix + nodes, kv_heads, head_dim).to(dtype)
    return q, k_cache, v_cache, int32(prefixes)


def to_pages(cache, block_size, length):
    """The same slots in shuffled blocks, unused ones NaN: paged cache and block table."""
    batch, slots = cache.shape[:2]
    blocks = -(-slots // block_size)
    order = torch.randperm(batch * blocks + 2)[: batch * blocks].view(batch, blocks)
    pages = torch.full((batch * blocks + 2, block_size, *cache.shape[2:]), math.nan, dtype=cache.dtype)
    table = torch.full((batch, blocks), 2**31 - 1, dtype=torch.int32)
    for b in range(batch):
        for block in range(-(-length[b] // block_size)):
            rows = cache[b, block * block_size : (block + 1) * block_size]
            pages[order[b, block], : len(rows)] = rows
            table[b, block] = order[b, block]
    return pages, table


def oracle(q, keys, values, parents, prefix, *, scale=None, softcap=0.0, window=None):
    """Node by node in fp64 over an explicit list of keys: q [N, Hq, Dh], keys [T, Hkv, Dh] -> [N, Hq, Dh], [N, Hq]."""
    q, keys, values = q.double(), keys.double(), values.double()
    group = q.shape[1] // keys.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, lses = [], []
    for node in range(q.shape[0]):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        slots = list(range(prefix)) + [prefix + ancestor for ancestor in path]  # position of slots[p] is p
        slots = slots if window is None else slots[-window:]
        own_keys, own_values = (x[slots].repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        scores = scale * (own_keys @ q[node].unsqueeze(-1)).squeeze(-1)  # [Hq, T]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        outs.append((scores.softmax(1).unsqueeze(1) @ own_values).squeeze(1))
        lses.append(scores.logsumexp(1))
    return torch.stack(outs), torch.stack(lses)


def check_against_oracle(problem, parents, backend, **options):
    q, k_cache, v_cache, prefix_lens = problem
    out, lse = ck.tree_attention(
        q, k_cache, v_cache, ck.tree_mask(int32(parents)), prefix_lens, return_lse=True, backend=backend, **options
    )
    for b, prefix in enumerate(prefix_lens.tolist()):
        length = prefix + q.shape[1]
        expected, expected_lse = oracle(q[b], k_cache[b, :length], v_cache[b, :length], parents, prefix, **options)
        assert_close(out[b], expected.to(q.dtype))
        assert_close(lse[b], expected_lse.float())


@pytest.mark.parametrize("num_nodes", NODE_COUNTS)
def test_every_tree_shape_equals_the_oracle(backend, num_nodes):
    for name, parents in tree_cases(num_nodes):
        if num_nodes > 100 and name in ("binary", "random1"):
            continue
        problem = make([5], num_nodes, q_heads=2, kv_heads=1, head_dim=8)
        check_against_oracle(problem, parents, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 300])
def test_prefix_lengths_and_dtypes(backend, dtype, prefix):
    heads = {"q_heads": 3, "kv_heads": 1} if backend == "triton" else {}  # the interpreter is slow
    for nodes in (1, 2, 13, 33):
        check_against_oracle(make([prefix, prefix + 3], nodes, dtype=dtype, **heads), random_parents(nodes, 3), backend)


@pytest.mark.parametrize("heads", [(9, 3), (12, 2), (6, 1), (4, 4), (5, 1), (7, 1), (16, 1), (20, 4)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 256])
def test_att_04_head_sizes_and_group_ratios(backend, heads, head_dim):
    for nodes in (1, 13):
        problem = make([7], nodes, q_heads=heads[0], kv_heads=heads[1], head_dim=head_dim)
        check_against_oracle(problem, binary(nodes), backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (16, 1), (3, 3)], ids=str)
def test_every_isa_level(dtype, heads):
    assert available_isa_levels()
    for level in available_isa_levels():
        with isa_level(level):
            for nodes, head_dim in ((1, 64), (1, 24), (2, 72), (13, 64), (40, 24)):
                problem = make([70, 0], nodes, q_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype)
                check_against_oracle(problem, random_parents(nodes, 1), "native", softcap=3.0, window=40)


@pytest.mark.parametrize("nodes", [1, 5, 40])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_paged_equals_contiguous(backend, nodes, block_size):
    heads = {"q_heads": 2, "kv_heads": 1} if backend == "triton" else {}
    q, k_cache, v_cache, prefix_lens = make([37, 0, 130], nodes, **heads)
    mask = ck.tree_mask(int32(random_parents(nodes, 0)))
    lengths = [prefix + nodes for prefix in prefix_lens.tolist()]
    order = torch.random.get_rng_state()
    k_pages, table = to_pages(k_cache, block_size, lengths)
    torch.random.set_rng_state(order)
    v_pages, _ = to_pages(v_cache, block_size, lengths)
    expected = ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens, backend=backend)
    paged = ck.tree_attention(q, k_pages, v_pages, mask, prefix_lens, block_table=table, backend=backend)
    assert torch.equal(paged, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [33, 300])
def test_a_chain_over_an_empty_prefix_is_causal_attention(backend, dtype, length):
    heads = {"q_heads": 2, "kv_heads": 1} if backend == "triton" else {}
    q, k_cache, v_cache, prefix_lens = make([0], length, dtype=dtype, spare=0, **heads)
    mask = ck.tree_mask(ck.Tree.chain(length - 1).parents if length < 50 else int32(range(-1, length - 1)))
    out = ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens, backend=backend)
    heads_first = [x.float().transpose(1, 2) for x in (q, k_cache, v_cache)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    assert_close(out, expected.transpose(1, 2).to(dtype))


@pytest.mark.parametrize("window", [1, 2, 3, 9, 64, 1000])
@pytest.mark.parametrize("prefix", [0, 6, 130])
def test_window_counts_positions(backend, window, prefix):
    heads = {"q_heads": 2, "kv_heads": 1} if backend == "triton" else {}  # the interpreter is slow
    for parents in (T5, CHAIN, [-1], random_parents(70, 5)):
        check_against_oracle(make([prefix], len(parents), **heads), parents, backend, window=window)


@pytest.mark.parametrize("options", [{"scale": 0.5}, {"softcap": 2.0}, {"softcap": 50.0, "scale": 1.0}], ids=str)
def test_scale_and_softcap(backend, options):
    for nodes in (1, 13):
        check_against_oracle(make([100], nodes), binary(nodes), backend, **options)


def test_large_scores_neither_overflow_nor_lose_the_maximum(backend):
    # Whole numbers of up to 8, so that scores of hundreds are exact in fp32.
    q, k_cache, v_cache, prefix_lens = make([150], 5)
    q, k_cache = (x.mul(3).round().clamp(-8, 8) for x in (q, k_cache))
    check_against_oracle((q, k_cache, v_cache, prefix_lens), T5, backend, scale=1.0)
    check_against_oracle((q[:, :1], k_cache, v_cache, prefix_lens), [-1], backend, scale=1.0)


def test_lse_merges_partial_attentions(backend):
    q, k_cache, v_cache, _ = make([90], 5)
    mask = ck.tree_mask(int32(T5))
    whole = ck.tree_attention(q, k_cache, v_cache, mask, int32([90]), backend=backend)
    first, first_lse = ck.tree_attention(
        q, k_cache, v_cache, torch.zeros_like(mask), int32([40]), return_lse=True, backend=backend
    )
    rest, rest_lse = ck.tree_attention(
        q, k_cache[:, 40:], v_cache[:, 40:], mask, int32([50]), return_lse=True, backend=backend
    )
    share = torch.sigmoid(first_lse - rest_lse).unsqueeze(-1)
    assert_close(share * first + (1 - share) * rest, whole)


def test_att_01_rows_without_a_key_are_zero(backend):
    for dtype in DTYPES:
        q, k_cache, v_cache, prefix_lens = make([0], 8, dtype=dtype)
        mask = torch.zeros(8, 1, dtype=torch.int32)
        mask[:5] = ck.tree_mask(int32(T5))
        out, lse = ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens, return_lse=True, backend=backend)
        assert (out[:, 5:] == 0).all()
        assert (lse[:, 5:] == -math.inf).all()
        again = ck.tree_attention(out, k_cache, v_cache, mask, prefix_lens, backend=backend)
        alone = [x[:, :5].contiguous() for x in (q, k_cache, v_cache)]
        expected = ck.tree_attention(*alone, mask[:5], prefix_lens, backend=backend)
        assert_close(out[:, :5], expected)
        assert_close(again[:, :5], ck.tree_attention(expected, *alone[1:], mask[:5], prefix_lens, backend=backend))
        assert again.isfinite().all()


@pytest.mark.parametrize("nodes", [1, 4, 5])
def test_att_03_queries_are_the_tail_of_the_keys(backend, nodes):
    for parents in (CHAIN[:nodes], T5[:nodes]):
        check_against_oracle(make([100], nodes), parents, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [1, 5])
def test_att_05_query_heads_read_their_own_group(backend, dtype, nodes):
    q, k_cache, v_cache, prefix_lens = make([20], nodes, dtype=dtype)
    v_cache[:, : 20 + nodes] = torch.arange(3, dtype=dtype)[None, None, :, None]
    out = ck.tree_attention(q, k_cache, v_cache, ck.tree_mask(int32(T5[:nodes])), prefix_lens, backend=backend)
    expected = (torch.arange(9) // 3).to(dtype)[None, None, :, None].expand_as(out)
    assert_close(out, expected)
    if backend == "native":  # it sums weights and outputs in one order, so that equal values come out exactly
        assert torch.equal(out, expected)


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_att_08_sums_are_kept_in_fp32(backend, nodes, dtype):
    # 575 + 1 keys of equal score whose values are ones but for a single 577: bf16 sums would stop at 256.
    q, k_cache, v_cache, prefix_lens = make([576 - 1], nodes, dtype=dtype)
    q.zero_()
    v_cache[:, :576] = 1
    v_cache[:, 300] = 577
    mask = ck.tree_mask(int32([-1] + [0] * (nodes - 1)))
    out, lse = ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens, return_lse=True, backend=backend)
    odd = v_cache[0, 300, 0, 0].double().item()
    assert_close(out[0, 0], torch.full_like(out[0, 0], (575 + odd) / 576))
    assert_close(lse[0, 0], torch.full_like(lse[0, 0], math.log(576)))
    # and the dot product: 64 ones times ones of every head size sum to exactly the head size
    ones = torch.ones(1, 1, 1, 256, dtype=dtype)
    _, lse = ck.tree_attention(ones, ones, ones, int32([[1]]), int32([0]), scale=1.0, return_lse=True, backend=backend)
    assert lse.item() == 256


def test_att_09_strides(backend):
    q, k_cache, v_cache, prefix_lens = make([40, 9], 5)
    mask = ck.tree_mask(int32(T5))
    expected, expected_lse = ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens, return_lse=True, backend=backend)
    q_heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    k_heads_first = k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*v_cache.shape[:3], 100), math.nan)
    wide[..., 20:84] = v_cache
    shared_mask = mask.expand(2, -1, -1)
    out = torch.full((2, 9, 7, 80), 77.0).transpose(1, 2)[:, 1:6, :, 8:72]
    backing = out._base
    lse = torch.full((2, 7, 12), 77.0)[:, 1:6, 2:11]
    result = ck.tree_attention(
        q_heads_first,
        k_heads_first,
        wide[..., 20:84],
        shared_mask,
        prefix_lens,
        return_lse=True,
        backend=backend,
        out=(out, lse),
    )
    assert result[0] is out
    assert result[1] is lse
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert (backing == 77).sum() == backing.numel() - out.numel()
    assert (lse._base == 77).sum() == lse._base.numel() - lse.numel()
    with pytest.raises(ValueError, match="q must be contiguous in its last dimension"):
        ck.tree_attention(torch.randn(2, 5, 9, 128)[..., ::2], k_cache, v_cache, mask, prefix_lens, backend=backend)


def test_msk_07_rows_of_different_size_equal_their_solo_run(backend):
    trees = [[-1], list(T5), binary(13), [-1]]
    counts, prefixes = [1, 5, 13, 0], [3, 0, 40, -7]
    q, k_cache, v_cache, _ = make([3, 0, 40, 40], 13)
    mask = torch.full((4, 13, 1), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        mask[b, :count] = ck.tree_mask(int32([trees[b]]))[0, :count]
        # garbage in the padded rows and in their bits of the real rows
        mask[b, :count] |= -(1 << count)
        q[b, count:] = math.nan
        for cache in (k_cache, v_cache):
            cache[b, max(prefixes[b], 0) + count :] = math.nan
    out, lse = ck.tree_attention(
        q, k_cache, v_cache, mask, int32(prefixes), num_nodes=int32(counts), return_lse=True, backend=backend
    )
    for b, count in enumerate(counts):
        assert (out[b, count:] == 0).all()
        assert (lse[b, count:] == -math.inf).all()
        if count == 0:
            continue
        rows = [x[b : b + 1] for x in (k_cache, v_cache)]
        solo = ck.tree_attention(
            q[b : b + 1, :count], *rows, ck.tree_mask(int32(trees[b])), int32([prefixes[b]]), backend=backend
        )
        assert torch.equal(out[b, :count], solo[0])


def test_results_do_not_depend_on_the_thread_count():
    threads = torch.get_num_threads()
    try:
        for nodes, prefix in ((1, 900), (8, 300), (64, 500), (150, 0)):
            q, k_cache, v_cache, prefix_lens = make([prefix, prefix // 2], nodes, dtype=torch.bfloat16)
            mask = ck.tree_mask(int32(random_parents(nodes, 2)))
            results = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                results.append(ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens, backend="native"))
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])
            alone = ck.tree_attention(q[1:], k_cache[1:], v_cache[1:], mask, prefix_lens[1:], backend="native")
            assert torch.equal(results[0][1:], alone)
    finally:
        torch.set_num_threads(threads)


def test_nan_in_a_visible_key_is_not_hidden(backend):
    for nodes in (1, 5):
        q, k_cache, v_cache, prefix_lens = make([10], nodes)
        k_cache[0, 4, 1, 3] = math.nan
        out, lse = ck.tree_attention(
            q, k_cache, v_cache, ck.tree_mask(int32(T5[:nodes])), prefix_lens, return_lse=True, backend=backend
        )
        assert out[:, :, 3:6].isnan().all()
        assert lse[:, :, 3:6].isnan().all()
        assert out[:, :, :3].isfinite().all()
        assert out[:, :, 6:].isfinite().all()


def test_empty_batch(backend):
    q, k_cache, v_cache, prefix_lens = make([], 5)
    out, lse = ck.tree_attention(
        q, k_cache, v_cache, ck.tree_mask(int32(T5)), prefix_lens, return_lse=True, backend=backend
    )
    assert out.shape == (0, 5, 9, 64)
    assert lse.shape == (0, 5, 9)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((13, 53), r"mask must be of shape \[13, 1\], got \[13, 53\]"),
        ((12, 1), r"mask must be of shape \[13, 1\], got \[12, 1\]"),
        ((1, 13), r"mask must be of shape \[13, 1\], got \[1, 13\]"),
        ((13, 2), r"mask must be of shape \[13, 1\], got \[13, 2\]"),
        ((2, 13, 1), r"mask must be of shape \[1, 13, 1\], got \[2, 13, 1\]"),
        ((13,), r"mask must be 2 or 3-dimensional, got shape \[13\]"),
    ],
)
def test_msk_01_masks_of_the_wrong_shape_are_refused(shape, message):
    with pytest.raises(ValueError, match="tree_attention: " + message):
        ck.tree_attention(*make([40], 13)[:3], torch.ones(shape, dtype=torch.int32), int32([40]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_msk_01_masks_of_the_wrong_dtype_are_refused(dtype):
    with pytest.raises(ValueError, match="tree_attention: mask must be of dtype int32, got"):
        ck.tree_attention(*make([40], 13)[:3], torch.ones(13, 1, dtype=dtype), int32([40]))


def test_refusals_name_argument_constraint_and_value():
    q, k, v, prefix_lens = make([8], 5)
    mask = ck.tree_mask(int32(T5))

    def refused(message, *args, **options):
        with pytest.raises(ValueError, match="^tree_attention: " + message):
            ck.tree_attention(*args, **options)

    refused("q must be 4-dimensional", q[0], k, v, mask, prefix_lens)
    refused("q must be of dtype float32 or bfloat16 or float16, got float64", q.double(), k, v, mask, prefix_lens)
    narrow = [x[..., :12].contiguous() for x in (q, k, v)]
    refused("q must be of a head size that is a multiple of 8 in .*, got 12", *narrow, mask, prefix_lens)
    refused("k_cache must be of dtype float32, got bfloat16", q, k.bfloat16(), v.bfloat16(), mask, prefix_lens)
    refused(r"v_cache must be of shape .*, got \[1, 15, 3, 64\]", q, k, v[:, 1:], mask, prefix_lens)
    refused("q must be of a head count that is a multiple of k_cache's 3, got 8", q[:, :, :8], k, v, mask, prefix_lens)
    refused(r"prefix_lens must be of shape \[1\], got \[2\]", q, k, v, mask, int32([1, 2]))
    refused("scale must be finite, got nan", q, k, v, mask, prefix_lens, scale=math.nan)
    refused("softcap must be finite and >= 0, got -1", q, k, v, mask, prefix_lens, softcap=-1.0)
    refused("window must be None or >= 1, got 0", q, k, v, mask, prefix_lens, window=0)
    refused("out must be of shape", q, k, v, mask, prefix_lens, out=q[:, :4])
    refused("out must be free of overlapping elements", q, k, v, mask, prefix_lens, out=q[:, :1].expand_as(q))
    pair = (torch.empty_like(q), q.new_empty(q.shape[:3]))
    refused("out must be one tensor without return_lse, got a tuple", q, k, v, mask, prefix_lens, out=pair)


def test_lengths_outside_the_caches_are_refused(backend):
    q, k, v, _ = make([8, 8], 5)
    mask = ck.tree_mask(int32(T5))
    table = int32([[0, 1], [1, 2]])

    def refused(message, prefix_lens, **options):
        with pytest.raises(ValueError, match="^tree_attention: " + message):
            ck.tree_attention(q, k, v, mask, int32(prefix_lens), backend=backend, **options)

    refused(r"prefix_lens must be in \[0, 11\] for 5 nodes in 16 slots, got 12 in row 1", [3, 12])
    refused(r"prefix_lens must be in \[0, 11\] .*, got -1 in row 0", [-1, 12])
    refused(r"num_nodes must be in \[0, 5\], got 6 in row 1", [3, 3], num_nodes=int32([5, 6]))
    refused(r"block_table must be in \[0, 2\) for blocks in use, got 2 in row 1", [3, 20], block_table=table)


@pytest.mark.parametrize("nodes", [1, 13])
def test_opcheck(nodes):
    q, k_cache, v_cache, prefix_lens = make([9, 4], nodes)
    mask = ck.tree_mask(int32(binary(nodes)))
    arguments = (q, k_cache, v_cache, mask, prefix_lens)
    options = {"num_nodes": int32([nodes, 1]), "scale": 0.1, "window": 6}
    torch.library.opcheck(torch.ops.cerberus_kernels.tree_attention.default, arguments, options)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    torch.library.opcheck(
        torch.ops.cerberus_kernels.tree_attention_out.default, arguments, {**options, "out": out, "lse": lse}
    )


def test_compiles_whole():
    q, k_cache, v_cache, prefix_lens = make([9, 4], 5)
    mask = ck.tree_mask(int32(T5))

    def attend(q, out):
        first, lse = ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens, return_lse=True, window=7)
        ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens, out=out)
        return first + out, lse

    out = torch.empty_like(q)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")(q, out)
    for actual, expected in zip(compiled, attend(q, torch.empty_like(q)), strict=True):
        assert torch.equal(actual, expected)
    assert torch.equal(out, ck.tree_attention(q, k_cache, v_cache, mask, prefix_lens))
