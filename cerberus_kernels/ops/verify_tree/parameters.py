"""Parameters of verify_tree that are one number for all requests or a tensor with one per request."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._checks import check_tensor, refuse

OP = "verify_tree"
_INTEGERS = (torch.int32, torch.int64)


class Mode(enum.IntEnum):
    """Acceptance rules by the code that a mode tensor holds."""

    GREEDY = 0
    TYPICAL = 1
    SAMPLE = 2
    REJECTION = 3


SUPPORTED_MODES = (Mode.GREEDY, Mode.TYPICAL)
_MODE_CONSTRAINT = "'greedy' (code 0) or 'typical' (code 1), the modes that work now"
_MODES = {mode.name.lower(): mode for mode in Mode}


class Parameter(NamedTuple):
    """Name, type of the scalar, dtypes of the per-request tensor, allowed values in words and as a test."""

    name: str
    kind: type
    dtypes: tuple[torch.dtype, ...]
    constraint: str
    allowed: Callable[[Any], bool]


_FLOAT = (torch.float32,)
PARAMETERS = (
    Parameter("mode", int, (torch.uint8, *_INTEGERS), _MODE_CONSTRAINT, lambda x: x in (Mode.GREEDY, Mode.TYPICAL)),
    Parameter("temperature", float, _FLOAT, "finite and >= 0", lambda x: 0 <= x < math.inf),
    Parameter("top_k", int, _INTEGERS, ">= 0, where 0 keeps all", lambda x: 0 <= x < 2**63),
    Parameter("top_p", float, _FLOAT, "in (0, 1]", lambda x: 0 < x <= 1),
    Parameter("min_p", float, _FLOAT, "in [0, 1]", lambda x: 0 <= x <= 1),
    Parameter("epsilon", float, _FLOAT, "in [0, 1]", lambda x: 0 <= x <= 1),
    Parameter("delta", float, _FLOAT, "finite and >= 0", lambda x: 0 <= x < math.inf),
    Parameter("seed", int, (torch.int64,), "in [-2**63, 2**63)", lambda x: -(2**63) <= x < 2**63),
    Parameter("position", int, _INTEGERS, "in [0, 2**63)", lambda x: 0 <= x < 2**63),
)


def mode_code(mode: Any, device: torch.device) -> Any:
    """A mode's name to its code, a list of names to a tensor of codes; anything else unchanged."""
    if isinstance(mode, str):
        if mode not in _MODES:
            refuse(OP, "mode", _MODE_CONSTRAINT, repr(mode))
        return _MODES[mode]
    if isinstance(mode, (list, tuple)):
        unknown = next((name for name in mode if name not in _MODES), None)
        if unknown is not None:
            refuse(OP, "mode", f"a list of names, each {_MODE_CONSTRAINT}", repr(unknown))
        return torch.tensor([_MODES[name] for name in mode], dtype=torch.uint8, device=device)
    if not isinstance(mode, torch.Tensor):
        refuse(OP, "mode", "a name, a list of names or a tensor of codes", repr(mode))
    return mode


def split(parameter: Parameter, value: Any, batch: int, device: torch.device) -> tuple[Any, torch.Tensor | None]:
    """A parameter as the pair that the schema takes: a checked scalar, or the per-request tensor.

    The values of a tensor are looked at by the backend (:func:`check_rows`), not here, where a compiler may be tracing.
    """
    name, kind, dtypes, constraint, allowed = parameter
    if isinstance(value, torch.Tensor):
        check_tensor(OP, name, value, dtypes=dtypes, shape=(batch,), device=device, last_contiguous=False)
        return kind(0), value
    if not isinstance(value, (int, float)) or (kind is int and not isinstance(value, int)):
        refuse(OP, name, f"{kind.__name__} or a tensor [{batch}]", repr(value))
    if not allowed(value):
        got = repr(Mode(int(value)).name.lower()) if name == "mode" else value
        refuse(OP, name, constraint, got)
    return kind(value), None


def check_rows(rows: Sequence[torch.Tensor | None]) -> None:
    """Refuse per-request tensors with a value out of range; ``rows`` is in the order of PARAMETERS."""
    for parameter, tensor in zip(PARAMETERS, rows, strict=True):
        if tensor is None:
            continue
        for b, value in enumerate(tensor.tolist()):
            if not parameter.allowed(value):
                refuse(OP, parameter.name, parameter.constraint, f"{value} in row {b}")
