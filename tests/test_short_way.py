"""The short way past torch's dispatcher takes what the long way takes, and refuses the rest in the same words.

Every argument of every operator is replaced, one at a time, by things that it should not be, and the call is made with
the short way open and shut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels import _dispatch


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Subclass(torch.Tensor):
    pass


def strangers(value: Any) -> Iterator[Any]:
    yield from (None, 3, 2.5, "x", [1, 2], [[1]], -1)
    if not isinstance(value, torch.Tensor):
        return
    if value.is_floating_point():
        yield from (value.double(), value.half(), torch.nn.Parameter(value.clone()))
    else:
        yield from (value.long() if value.dtype != torch.int64 else value.int(), value.to(torch.uint8), value.float())
    yield from (value.unsqueeze(0), value.numpy(), value.as_subclass(Subclass))
    if value.ndim:
        yield from (value[0], value[:0], torch.cat([value, value]), torch.cat([value, value], -1))
        yield from (value[..., :-1], value.repeat_interleave(2, -1)[..., ::2])
    if value.ndim > 1:
        yield from (value.transpose(-1, -2), value.transpose(-1, -2).contiguous().transpose(-1, -2))


def cases() -> dict[str, list[dict[str, Any]]]:
    parents = int32([-1, 0, 0, 1, 2])
    logits, drafts = torch.randn(2, 5, 8), torch.randint(8, (2, 5), dtype=torch.int32)
    counts, lengths = int32([5, 3]), int32([3, 4])
    attention = {
        "q": torch.randn(2, 5, 4, 8), "k_cache": torch.randn(2, 16, 2, 8), "v_cache": torch.randn(2, 16, 2, 8),
        "mask": ck.tree_mask(parents), "prefix_lens": lengths,
    }  # fmt: skip
    paged = {
        "k_cache": torch.randn(4, 8, 2, 8),
        "v_cache": torch.randn(4, 8, 2, 8),
        "block_table": int32([[0, 1], [2, 3]]),
    }
    weight = ck.pack_linear(torch.randn(6, 8))
    around = {"norm_weight": torch.ones(8), "eps": 1e-5, "residual": torch.randn(2, 6), "bias": torch.randn(6)}
    heads = {"hidden": torch.randn(2, 8), "weight": torch.randn(1, 3, 8, 16), "bias": torch.randn(1, 3, 8)}
    topk = {"states": torch.randn(2, 3, 8), "vocab_weight": torch.randn(12, 8), "k": 3}
    commit = {"path": int32([[0, 1, 3], [0, 2, -1]]), "num_accepted": int32([2, 1]), "prefix_lens": lengths}
    verify = {"logits": logits, "draft_tokens": drafts, "parents": parents}
    filters = {"temperature": torch.tensor([1.0, 0.5]), "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    pack = [ck.pack_linear(torch.randn(shape) / 4) for shape in ((64, 16), (16, 32), (48, 16), (16, 24))]
    layer = {
        "hidden": torch.randn(2, 5, 16),
        "weights": ck.DecoderWeights(*pack, torch.ones(16), torch.ones(16), 1e-6, 1e-6),
        "cos": torch.rand(2, 5, 8), "sin": torch.rand(2, 5, 8), **{k: v for k, v in attention.items() if k != "q"},
    }  # fmt: skip
    likely = torch.randn(2, 3, 2).log_softmax(-1).sort(descending=True).values
    return {
        "tree_mask": [{"parents": parents}, {"parents": parents.repeat(2, 1), "num_nodes": counts}],
        "tree_attention": [
            attention,
            {**attention, "num_nodes": counts, "scale": 0.5, "softcap": 2.0, "window": 3},
            {**attention, **paged},
            {**attention, "out": torch.empty(2, 5, 4, 8)},
        ],
        "head_states": [{**heads, "root_embedding": torch.randn(2, 8)}, {**heads, "weight": torch.randn(1, 3, 8, 8)}],
        "head_topk": [topk, {**topk, "token_map": torch.arange(12, dtype=torch.int32)}, {**topk, "vocab_size": 10}],
        "grow_tree": [
            {"log_probs": likely, "budget": 5},
            {
                "log_probs": likely, "budget": 4, "tokens": torch.randint(8, (2, 3, 2), dtype=torch.int32),
                "roots": int32([3, 4]), "costs": torch.tensor([1.0, 1.1, 1.2, 1.3]),
            },
        ],
        "gate": [
            {"hidden": None, "entropy": torch.tensor([1.0, 2.0]), "threshold": 1.5},
            {"hidden": None, "logits": logits[:, 0].contiguous(), "threshold": torch.ones(2), "vocab_size": 7},
        ],
        "packed_linear": [
            {"x": torch.randn(2, 8), "weight": weight, **around},
            {"x": torch.randn(2, 16), "weight": weight, "gated": True},
        ],
        "decoder_layer": [layer, {**layer, "scale": 0.3}, {**layer, **paged}],
        "commit_kv": [
            {"k_caches": torch.randn(3, 2, 16, 2, 8), "v_caches": torch.randn(3, 2, 16, 2, 8), **commit},
            {"k_caches": [torch.randn(2, 16, 2, 8)], "v_caches": [torch.randn(2, 16, 2, 8)], **commit},
        ],
        "verify_tree": [
            verify,
            {**verify, "mode": "sample", **filters, "seed": torch.tensor([1, 2]), "position": 5, "num_nodes": counts},
            {**verify, "mode": "typical", "vocab_size": 7, "max_depth": 2, "epsilon": 0.2, "delta": 0.5},
            {**verify, "mode": "rejection", "drafting": "iid", "draft_probs": torch.rand(2, 5, 8)},
            {
                "logits": logits.flatten(0, 1), "draft_tokens": drafts.flatten(), "parents": parents.repeat(2),
                "cu_nodes": int32([0, 5, 10]), "max_depth": 3,
            },
        ],
    }  # fmt: skip


def outcome(name: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    names = ("k_caches", "v_caches") if name == "commit_kv" else ("k_cache", "v_cache")
    caches = {key: arguments[key] for key in names if isinstance(arguments.get(key), torch.Tensor)}
    arguments = {**arguments, **{key: cache.clone() for key, cache in caches.items()}}
    try:
        with torch.no_grad():
            result = getattr(ck, name)(**arguments)
    except Exception as error:
        return type(error), str(error)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@pytest.mark.parametrize(("name", "index"), [(name, i) for name, given in cases().items() for i in range(len(given))])
def test_both_ways_agree_on_every_argument(monkeypatch, name, index):
    torch.manual_seed(0)
    base = cases()[name][index]
    calls = [base] + [{**base, key: other} for key, value in base.items() for other in strangers(value)]
    short = [outcome(name, call) for call in calls]
    monkeypatch.setattr(_dispatch.Operator, "goes_native", lambda *_: False)
    assert isinstance(short[0][0], torch.Tensor)
    for call, taken in zip(calls, short, strict=True):
        expected = outcome(name, call)
        changed = {key: value for key, value in call.items() if base[key] is not value}
        if isinstance(expected[0], type):
            assert taken == expected, changed
            assert expected[0] is ValueError, changed
            assert expected[1].startswith(f"{name}: "), changed
        else:
            pairs = zip(taken, expected, strict=True)
            assert all(one is other or torch.equal(one, other) for one, other in pairs), changed
