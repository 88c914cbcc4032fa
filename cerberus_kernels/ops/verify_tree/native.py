"""verify_tree through the native library."""

from __future__ import annotations

from typing import Any

from ..._native import function
from .parameters import PARAMETERS, check_rows

_FIRST_ROWS = 7 + len(PARAMETERS)


def verify_tree_out(*args: Any) -> None:
    """The schema's arguments as they are, then a Verdict's fields to fill."""
    check_rows(args[_FIRST_ROWS : _FIRST_ROWS + len(PARAMETERS)])
    function("verify_tree")(*args)
