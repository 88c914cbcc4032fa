"""Shared fixtures: every test starts from one seed, and unwritten outputs are NaN or the greatest integer."""

from __future__ import annotations

import functools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: its kernels run on CPU tensors

from cerberus_kernels import _native
from cerberus_kernels._dispatch import OPERATORS


def pytest_generate_tests(metafunc):
    """``backend``: every backend of the operator of the test's file, ``test_<operator>*.py`` or its ``OPERATOR``."""
    if "backend" not in metafunc.fixturenames or _chosen_by_the_test(metafunc):
        return
    stem = metafunc.module.__name__.rpartition(".")[2].removeprefix("test_")
    name = getattr(metafunc.module, "OPERATOR", None) or max(filter(stem.startswith, OPERATORS), key=len)
    only = os.environ.get("CERBERUS_TEST_BACKENDS", "").split(",")  # for runs that are about one of them
    backends = sorted(OPERATORS[name].implementations)
    metafunc.parametrize("backend", [b for b in backends if b in only] or backends, indirect=True)


def _chosen_by_the_test(metafunc) -> bool:
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0]
        if "backend" in (names.replace(" ", "").split(",") if isinstance(names, str) else names):
            return True
    return False


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@functools.cache
def _quicken_the_interpreter() -> None:
    """Let a device function called from a kernel use what the launch has patched, instead of patching it all again.

    Triton's interpreter looks through triton.language at every such call, which takes longer than what is called.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


@pytest.fixture
def backend(request) -> str:
    """One backend's name; all of them run on this machine's CPU, triton in its interpreter."""
    if request.param == "native":
        assert _native.available(), _native.why_unavailable()
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return request.param


@pytest.fixture
def interpreter() -> None:
    """For a test that calls backend "triton" by its name."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        _quicken_the_interpreter()
