"""What this machine can do at best, and what of it a call needs: the scale that timings are read against."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import itertools
import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

import cerberus_kernels as ck
from cerberus_kernels import _native

# What a call costs however small its work: the way through Python, the checks, the binding.
CALL_SECONDS = 5e-6
# More than caches hold, so that every pass reads memory.
STREAMED_BYTES = 1 << 28
# More than the caches of most machines hold.
CACHED_BYTES = 1 << 26
ROOT = Path(__file__).resolve().parent.parent


T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What a call cannot do without: bytes that it reads or writes once, and floating-point operations."""

    bytes: int
    flops: int = 0

    def bound(self) -> float:
        """Seconds that no implementation here beats while its inputs come from memory and not from a cache."""
        return max(self.bytes / bandwidth(), self.flops / matrix_rate()) + CALL_SECONDS


def shortest(call: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of the shortest of a few calls, after one that does not count."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def in_turns(call: Callable[..., T], *weights: object) -> Callable[[], T]:
    """``call(*weights)`` on another copy of the weights each time, so that they come from memory and not from a cache.

    That is how a pass over a model meets weights and caches.
    """
    copies = CACHED_BYTES // max(1, sum(_stored_bytes(weight) for weight in weights))
    turns = itertools.cycle([weights, *(copy.deepcopy(weights) for _ in range(copies))])
    return lambda: call(*next(turns))


def _stored_bytes(weight: object) -> int:
    if isinstance(weight, torch.nn.Module):
        return sum(map(_stored_bytes, weight.parameters()))
    tensor = weight.panels if isinstance(weight, ck.PackedWeight) else weight
    return tensor.numel() * tensor.element_size()


def bandwidth() -> float:
    """Bytes per second that the threads in use read from memory now: other users of the machine take their share."""
    return STREAMED_BYTES / shortest(_fastest_read(torch.get_num_threads()), rounds=3)


@functools.cache
def _fastest_read(threads: int) -> Callable[[], object]:
    """The best of several ways to read a large array."""
    # Written, not zeros: pages that were never written all lie in one page that a cache holds.
    floats = torch.ones(STREAMED_BYTES // 4)
    matrix, vector = floats.view(-1, 4096), torch.ones(4096)
    whole = floats.view(torch.int64)
    parts = np.array_split(floats.numpy(), threads)
    pool = ThreadPoolExecutor(threads)
    ways: tuple[Callable[[], object], ...] = (
        lambda: torch.mv(matrix, vector),
        floats.sum,
        whole.max,
        lambda: torch.equal(matrix[: len(matrix) // 2], matrix[len(matrix) // 2 :]),
        lambda: list(pool.map(np.max, parts)),
    )
    return min(ways, key=shortest)


def matrix_rate() -> float:
    """Floating-point operations per second of torch's best matrix product, fp32 or bf16, with the threads in use."""
    return _matrix_rate(torch.get_num_threads())


@functools.cache
def _matrix_rate(threads: int) -> float:
    rates = []
    for size, dtype in ((512, torch.float32), (1024, torch.float32), (512, torch.bfloat16)):
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        rates.append(2 * size**3 / shortest(lambda left=left, right=right: left @ right, rounds=10))
    return max(rates)


def machine() -> dict[str, object]:
    """The machine, the versions and the commit that timings belong to."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": _native.isa() if _native.available() else "none",
        "python": platform.python_version(),
        "versions": {"cerberus_kernels": ck.__version__}
        | {name: _version(name) for name in ("torch", "triton", "transformers", "numpy")},
        "commit": commit(),
    }


def _cpu_name() -> str:
    """The processor's name; its family and model too, where a virtual machine hides the rest of the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def commit() -> str:
    """The commit that lay here when this was first asked, with ``-dirty`` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
