"""Other libraries' functions for the same jobs, from their installed distributions; nothing of theirs lies here.

``pip install '.[peers]'`` brings them; ``pip install --no-deps medusa-llm==0.1`` is enough for Medusa's, and
transformers comes with the decoder.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from types import ModuleType

import pytest


@functools.cache
def medusa() -> ModuleType:
    """The module of medusa-llm 0.1 that holds its tree buffers, candidates and acceptance.

    It is loaded by its path: the package around it needs a transformers of 2023 to be imported.
    """
    try:
        path = importlib.metadata.distribution("medusa-llm").locate_file("medusa/model/utils.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("medusa-llm is not installed (pip install --no-deps medusa-llm==0.1)")
    spec = importlib.util.spec_from_file_location("bench_peer_medusa", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def transformers_sampling():
    """The verification of transformers' assisted generation: drafts of one chain against the target's distributions."""
    try:
        from transformers.generation.utils import _speculative_sampling
    except ImportError as error:
        pytest.skip(f"transformers has no _speculative_sampling here ({error})")
    return _speculative_sampling
