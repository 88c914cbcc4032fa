"""verify_tree: refusals in words, torch schema, compilation."""

from __future__ import annotations

import re

import pytest
import torch
from verify_cases import MODES, int32, some

import cerberus_kernels as ck
from cerberus_kernels.testing import T5


def call(**changes):
    arguments = {
        "logits": torch.zeros(2, 5, 8),
        "draft_tokens": torch.zeros(2, 5, dtype=torch.int32),
        "parents": int32(T5),
        **changes,
    }
    return ck.verify_tree(**arguments)


REFUSES_DETERMINISTIC = (
    "drafting must be 'iid' or 'without_replacement' in rejection mode (deterministic drafts have no distribution that "
    "could be divided by: mode 'sample' is exact for them), got 'deterministic'"
)


def rejection(probs: torch.Tensor) -> dict:
    return {"mode": "rejection", "drafting": "iid", "draft_probs": probs}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"logits": torch.zeros(2, 5, 8, dtype=torch.float64)},
            "logits must be of dtype float32 or bfloat16 or float16",
        ),
        ({"logits": torch.zeros(5, 8)}, "logits must be 3-dimensional"),
        ({"logits": torch.zeros(2, 8, 5).mT}, "logits must be contiguous in its last dimension"),
        ({"logits": torch.zeros(2, 0, 8)}, "logits must be of shape [B, N, V'] with N >= 1, got [2, 0, 8]"),
        ({"logits": torch.zeros(2, 5, 0)}, "vocab_size must be in [1, 0]"),
        ({"draft_tokens": torch.zeros(2, 4, dtype=torch.int32)}, "draft_tokens must be of shape [2, 5], got [2, 4]"),
        ({"draft_tokens": torch.zeros(2, 5)}, "draft_tokens must be of dtype int32 or int64, got float32"),
        ({"parents": int32([-1, 0])}, "parents must be of shape [5], got [2]"),
        ({"parents": torch.tensor(T5)}, "parents must be of dtype int32, got int64"),
        ({"num_nodes": int32([5])}, "num_nodes must be of shape [2], got [1]"),
        ({"num_nodes": int32([5, 6])}, "num_nodes must be in [1, 5], got 6 in row 1"),
        ({"num_nodes": int32([0, 5])}, "num_nodes must be in [1, 5], got 0 in row 0"),
        ({"vocab_size": 9}, "vocab_size must be in [1, 8], the columns of logits, got 9"),
        ({"vocab_size": 0}, "vocab_size must be in [1, 8], the columns of logits, got 0"),
        ({"max_depth": -1}, "max_depth must be >= 0, got -1"),
        ({"mode": "medusa"}, "got 'medusa'"),
        ({"mode": 1}, "mode must be a name, a list of names or a tensor of codes, got 1"),
        ({"mode": ["greedy"]}, "mode must be of shape [2], got [1]"),
        ({"mode": ["greedy", "typicall"]}, "got 'typicall'"),
        ({"temperature": -0.5}, "temperature must be finite and >= 0, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be finite and >= 0, got nan"),
        ({"temperature": torch.tensor([1.0, float("nan")])}, "temperature must be finite and >= 0, got nan in row 1"),
        ({"temperature": torch.tensor([-1.0, 1.0])}, "temperature must be finite and >= 0, got -1.0 in row 0"),
        ({"temperature": torch.ones(2).double()}, "temperature must be of dtype float32, got float64"),
        ({"temperature": torch.ones(3)}, "temperature must be of shape [2], got [3]"),
        ({"top_k": -1}, "top_k must be >= 0, where 0 keeps all, got -1"),
        ({"top_k": 1.5}, "top_k must be int or a tensor [2], got 1.5"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
        ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5"),
        ({"epsilon": -0.1}, "epsilon must be in [0, 1], got -0.1"),
        ({"delta": float("inf")}, "delta must be finite and >= 0, got inf"),
        ({"seed": 2**63}, "seed must be in [-2**63, 2**63)"),
        ({"position": -1}, "position must be in [0, 2**63), got -1"),
        ({"position": torch.tensor([3, -1])}, "position must be in [0, 2**63), got -1 in row 1"),
        ({"drafting": "random"}, "drafting must be one of deterministic, iid, without_replacement, got 'random'"),
        ({"draft_probs": torch.zeros(2, 5, 8)}, "draft_probs must be None unless mode is 'rejection'"),
        (
            {"draft_probs": torch.zeros(2, 5, 8), "mode": ["sample", "greedy"], "drafting": "iid"},
            "draft_probs must be None unless mode is 'rejection', got mode ['sample', 'greedy']",
        ),
        ({"mode": "rejection"}, REFUSES_DETERMINISTIC),
        ({"mode": "rejection", "draft_probs": torch.zeros(2, 5, 8)}, REFUSES_DETERMINISTIC),
        ({"mode": ["greedy", "rejection"], "draft_probs": torch.zeros(2, 5, 8)}, REFUSES_DETERMINISTIC),
        ({"mode": int32([0, 3]), "draft_probs": torch.zeros(2, 5, 8)}, REFUSES_DETERMINISTIC),
        ({"mode": "rejection", "drafting": "iid"}, "draft_probs must be given in rejection mode, got None"),
        ({"mode": ["rejection", "sample"], "drafting": "iid"}, "draft_probs must be given in rejection mode, got None"),
        ({"mode": int32([2, 3]), "drafting": "iid"}, "draft_probs must be given in rejection mode, got None"),
        ({"mode": int32([0, 4])}, "(2) or 'rejection' (3), got 4 in row 1"),
        ({"mode": torch.tensor([-1, 0])}, "(2) or 'rejection' (3), got -1 in row 0"),
        ({"mode": torch.tensor([0.0, 1.0])}, "mode must be of dtype uint8 or int32 or int64, got float32"),
        (rejection(torch.zeros(2, 5, 7)), "draft_probs must be at least vocab_size = 8 wide, got [2, 5, 7]"),
        (rejection(torch.zeros(2, 4, 8)), "draft_probs must be of shape"),
        (rejection(torch.zeros(10, 8)), "draft_probs must be"),
        (rejection(torch.zeros(2, 5, 8).double()), "draft_probs must be of dtype float32 or bfloat16 or float16"),
        (rejection(torch.zeros(2, 5, 8, device="meta")), "draft_probs must be on cpu, got meta"),
        (rejection(torch.zeros(2, 8, 5).mT), "draft_probs must be contiguous in its last dimension"),
        (rejection(torch.zeros(2, 5, 16)[..., ::2]), "draft_probs must be contiguous in its last dimension"),
        ({"backend": "cuda"}, "backend must be one of auto, reference, native, triton, got 'cuda'"),
    ],
)
def test_refusals_name_argument_constraint_and_value(backend, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**{"backend": backend, **changes})


def ragged(**changes):
    arguments = {
        "logits": torch.zeros(6, 8),
        "draft_tokens": torch.zeros(6, dtype=torch.int32),
        "parents": int32([*T5, -1]),
        "cu_nodes": int32([0, 5, 6]),
        "max_depth": 2,
        **changes,
    }
    return ck.verify_tree(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_depth": None}, "max_depth must be given with cu_nodes, got None"),
        ({"num_nodes": int32([5, 1])}, "num_nodes must be None with cu_nodes"),
        ({"cu_nodes": int32([0, 5, 7])}, "cu_nodes must be rising from 0 to at most 6, got [0, 5, 7]"),
        ({"cu_nodes": int32([1, 5, 6])}, "cu_nodes must be rising from 0 to at most 6, got [1, 5, 6]"),
        ({"cu_nodes": int32([0, 5, 5])}, "cu_nodes must be rising from 0 to at most 6, got [0, 5, 5]"),
        ({"cu_nodes": int32([0, -5, 6])}, "cu_nodes must be rising from 0 to at most 6, got [0, -5, 6]"),
        ({"cu_nodes": torch.tensor([0, 5, 6])}, "cu_nodes must be of dtype int32, got int64"),
        ({"cu_nodes": int32([])}, "cu_nodes must be of shape [B + 1], got [0]"),
        ({"parents": int32([T5])}, "parents must be 1-dimensional"),
    ],
)
def test_ragged_refusals(backend, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged(backend=backend, **changes)


def verdict_of(batch: int, depth: int) -> ck.Verdict:
    return ck.Verdict(
        torch.zeros(batch, depth + 1, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, depth + 1, dtype=torch.int32),
        torch.zeros(batch),
        torch.zeros(batch, dtype=torch.uint8),
    )


def test_out_must_fit():
    with pytest.raises(ValueError, match=re.escape("out.tokens must be of shape [2, 5], got [2, 4]")):
        call(out=verdict_of(2, 3))
    with pytest.raises(ValueError, match=re.escape("out.path must be contiguous")):
        call(out=verdict_of(2, 4)._replace(path=torch.zeros(2, 9, dtype=torch.int32)[:, :5]))
    with pytest.raises(ValueError, match=re.escape("out.status must be of dtype uint8, got int32")):
        call(out=verdict_of(2, 4)._replace(status=int32([0, 0])))


LAYOUTS = ("contiguous", "strided", "permuted")


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values [B, N, ..] in memory of another order, the last dimension always dense."""
    if layout == "strided":
        wide = torch.full((tensor.shape[0], 2 * tensor.shape[1], tensor.shape[2] + 7), torch.nan)
        wide[:, ::2, 3 : 3 + tensor.shape[2]] = tensor
        return wide[:, ::2, 3 : 3 + tensor.shape[2]]
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if layout == "permuted" else tensor


def operands(batch: int, layout: str, modes: list[int]) -> tuple:
    """Arguments of the schema, draft rows among them; modes is one code or one per request."""
    generator = torch.Generator().manual_seed(0)
    logits = laid_out(torch.randn(batch, 5, 33, generator=generator), layout)
    probs = laid_out(torch.rand(batch, 5, 33, generator=generator), layout)
    drafts = torch.randint(33, (batch, 7), generator=generator)[:, 1:6]
    scalars = (modes[0] if len(modes) == 1 else 0, 0.8, 0, 1.0, 0.0, 0.09, 0.3, 7, 3)
    own = None if len(modes) == 1 else int32(modes)
    rows = (own, torch.ones(batch), None, None, None, None, None, torch.arange(batch), None)
    return (logits, drafts, int32(T5), None, None, probs, 33, 4, 1, *scalars, *rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("modes", [[1], [2], [3], [3, 2, 0]], ids=str)
def test_opcheck(layout, modes):
    arguments = operands(3, layout, modes)
    torch.library.opcheck(torch.ops.cerberus_kernels.verify_tree.default, arguments)
    torch.library.opcheck(torch.ops.cerberus_kernels.verify_tree_out.default, arguments, verdict_of(3, 4)._asdict())


def test_layouts_and_ways_in_give_the_same(backend):
    """The schema's operator and the Python function, on memory of every order."""
    given = operands(3, "contiguous", [3, 2, 0])
    keys = {"mode": int32([3, 2, 0]), "drafting": "iid", "seed": torch.arange(3), "position": 3, "backend": backend}
    expected = ck.verify_tree(*given[:3], draft_probs=given[5], temperature=torch.ones(3), **keys)
    for layout in LAYOUTS:
        again = operands(3, layout, [3, 2, 0])
        verdict = ck.verify_tree(*again[:3], draft_probs=again[5], temperature=torch.ones(3), **keys)
        direct = torch.ops.cerberus_kernels.verify_tree(*again, backend=backend)
        for field, *others in zip(expected, verdict, direct, strict=True):
            assert all(torch.equal(field, other) for other in others)


def test_compiles_whole(backend):
    def step(logits, drafts, temperature, probs, seeds, out):
        first = ck.verify_tree(logits, drafts, int32(T5), backend=backend)
        second = ck.verify_tree(
            logits, drafts, int32(T5), mode=["greedy", "typical"], temperature=temperature, out=out, backend=backend
        )
        third = ck.verify_tree(
            logits, drafts, int32(T5), mode="sample", temperature=temperature, top_p=0.9, seed=seeds, position=7,
            backend=backend,
        )  # fmt: skip
        fourth = ck.verify_tree(
            logits, drafts, int32(T5), mode="rejection", drafting="without_replacement", draft_probs=probs, top_k=9,
            seed=seeds, backend=backend,
        )  # fmt: skip
        return first.tokens + 1, first.entropy, second.tokens + 1, third.tokens + 1, fourth.tokens + 1, fourth.status

    logits, drafts, probs = torch.randn(2, 5, 33), torch.randint(33, (2, 5)), torch.rand(2, 5, 33)
    rest = (torch.tensor([1.0, 0.7]), probs, torch.tensor([4, 5]))
    out = verdict_of(2, 4)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    expected = step(logits, drafts, *rest, verdict_of(2, 4))
    for actual, right in zip(compiled(logits, drafts, *rest, out), expected, strict=True):
        assert torch.equal(actual, right)
    assert torch.equal(out.tokens + 1, expected[2])


@pytest.mark.parametrize("mode", MODES)
def test_numbers_and_tensors_of_numbers_mean_the_same(backend, mode):
    logits, drafts = torch.randn(2, 5, 33), torch.randint(33, (2, 5))
    numbers = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01, "epsilon": 0.2, "delta": 0.4}
    counts = {"top_k": 20, "seed": 11, "position": 5}
    tensors = {name: torch.full((2,), value) for name, value in {**numbers, **counts}.items()}
    given = {"logits": logits, "draft_tokens": drafts, "backend": backend}
    if mode == "rejection":
        given.update(drafting="iid", draft_probs=torch.rand(2, 5, 33))
    scalars = call(mode=mode, **given, **numbers, **counts)
    codes = int32([MODES.index(mode)] * 2)
    for code in (codes, codes.to(torch.uint8), [mode] * 2)[: some(backend, 3, 1)]:
        rows = call(mode=code, **given, **tensors)
        assert all(torch.equal(a, b) for a, b in zip(scalars, rows, strict=True))
