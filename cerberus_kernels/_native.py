"""Loads the native library once, and says in words why it cannot be loaded."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from .source_hash import source_hash

_PACKAGE = Path(__file__).resolve().parent
# The variable names another build of the binding, such as the one of `make sanitize`.
_LIBRARY = Path(os.environ.get("CERBERUS_LIBRARY") or _PACKAGE / "lib" / "libcerberus_ffi.so")
_REBUILD = "build it with `pip install -e .` (or `pip install .`)"


@functools.cache
def _load() -> tuple[Any, str]:
    """The library's functions and an empty reason, or None and the reason it is missing."""
    if not _LIBRARY.is_file():
        return None, f"{_LIBRARY} does not exist; {_REBUILD}"
    try:
        import torch  # noqa: F401  torch's OpenMP runtime must be in the process before ours looks for one
        import tvm_ffi

        module = tvm_ffi.load_module(str(_LIBRARY))
        built_from = module.get_function("source_hash")()
    except Exception as error:  # whatever the loader throws, the caller gets the library's name and the reason
        return None, f"{_LIBRARY} cannot be loaded ({error}); {_REBUILD}"
    sources = _PACKAGE.parent / "csrc"
    if sources.is_dir() and source_hash(sources) != built_from:
        return None, f"{_LIBRARY} is stale: it was built from other sources than {sources} holds now; {_REBUILD}"
    module.get_function("active_isa")()
    return module, ""


def available() -> bool:
    """Whether the native library is loaded."""
    return _load()[0] is not None


def why_unavailable() -> str:
    """Why the native library is missing; empty when it is there."""
    return _load()[1]


@functools.cache
def function(name: str) -> Any:
    """The native function ``name``; call only when :func:`available`."""
    module, reason = _load()
    if module is None:
        raise RuntimeError(reason)
    return module.get_function(name)


def isa() -> str:
    """Instruction-set level in use: ``baseline``, ``avx2``, ``avx512`` or ``amx``."""
    return function("active_isa")()


def set_isa(level: str) -> None:
    """Use instruction-set ``level`` from now on, for tests and measurements; `CERBERUS_CPU_ISA` sets it at start."""
    function("set_isa")(level)
