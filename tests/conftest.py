"""Shared fixtures: every test starts from one seed, and unwritten outputs are NaN or the greatest integer."""

from __future__ import annotations

import pytest
import torch

from cerberus_kernels import _native


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["reference", "native"])
def backend(request) -> str:
    """Every backend that runs on this machine's CPU; the native one must be there."""
    if request.param == "native":
        assert _native.available(), _native.why_unavailable()
    return request.param
