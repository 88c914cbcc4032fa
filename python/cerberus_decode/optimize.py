"""optimize(model): linear layers that read their weight once for all rows, for CPU inference.

Speculation pays when a pass over a tree costs what a pass over one token costs. torch's bf16 linear does that on
processors with bf16 matrix instructions; on others it costs T times as much for T rows. So the choice is measured,
once per process and dtype, and :func:`choose_linear` shows it.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

import cerberus_kernels as ck
from cerberus_kernels import _native

from .fused_layers import can_fuse, fuse, is_fused

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
METHODS = ("auto", "packed", "torch")
# A projection of a small model; the kernels' ratio is what counts, and it changes little with the shape.
_PROBE_SHAPE = (1536, 576)
_PROBE_ROWS = (1, 16)
_PROBE_ROUNDS = 5


@dataclass(frozen=True)
class LinearChoice:
    """Which linear layer a model gets on this machine, and why.

    Attributes:
        method: ``"packed"`` or ``"torch"``.
        packed_ms: milliseconds of packed_linear by number of rows, empty where nothing was measured.
        torch_ms: the same for torch's linear.
        reason: one line for the user.
    """

    method: str
    packed_ms: Mapping[int, float]
    torch_ms: Mapping[int, float]
    reason: str


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference whose weight is kept packed.

    ``state_dict()`` and ``load_state_dict()`` speak of ``weight`` and ``bias`` as before, bit for bit; the packed form
    never appears in them. ``weight`` is the shared parameter where it is tied, else a copy unpacked at each access.
    Changing a tied weight in place does not reach the packed copy.

    Args:
        linear: the layer to replace.
        tied: whether its weight is also used elsewhere and stays alive anyway.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, tied: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = ck.pack_linear(linear.weight)
        # Not register_parameter: the property `weight` below already answers to that name.
        if tied:
            self._parameters["weight"] = cast("nn.Parameter", linear.weight)
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weight ``[out_features, in_features]``."""
        tied = self._parameters.get("weight")
        return ck.unpack_linear(self.packed) if tied is None else tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in_features] -> [.., out_features]."""
        return ck.packed_linear(x, self.packed, bias=self.bias)

    def extra_repr(self) -> str:
        """Sizes and dtype, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.packed.panels.dtype}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        super()._apply(fn, recurse)
        panels = self.packed.panels
        probe = fn(panels.new_empty(0))
        if (probe.dtype, probe.device) != (panels.dtype, panels.device):
            # The layout depends on the dtype, so the weight is converted, not the panels.
            self.packed = ck.pack_linear(fn(ck.unpack_linear(self.packed)))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if "weight" not in self._parameters:
            destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if "weight" in self._parameters:
            self.packed = ck.pack_linear(self.weight)
            return
        if key not in state_dict:
            missing_keys.append(key)
            return
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        weight = state_dict[key]
        if tuple(weight.shape) != (self.out_features, self.in_features):
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(weight.shape)}, the shape in current "
                f"model is {(self.out_features, self.in_features)}."
            )
            return
        self.packed = ck.pack_linear(weight.to(self.packed.panels))


def optimize(model: Model, *, linear: str = "auto") -> Model:
    """Give a CPU model linear layers that cost about the same for one row as for a small draft tree.

    Every plain ``nn.Linear`` is replaced, ``lm_head`` too; where a weight is tied to the embedding, the embedding
    keeps the original, else the unpacked weight is freed. Results stay within the dtype's rounding: sums are fp32,
    rounded once, and a row's result does not depend on the other rows. The names and values in ``state_dict()`` do not
    change. Decoder layers of Llama, Mistral and Qwen2 models (without sliding windows) also run in few calls over
    draft trees, see :mod:`.fused_layers`. For inference only. A second call changes nothing.

    Args:
        model: any module, changed in place.
        linear: ``"auto"`` measures and takes the faster, ``"packed"`` and ``"torch"`` force it.

    Returns:
        ``model``; :func:`describe` says in words what was done.

    Raises:
        ValueError: an unknown ``linear``, or ``"packed"`` for a model that is not on the CPU.

    Example:
        >>> import torch
        >>> model = optimize(torch.nn.Sequential(torch.nn.Linear(4, 2)), linear="packed")
        >>> describe(model)
        '1 linear layer packed'
    """
    if linear not in METHODS:
        raise ValueError(f"optimize: linear must be one of {', '.join(METHODS)}, got {linear!r}")
    if linear == "torch":
        return model
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # named_children leaves out a second name
        if type(child) is nn.Linear and child.weight.dtype in FLOATS
    ]
    devices = {child.weight.device.type for _, _, child in layers} - {"cpu"}
    if devices and linear == "packed":
        raise ValueError(f"optimize: model must be on cpu, got {', '.join(sorted(devices))}")
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    packed: dict[int, PackedLinear] = {}
    for parent, name, child in layers:
        if child.weight.device.type != "cpu" or not _use_packed(linear, child.weight.dtype):
            continue
        if id(child) not in packed:  # a module may hang in several places
            packed[id(child)] = PackedLinear(child, tied=uses[id(child.weight)] > 1).train(child.training)
        setattr(parent, name, packed[id(child)])
    for module in model.modules():
        if can_fuse(module):
            fuse(module)
    logger.info("optimize: %s", describe(model))
    return model


def describe(model: nn.Module) -> str:
    """One line on what :func:`optimize` made of ``model``, for a report."""
    count = sum(isinstance(module, PackedLinear) for module in model.modules())
    if count:
        fused = sum(map(is_fused, model.modules()))
        text = f"{count} linear layer{'s' if count > 1 else ''} packed"
        return f"{text}, {fused} decoder layers fused" if fused else text
    plain = [m.weight for m in model.modules() if type(m) is nn.Linear and m.weight.dtype in FLOATS]
    reasons = {
        choose_linear(weight.dtype).reason if weight.device.type == "cpu" else f"it is on {weight.device.type}"
        for weight in plain
    }
    return "left as it is: " + ("; ".join(sorted(reasons)) or "no linear layer")


def choose_linear(dtype: torch.dtype) -> LinearChoice:
    """The faster linear layer for ``dtype`` on this machine, measured once per process and thread count.

    Compares packed_linear with torch's linear at 1 and 16 rows of one shape; a few milliseconds.

    Args:
        dtype: fp32, bf16 or fp16.

    Returns:
        The choice with its measurements.
    """
    reason = _native.why_unavailable()
    if reason:
        return LinearChoice("torch", {}, {}, f"the native library is missing: {reason}")
    return _measure(dtype, torch.get_num_threads(), _native.isa())


def _use_packed(linear: str, dtype: torch.dtype) -> bool:
    return linear == "packed" or (linear == "auto" and choose_linear(dtype).method == "packed")


@functools.cache
def _measure(dtype: torch.dtype, threads: int, isa: str) -> LinearChoice:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_PROBE_SHAPE, generator=generator).to(dtype)
    packed = ck.pack_linear(weight)
    packed_ms: dict[int, float] = {}
    torch_ms: dict[int, float] = {}
    with torch.no_grad():
        for rows in _PROBE_ROWS:
            x = torch.randn(rows, _PROBE_SHAPE[1], generator=generator).to(dtype)
            ours, theirs = [], []
            for _ in range(_PROBE_ROUNDS):
                ours.append(_time_ms(functools.partial(ck.packed_linear, x, packed, backend="native")))
                theirs.append(_time_ms(functools.partial(nn.functional.linear, x, weight)))
            packed_ms[rows], torch_ms[rows] = min(ours), min(theirs)
    speedups = {rows: torch_ms[rows] / packed_ms[rows] for rows in _PROBE_ROWS}
    method = "packed" if statistics.geometric_mean(speedups.values()) > 1 else "torch"
    times = ", ".join(f"{ratio:.1f}x torch's speed at {rows} rows" for rows, ratio in speedups.items())
    name = str(dtype).removeprefix("torch.")
    return LinearChoice(method, packed_ms, torch_ms, f"{name}: packed_linear ({isa}, {threads} threads) has {times}")


def _time_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
