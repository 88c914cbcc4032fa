"""One registry of operators: their schema for torch, and which backend runs a call."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _native
from .version import __version__

NAMESPACE = "cerberus_kernels"
BACKENDS = ("auto", "reference", "native", "triton")
MINIMUM_TORCH = (2, 11)


def check_torch_version(version: str) -> None:
    """Raise ImportError with both versions when torch is older than the oldest that is supported."""
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_TORCH:
        oldest = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(f"cerberus_kernels {__version__} needs torch {oldest} or newer, found {version}")


check_torch_version(torch.__version__)
_library = torch.library.Library(NAMESPACE, "DEF")
OPERATORS: dict[str, Operator] = {}
_forced_backend = "auto"

# Device type behind each of torch's dispatch keys; a ROCm tensor is a CUDA tensor to torch.
_DEVICE_TYPES = {"CPU": "cpu", "CUDA": "cuda", "CompositeExplicitAutograd": "other"}
_ORDER = {"cpu": ("native", "reference"), "cuda": ("native", "triton", "reference"), "other": ("reference",)}


# Arguments of the short way: what stands in for one of these, such as a NumPy array for a tensor, is refused in words.
PLAIN = {torch.Tensor, torch.nn.Parameter, torch.dtype, type(None), bool, int, float, str, list}

_TENSORS = {torch.Tensor, torch.nn.Parameter}

# What `Operator.attempt` gives where the call has to take the longer way.
REFUSED: Any = type("Refused", (), {"__repr__": lambda self: "REFUSED"})()


class BackendUnavailable(RuntimeError):
    """The backend that was asked for by name cannot run this call; the message says why."""


class LazyTriton:
    """The operator's function of ``ops/<name>/triton.py``, imported on its first call: triton takes long to load."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[..., Any] | None = None

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        if self._function is None:
            module = importlib.import_module(f".ops.{self.name}.triton", __package__)
            self._function = getattr(module, self.name)
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)


def why_no_triton(device_type: str) -> str:
    """Why Triton kernels cannot run on a device of this type; empty when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install cerberus-kernels[triton]`"
    if device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return f"triton compiles no {device_type} code; TRITON_INTERPRET=1, set before triton is imported, interprets it"


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
        if "str backend" not in schema:
            raise ValueError(f"{name}: schema must hold 'str backend', got {schema!r}")
        self.name = name
        self.implementations = implementations
        self._chosen: dict[tuple[str, str], Callable[..., Any]] = {}  # (device type, backend asked for)
        self._native: dict[str, bool] = {}  # backend asked for -> whether native code runs on the CPU
        _library.define(name + schema)
        for key, device_type in _DEVICE_TYPES.items():
            _library.impl(name, self._runner(device_type), key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        self._packet = getattr(getattr(torch.ops, NAMESPACE), name)
        self._differentiable = False
        OPERATORS[name] = self

    def call(self, *args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        """Run the operator with the schema's arguments."""
        if not torch.compiler.is_compiling() and self.goes_native(args, backend):
            return self.implementations["native"](*args, **kwargs)
        return self._packet(*args, backend=backend, **kwargs)

    def differentiate(self, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
        """Give the operator a gradient; both functions as ``torch.library.register_autograd`` takes them.

        Tensors among the operator's arguments must not be keyword-only for this.
        """
        self._differentiable = True
        name = f"{NAMESPACE}::{self.name}"
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_library)

    def _runner(self, device_type: str) -> Callable[..., Any]:
        """What torch calls for tensors of one device type; this path runs in every step of every decoder."""
        chosen = self._chosen

        def run(*args: Any, backend: str = "auto", **kwargs: Any) -> Any:
            implementation = chosen.get((device_type, backend))
            if implementation is None:
                implementation = self.implementations[self.backend_for(device_type, backend)]
                chosen[device_type, backend] = implementation
            return implementation(*args, **kwargs)

        return run

    def attempt(self, *args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        """The native result of a call that needs no word said about it, else REFUSED.

        For the first line of an operator's function: the checks in Python cost more than a small call's work, and the
        native function makes its own. What it refuses goes on to those in Python, which have the words.
        """
        if torch.compiler.is_compiling() or not self.goes_native(args, backend):
            return REFUSED
        if kwargs and any(type(value) not in PLAIN for value in kwargs.values()):
            return REFUSED
        try:
            return self.implementations["native"](*args, **kwargs)
        except Exception:
            return REFUSED

    def goes_native(self, args: Sequence[Any], backend: str) -> bool:
        """Whether a call may go to the native CPU function past torch's dispatcher, whose way costs several times more.

        Only where nobody would see the difference: plain arguments, the first that is given a CPU tensor, and no
        autograd, mode, transform or profiler that wants to see the operator. A compiler must not come here.
        """
        native = self._native.get(backend)
        if native is None:
            known = backend in BACKENDS and not self.why_unavailable("native", "cpu")
            native = self._native[backend] = known and self.backend_for("cpu", backend) == "native"
        if not native:
            return False
        first, wants_gradient = None, False
        for value in args:
            if type(value) not in PLAIN:
                return False
            if type(value) in _TENSORS and value.requires_grad:
                wants_gradient = True
            if first is None:
                first = value[0] if type(value) is list and value else value
        if type(first) is not torch.Tensor:
            return False
        if torch.is_grad_enabled() and (wants_gradient if self._differentiable else first.requires_grad):
            return False
        if self._differentiable and forward_ad._current_level >= 0:
            return False
        return (
            first.is_cpu
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._functorch.peek_interpreter_stack() is None
            and not torch._C._autograd._profiler_enabled()
        )

    def forget_choices(self) -> None:
        """Choose backends anew on the next call."""
        self._chosen.clear()
        self._native.clear()

    def backend_for(self, device_type: str, backend: str = "auto") -> str:
        """Name of the backend that runs a call on ``"cpu"``, ``"cuda"`` or ``"other"``; a name never falls back."""
        if backend == "auto":
            backend = _forced_backend
        if backend == "auto":
            return next(name for name in _ORDER[device_type] if not self.why_unavailable(name, device_type))
        reason = self.why_unavailable(backend, device_type)
        if reason:
            raise BackendUnavailable(f"{self.name}: backend {backend!r} is unavailable on {device_type}: {reason}")
        return backend

    def why_unavailable(self, backend: str, device_type: str) -> str:
        """Why ``backend`` cannot run this operator on a device of this type; empty when it can."""
        if backend not in BACKENDS[1:]:
            raise ValueError(f"{self.name}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend not in self.implementations:
            return f"this operator has no {backend} implementation yet"
        if backend == "native":
            if device_type != "cpu":
                return f"the native library holds no {device_type} code"
            return _native.why_unavailable()
        return why_no_triton(device_type) if backend == "triton" else ""


def forced_backend() -> str:
    """The backend that stands in for ``"auto"``: ``CERBERUS_BACKEND`` at import, or what `force_backend` set."""
    return _forced_backend


def force_backend(backend: str | None = None) -> None:
    """Let ``backend`` stand in for ``"auto"`` from now on.

    Args:
        backend: a name from `BACKENDS`; None reads ``CERBERUS_BACKEND`` again.

    Raises:
        ValueError: an unknown name.
    """
    global _forced_backend
    origin = "backend"
    if backend is None:
        backend, origin = os.environ.get("CERBERUS_BACKEND") or "auto", "CERBERUS_BACKEND"
    if backend not in BACKENDS:
        raise ValueError(f"{origin} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    _forced_backend = backend
    for operator in OPERATORS.values():
        operator.forget_choices()


force_backend()
