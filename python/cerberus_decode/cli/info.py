"""`cerberus info`: what runs here, and why something does not."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

PACKAGES = (
    "cerberus-kernels",
    "torch",
    "transformers",
    "apache-tvm-ffi",
    "triton",
    "safetensors",
    "gguf",
    "accelerate",
)


def info() -> None:
    """Show versions, backends by operator and why one is missing, threads, the embedded model and shipped heads."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for title, lines in (
        ("versions", _versions()),
        ("native library", _native()),
        ("operators", _operators()),
        ("models", _models()),
    ):
        console.print(title, style="bold")
        for name, value in lines:
            console.print(f"  {name:<18} {value}", markup=False)


def _versions() -> list[tuple[str, str]]:
    found = [("python", f"{platform.python_version()} on {platform.machine()}")]
    for package in PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append((package, _own_version() if package == "cerberus-kernels" else "not installed"))
    return found


def _own_version() -> str:
    import cerberus_kernels

    return f"{cerberus_kernels.__version__} (not installed, run from {Path(cerberus_kernels.__file__).parent})"


def _native() -> list[tuple[str, str]]:
    import torch

    from cerberus_kernels import _native

    threads = [("torch threads", str(torch.get_num_threads()))]
    if not _native.available():
        return [("unavailable", _native.why_unavailable()), *threads]
    runtime = _native.function("thread_runtime")()
    return [
        ("instruction set", f"{_native.isa()} in use, {_native.function('best_isa')()} the best here"),
        *threads,
        ("own threads", f"{_native.function('num_threads')()}, lent by {runtime}"),
    ]


def _operators() -> list[tuple[str, str]]:
    """Per operator and device the backends that run, the automatic choice first; then why the others do not."""
    import torch

    import cerberus_kernels  # noqa: F401  registers the operators
    from cerberus_kernels._dispatch import BACKENDS, OPERATORS, forced_backend

    lines = [("CERBERUS_BACKEND", forced_backend())] if forced_backend() != "auto" else []
    lacking: dict[str, list[str]] = {}
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        for name, operator in sorted(OPERATORS.items()):
            if name.removesuffix("_out") in set(OPERATORS) - {name}:
                continue  # the same code, writing into tensors it is given
            missing = {backend: operator.why_unavailable(backend, device) for backend in BACKENDS[1:]}
            present = sorted(
                (backend for backend, reason in missing.items() if not reason),
                key=("native", "triton", "reference").index,
            )
            lines.append((name, f"{device}: {', '.join(present)}"))
            for backend, reason in missing.items():
                if reason:
                    lacking.setdefault(f"no {backend} on {device}: {reason}", []).append(name)
    return lines + [("", f"{reason} ({', '.join(names)})") for reason, names in lacking.items()]


def _models() -> list[tuple[str, str]]:
    from ..embedded import NAME, is_cached, model_dir
    from ..models import ASSETS

    state = f"in {model_dir()}" if is_cached() else f"not fetched yet; the first use puts it in {model_dir()}"
    lines = [(NAME, state), ("CPU packing", _packing())]
    for config in sorted(ASSETS.glob("*/*/config.json")):
        lines.append((f"{config.parent.name} heads", _heads_line(config)))
    if len(lines) == 2:
        lines.append(("heads", "none ship with this copy; make some with `cerberus train`"))
    return lines


def _heads_line(path: Path) -> str:
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return (
        f"for {fields.get('base_model') or path.parent.parent.name}: {fields['num_heads']} heads of "
        f"{fields['num_blocks']} blocks, tree of {len(fields.get('tree', ()))} drafts, in {path.parent}"
    )


def _packing() -> str:
    """For each dtype of the command, whether the linear layers of a CPU model would be packed, and why."""
    import torch

    from ..optimize import choose_linear
    from .options import DTYPES

    choices = [choose_linear(getattr(torch, name)) for name in DTYPES]
    return "; ".join(f"{choice.method}, because {choice.reason}" for choice in choices)
