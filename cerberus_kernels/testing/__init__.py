"""Inputs and tolerances that tests and benchmarks share; engines may use them to test their own integration."""

from .isa import available_isa_levels, isa_level
from .tolerances import assert_close, tolerance
from .trees import NODE_COUNTS, T5, binary, random_parents, tree_cases

__all__ = [
    "NODE_COUNTS",
    "T5",
    "assert_close",
    "available_isa_levels",
    "binary",
    "isa_level",
    "random_parents",
    "tolerance",
    "tree_cases",
]
