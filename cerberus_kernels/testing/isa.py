"""Forcing an instruction-set level, so that one machine tests every level it can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _native

_LEVELS = ("baseline", "avx2", "avx512", "amx")


def available_isa_levels() -> tuple[str, ...]:
    """Levels that this processor runs, lowest first; empty without the native library."""
    if not _native.available():
        return ()
    return _LEVELS[: _LEVELS.index(_native.function("best_isa")()) + 1]


@contextmanager
def isa_level(level: str) -> Iterator[None]:
    """Run the body with the native library at ``level``."""
    before = _native.isa()
    _native.set_isa(level)
    try:
        yield
    finally:
        _native.set_isa(before)
