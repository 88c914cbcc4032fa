"""One registry of operators: their schema for torch, and which backend runs a call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from . import _native

NAMESPACE = "cerberus_kernels"
BACKENDS = ("auto", "reference", "native", "triton")
_library = torch.library.Library(NAMESPACE, "DEF")
OPERATORS: dict[str, Operator] = {}


class BackendUnavailable(RuntimeError):
    """The backend that was asked for by name cannot run this call; the message says why."""


class Operator:
    """One operator: implementations by backend behind one torch schema.

    Args:
        name: the operator's snake_case name.
        schema: torch schema of the arguments and results, ``(Tensor x, *, str backend="auto") -> Tensor``; it must
            hold ``str backend``.
        implementations: backend name to callable; all take the schema's arguments without ``backend``.
        fake: shapes and dtypes of the results, called with the schema's arguments.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        implementations: dict[str, Callable[..., Any]],
        fake: Callable[..., Any],
    ) -> None:
        self.name = name
        self.implementations = implementations
        _library.define(name + schema)
        _library.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        self.call = getattr(getattr(torch.ops, NAMESPACE), name)
        OPERATORS[name] = self

    def _run(self, *args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        device = next(_device(value) for value in (*args, *kwargs.values()) if _device(value) is not None)
        return self.implementations[self.backend_for(device, backend)](*args, **kwargs)

    def backend_for(self, device: torch.device, backend: str = "auto") -> str:
        """Name of the backend that runs a call on ``device``; an explicit name never falls back."""
        if backend == "auto":
            backend = forced_backend()
        if backend == "auto":
            order = ("native", "reference") if device.type == "cpu" else ("native", "triton", "reference")
            return next(name for name in order if not self.why_unavailable(name, device.type))
        reason = self.why_unavailable(backend, device.type)
        if reason:
            raise BackendUnavailable(f"{self.name}: backend {backend!r} is unavailable on {device.type}: {reason}")
        return backend

    @functools.cache  # noqa: B019  operators live as long as the process
    def why_unavailable(self, backend: str, device_type: str) -> str:
        """Why ``backend`` cannot run this operator on a device of this type; empty when it can."""
        if backend not in BACKENDS[1:]:
            raise ValueError(f"{self.name}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend not in self.implementations:
            return f"this operator has no {backend} implementation yet"
        if backend == "reference":
            return ""
        if backend == "native":
            if device_type != "cpu":
                return f"the native library holds no {device_type} code"
            return _native.why_unavailable()
        return ""


def forced_backend() -> str:
    """Value of ``CERBERUS_BACKEND``, by default ``auto``."""
    return os.environ.get("CERBERUS_BACKEND") or "auto"


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return value[0].device
    return None
