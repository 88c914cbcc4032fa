"""verify_tree through the native library."""

from __future__ import annotations

from typing import Any

from ..._native import function
from .parameters import NUM_INPUTS, PARAMETERS, check_rejection, check_rows

_COUNT = len(PARAMETERS)


def verify_tree_of_values(*args: Any) -> None:
    """The schema's inputs, each parameter as a number or a tensor, then a Verdict's fields to fill."""
    function("verify_tree")(*args)


def verify_tree_out(*args: Any) -> None:
    """The schema's arguments, then a Verdict's fields to fill."""
    inputs, rest = args[:NUM_INPUTS], args[NUM_INPUTS:]
    scalars, rows, outputs = rest[:_COUNT], rest[_COUNT : 2 * _COUNT], rest[2 * _COUNT :]
    values = (scalar if tensor is None else tensor for scalar, tensor in zip(scalars, rows, strict=True))
    try:
        verify_tree_of_values(*inputs, *values, *outputs)
    except ValueError:
        check_rows(rows)  # says it in words, as the next does
        modes = [scalars[0]] if rows[0] is None else rows[0].tolist()
        check_rejection(modes, drafting=inputs[-1], draft_probs=inputs[5])
        raise
