"""What a forward pass over n nodes costs on this machine: measured once per model and dtype, kept in the cache."""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import cerberus_kernels as ck

from .embedded import cache_dir
from .heads import DraftState
from .layout import TreeLayout

if TYPE_CHECKING:
    from .adapter import Adapter

NODE_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
PREFIX_TOKENS = 128
ROUNDS = 6


@dataclass(frozen=True)
class CostTable:
    """Seconds of a step by the number of nodes in its tree.

    Attributes:
        forward_s: seconds of forward pass, verification and commit by number of nodes, root included.
        draft_s: seconds of the heads; 0 when unknown.

    Example:
        >>> table = CostTable({1: 1.0, 4: 1.6}, draft_s=0.5)
        >>> table.forward(2), table.step(0), table.step(3)
        (1.2, 1.0, 2.1)
    """

    forward_s: dict[int, float]
    draft_s: float = 0.0

    def forward(self, num_nodes: int) -> float:
        """Seconds for a tree of ``num_nodes``, linear between measured sizes and beyond the largest."""
        if num_nodes in self.forward_s:
            return self.forward_s[num_nodes]
        sizes = sorted(self.forward_s)
        if len(sizes) == 1 or num_nodes <= sizes[0]:
            return self.forward_s[sizes[0]]
        above = min(bisect.bisect_left(sizes, num_nodes), len(sizes) - 1)
        low, high = sizes[above - 1], sizes[above]
        share = (num_nodes - low) / (high - low)
        return self.forward_s[low] + share * (self.forward_s[high] - self.forward_s[low])

    def up_to(self, num_drafts: int) -> CostTable:
        """The same table with an entry for every tree of at most ``num_drafts`` drafts, quick to look up."""
        return CostTable({nodes: self.forward(nodes) for nodes in range(1, num_drafts + 2)}, self.draft_s)

    def step(self, num_drafts: int) -> float:
        """Seconds of a step with ``num_drafts`` drafts; 0 is a plain step, which runs no heads."""
        return self.forward(num_drafts + 1) + (self.draft_s if num_drafts else 0.0)


def cost_table(adapter: Adapter, heads: Any = None, report: Callable[[str], None] = lambda line: None) -> CostTable:
    """Costs of ``adapter``'s model on this machine, from the cache when they were measured before.

    Args:
        adapter: the model.
        heads: bound draft heads, whose time is then part of the table.
        report: called with one line when a measurement begins.
    """

    def known(facts: list[Any], measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        path = cache_dir() / "costs" / f"{_key(adapter, facts)}.json"
        try:
            return {name: float(seconds) for name, seconds in json.loads(path.read_text()).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            report("measuring the cost of a step by tree size (once)")
        measured = measure()
        _store(path, measured)
        return measured

    forward = known([], lambda: {str(nodes): s for nodes, s in measure_forward(adapter).items()})
    drafting = 0.0
    if heads is not None:
        drafting = known([str(heads.config)], lambda: {"draft": measure_drafting(adapter, heads)})["draft"]
    return CostTable({int(nodes): seconds for nodes, seconds in forward.items()}, drafting)


@torch.inference_mode()
def measure_forward(adapter: Adapter) -> dict[int, float]:
    """Least seconds of a step by number of nodes over several rounds, sizes in turn within each.

    The least of several is what the work itself takes; whatever else runs on the machine only adds to it.
    """
    prompt, cache, _ = _begun(adapter)
    layouts = {nodes: TreeLayout(_two_deep(nodes), adapter.device) for nodes in NODE_COUNTS}
    times: dict[int, list[float]] = {nodes: [] for nodes in NODE_COUNTS}
    for measured in range(-1, ROUNDS):
        for nodes, layout in layouts.items():
            tokens = prompt[:, :nodes].to(torch.int32)
            seconds = _timed(functools.partial(_step, adapter, tokens, layout, cache), adapter.device)
            cache.set_length(PREFIX_TOKENS)
            if measured >= 0:
                times[nodes].append(seconds)
    return {nodes: min(values) for nodes, values in times.items()}


@torch.inference_mode()
def measure_drafting(adapter: Adapter, heads: Any) -> float:
    """Least seconds of the heads' proposal after a step that kept two tokens; every round follows a forward pass."""
    prompt, cache, hidden = _begun(adapter)
    nodes = min(8, max(NODE_COUNTS))
    layout, tokens = TreeLayout(_two_deep(nodes), adapter.device), prompt[:, :nodes].to(torch.int32)
    times = []
    for _ in range(1 + ROUNDS):
        _step(adapter, tokens, layout, cache)
        cache.set_length(PREFIX_TOKENS)
        state = DraftState(heads, PREFIX_TOKENS)
        state.observe(hidden.expand(1, 2, -1), tokens[:, :2])
        times.append(_timed(state.propose, adapter.device))
    return min(times[1:])


def _begun(adapter: Adapter) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """A prompt, its cache and the last hidden state ``[1, 1, H]``."""
    prompt = torch.arange(PREFIX_TOKENS, device=adapter.device).remainder(adapter.vocab_size).unsqueeze(0)
    cache = adapter.new_cache(PREFIX_TOKENS + max(NODE_COUNTS))
    hidden, _ = adapter.prefill(prompt, cache)
    return prompt, cache, hidden


def _step(adapter: Adapter, tokens: torch.Tensor, layout: TreeLayout, cache: Any) -> None:
    _, logits = adapter.forward(tokens, layout, cache)
    verdict = ck.verify_tree(logits, tokens, layout.parents, vocab_size=adapter.vocab_size, max_depth=layout.max_depth)
    cache.commit(verdict.path, verdict.num_accepted)


def _two_deep(nodes: int) -> ck.Tree:
    drafts = nodes - 1
    first = (drafts + 1) // 2
    return ck.Tree.from_choices([(rank,) for rank in range(first)] + [(rank, 0) for rank in range(drafts - first)])


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _key(adapter: Adapter, more: list[Any]) -> str:
    """Name of everything the costs depend on: machine, threads, software, model, dtype, and what is named besides."""
    model = adapter.model
    device = torch.cuda.get_device_name(adapter.device) if adapter.device.type == "cuda" else _processor()
    layers = sorted({type(module).__name__ for module in model.modules()})
    facts = [
        device, torch.get_num_threads(), torch.__version__, ck.__version__, str(adapter.dtype), type(model).__name__,
        layers, model.config.to_json_string(), *more,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _store(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{time.time_ns()}.partial")
    partial.write_text(json.dumps(values))
    partial.rename(path)
