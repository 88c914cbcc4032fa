"""Which backend runs a call: automatic choice, names, CERBERUS_BACKEND, and how little choosing costs."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cerberus_kernels as ck
from cerberus_kernels import _dispatch, _native
from cerberus_kernels._dispatch import OPERATORS, Operator

PARENTS = torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32)


@pytest.fixture
def operator(monkeypatch):
    """tree_mask's operator with implementations that only say who they are."""
    operator = OPERATORS["tree_mask"]
    named = {
        name: lambda parents, num_nodes=None, code=code: torch.tensor(code)
        for code, name in enumerate(("reference", "native"))
    }
    monkeypatch.setattr(operator, "implementations", named)
    operator.forget_choices()
    yield operator
    monkeypatch.undo()
    _dispatch.force_backend()


def ran(**arguments) -> str:
    return ("reference", "native")[int(torch.ops.cerberus_kernels.tree_mask(PARENTS, **arguments))]


def test_auto_prefers_native_on_cpu(operator):
    assert ran() == "native"
    assert ran(backend="reference") == "reference"


def test_auto_falls_back_but_a_name_does_not(operator, monkeypatch):
    monkeypatch.setattr(_native, "why_unavailable", lambda: "libcerberus_ffi.so does not exist")
    operator.forget_choices()
    assert ran() == "reference"
    with pytest.raises(ck.BackendUnavailable, match="tree_mask: backend 'native' is unavailable on cpu: libcerberus"):
        ran(backend="native")


def test_environment_stands_in_for_auto_only(operator, monkeypatch):
    monkeypatch.setenv("CERBERUS_BACKEND", "reference")
    _dispatch.force_backend()
    assert _dispatch.forced_backend() == "reference"
    assert ran() == "reference"
    assert ran(backend="native") == "native"
    monkeypatch.delenv("CERBERUS_BACKEND")
    _dispatch.force_backend()
    assert ran() == "native"


def test_forced_backend_never_falls_back(operator):
    _dispatch.force_backend("triton")
    with pytest.raises(ck.BackendUnavailable, match="tree_mask: backend 'triton' is unavailable on cpu"):
        ran()


def test_unknown_names_are_refused(operator, monkeypatch):
    with pytest.raises(ValueError, match="tree_mask: backend must be one of auto, reference, native, triton, got 'cud"):
        ran(backend="cuda")
    monkeypatch.setenv("CERBERUS_BACKEND", "fastest")
    with pytest.raises(ValueError, match=r"CERBERUS_BACKEND must be one of .*, got 'fastest'"):
        _dispatch.force_backend()


def test_an_operator_needs_a_backend_argument():
    with pytest.raises(ValueError, match="nameless: schema must hold 'str backend'"):
        Operator("nameless", "(Tensor x) -> Tensor", {}, lambda x: x)


def test_choosing_a_backend_costs_little(operator):
    """Through torch and our choice a call costs a few times torch's own smallest operator, not tens of times."""
    call = torch.ops.cerberus_kernels.tree_mask
    result = torch.tensor(0)
    operator.implementations["native"] = lambda parents, num_nodes=None: result
    operator.forget_choices()

    def shortest(body, calls=200, rounds=20):
        best = float("inf")
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(calls):
                body()
            best = min(best, time.perf_counter() - start)
        return best

    assert shortest(lambda: call(PARENTS)) < 8 * shortest(lambda: PARENTS.unsqueeze(0))


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_who_watches_torchs_dispatcher_sees_the_operator():
    """A plain call takes a shorter way; modes, profilers and autograd must not lose sight of one for that."""
    parents = torch.tensor([[-1, 0]], dtype=torch.int32)
    with Recorder() as mode:
        ck.tree_mask(parents)
        ck.verify_tree(torch.zeros(1, 2, 8), parents, parents)
    assert {"cerberus_kernels.tree_mask.default", "cerberus_kernels.verify_tree.default"} <= set(mode.seen)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ck.tree_mask(parents)
        ck.verify_tree(torch.zeros(1, 2, 8), parents, parents)
    names = {event.key for event in profile.key_averages()}
    assert {"cerberus_kernels::tree_mask", "cerberus_kernels::verify_tree"} <= names
    hidden = torch.ones(1, 4, requires_grad=True)
    states = ck.head_states(hidden, torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4))
    states.sum().backward()
    assert hidden.grad.tolist() == [[2.0] * 4]
    with torch.inference_mode():
        assert torch.equal(ck.head_states(hidden, torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4)), states)


def test_a_plain_call_takes_the_short_way(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("torch's dispatcher was asked")

    for name in ("tree_mask", "verify_tree"):
        monkeypatch.setattr(OPERATORS[name], "_packet", refuse)
    parents = torch.tensor([[-1, 0]], dtype=torch.int32)
    assert ck.tree_mask(parents).tolist() == [[[1], [3]]]
    assert ck.verify_tree(torch.zeros(1, 2, 8), parents, parents).num_accepted.tolist() == [1]
    with pytest.raises(AssertionError, match="dispatcher was asked"):
        ck.tree_mask(parents, backend="reference")


def test_triton_runs_on_the_cpu_only_in_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in _dispatch.why_no_triton("cpu")
    assert _dispatch.why_no_triton("cuda") == ""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _dispatch.why_no_triton("cpu") == ""
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert "pip install cerberus-kernels[triton]" in _dispatch.why_no_triton("cuda")
