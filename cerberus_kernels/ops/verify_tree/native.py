"""verify_tree through the native library."""

from __future__ import annotations

from typing import Any

from ..._native import function
from .parameters import NUM_INPUTS, PARAMETERS, check_rows

_FIRST_ROWS = NUM_INPUTS + len(PARAMETERS)


def verify_tree_out(*args: Any) -> None:
    """The schema's arguments as they are, then a Verdict's fields to fill."""
    rows = args[_FIRST_ROWS : _FIRST_ROWS + len(PARAMETERS)]
    if any(tensor is not None for tensor in rows):
        check_rows(rows)
    function("verify_tree")(*args)
