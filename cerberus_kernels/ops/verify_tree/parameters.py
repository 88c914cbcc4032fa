"""Parameters of verify_tree that are one number for all requests or a tensor with one per request."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._checks import check_tensor, refuse

OP = "verify_tree"
NUM_INPUTS = 9  # arguments of the schema before the parameters
_INTEGERS = (torch.int32, torch.int64)


class Mode(enum.IntEnum):
    """Acceptance rules by the code that a mode tensor holds."""

    GREEDY = 0
    TYPICAL = 1
    SAMPLE = 2
    REJECTION = 3


class Drafting(enum.IntEnum):
    """How the drafts were made, by the code that the schema holds."""

    DETERMINISTIC = 0
    IID = 1
    WITHOUT_REPLACEMENT = 2


_MODE_CONSTRAINT = "'greedy' (code 0), 'typical' (1), 'sample' (2) or 'rejection' (3)"
DRAFTING_CODES = {drafting.name.lower(): drafting.value for drafting in Drafting}
MODE_CODES = {mode.name.lower(): mode.value for mode in Mode}


class Parameter(NamedTuple):
    """Name, default, type of the scalar, dtypes of the per-request tensor, allowed values in words and as a test."""

    name: str
    default: Any
    kind: type
    dtypes: tuple[torch.dtype, ...]
    constraint: str
    allowed: Callable[[Any], bool]


_FLOAT = (torch.float32,)
PARAMETERS = (
    Parameter("mode", 0, int, (torch.uint8, *_INTEGERS), _MODE_CONSTRAINT, lambda x: 0 <= x <= 3),
    Parameter("temperature", 1.0, float, _FLOAT, "finite and >= 0", lambda x: 0 <= x < math.inf),
    Parameter("top_k", 0, int, _INTEGERS, ">= 0, where 0 keeps all", lambda x: 0 <= x < 2**63),
    Parameter("top_p", 1.0, float, _FLOAT, "in (0, 1]", lambda x: 0 < x <= 1),
    Parameter("min_p", 0.0, float, _FLOAT, "in [0, 1]", lambda x: 0 <= x <= 1),
    Parameter("epsilon", 0.09, float, _FLOAT, "in [0, 1]", lambda x: 0 <= x <= 1),
    Parameter("delta", 0.3, float, _FLOAT, "finite and >= 0", lambda x: 0 <= x < math.inf),
    Parameter("seed", 0, int, (torch.int64,), "in [-2**63, 2**63)", lambda x: -(2**63) <= x < 2**63),
    Parameter("position", 0, int, _INTEGERS, "in [0, 2**63)", lambda x: 0 <= x < 2**63),
)


def mode_code(mode: Any, device: torch.device) -> Any:
    """A mode's name to its code, a list of names to a tensor of codes; anything else unchanged."""
    if isinstance(mode, str):
        if mode not in MODE_CODES:
            refuse(OP, "mode", _MODE_CONSTRAINT, repr(mode))
        return MODE_CODES[mode]
    if isinstance(mode, (list, tuple)):
        for name in mode:
            if not isinstance(name, str) or name not in MODE_CODES:
                refuse(OP, "mode", f"a list of names, each {_MODE_CONSTRAINT}", repr(name))
        return torch.tensor([MODE_CODES[name] for name in mode], dtype=torch.uint8, device=device)
    if not isinstance(mode, torch.Tensor):
        refuse(OP, "mode", "a name, a list of names or a tensor of codes", repr(mode))
    return mode


def drafting_code(drafting: Any) -> int:
    """A drafting scheme's name to its code."""
    if not isinstance(drafting, str) or drafting not in DRAFTING_CODES:
        refuse(OP, "drafting", f"one of {', '.join(DRAFTING_CODES)}", repr(drafting))
    return DRAFTING_CODES[drafting]


def check_rejection(modes: Sequence[int], drafting: int, draft_probs: torch.Tensor | None) -> None:
    """Refuse rejection mode without what it needs; ``modes`` holds a code per request."""
    if Mode.REJECTION not in modes:
        return
    if drafting == Drafting.DETERMINISTIC:
        refuse(
            OP,
            "drafting",
            "'iid' or 'without_replacement' in rejection mode (deterministic drafts have no distribution that could be "
            "divided by: mode 'sample' is exact for them)",
            "'deterministic'",
        )
    if draft_probs is None:
        refuse(OP, "draft_probs", "given in rejection mode", None)


def split(parameter: Parameter, value: Any, batch: int, device: torch.device) -> tuple[Any, torch.Tensor | None]:
    """A parameter as the pair that the schema takes: a checked scalar, or the per-request tensor.

    The values of a tensor are looked at by the backend (:func:`check_rows`), not here, where a compiler may be tracing.
    """
    name, default, kind, dtypes, constraint, allowed = parameter
    if type(value) is kind and value == default:
        return default, None
    if isinstance(value, torch.Tensor):
        check_tensor(OP, name, value, dtypes=dtypes, shape=(batch,), device=device, last_contiguous=False)
        return default, value
    if not isinstance(value, (int, float)) or (kind is int and not isinstance(value, int)):
        refuse(OP, name, f"{kind.__name__} or a tensor [{batch}]", repr(value))
    if not allowed(value):
        got = repr(Mode(int(value)).name.lower()) if name == "mode" else value
        refuse(OP, name, constraint, got)
    return kind(value), None


DEFAULTS = tuple(parameter.default for parameter in PARAMETERS) + (None,) * len(PARAMETERS)


def with_defaults(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The schema's arguments with the parameters that a call left out, or torch's dispatcher dropped, at their end."""
    return args + DEFAULTS[len(args) - NUM_INPUTS :]


def without_defaults(parameters: tuple[Any, ...]) -> tuple[Any, ...]:
    """Scalars and tensors up to the last that is not a default: an argument costs time on its way through torch."""
    count = len(parameters)
    while count > len(PARAMETERS) and parameters[count - 1] is None:
        count -= 1
    if count == len(PARAMETERS):
        while count and parameters[count - 1] == DEFAULTS[count - 1]:
            count -= 1
    return parameters[:count]


def check_rows(rows: Sequence[torch.Tensor | None]) -> None:
    """Refuse per-request tensors with a value out of range; ``rows`` is in the order of PARAMETERS."""
    for parameter, tensor in zip(PARAMETERS, rows, strict=True):
        if tensor is None:
            continue
        for b, value in enumerate(tensor.tolist()):
            if not parameter.allowed(value):
                refuse(OP, parameter.name, parameter.constraint, f"{value} in row {b}")
