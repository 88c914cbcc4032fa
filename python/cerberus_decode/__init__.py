"""The small reference decoder, its trained heads, and the command `cerberus`.

    decoder = Decoder(model, heads=DraftHeads.load(folder), policy=Gated(FixedTree(size=24), threshold=2.5))
    result = decoder.generate(prompt_ids, max_new_tokens=128)   # Result(tokens, metrics, finish_reason)
    for step in decoder.stream(prompt_ids):                     # Step(tokens, num_accepted, num_proposed)
        ...

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Adapter": "adapter",
    "AutoRegressive": "policy",
    "CostTable": "costs",
    "CostTree": "cost_tree",
    "Decoder": "decode",
    "DraftHeads": "heads",
    "FixedTree": "policy",
    "Gated": "policy",
    "Generation": "decode",
    "HeadsConfig": "heads",
    "KVCache": "cache",
    "Metrics": "metrics",
    "ModelUnsupported": "adapter",
    "Policy": "policy",
    "Result": "decode",
    "Step": "decode",
    "custom_generate": "transformers_generate",
}
__all__ = [
    "Adapter",
    "AutoRegressive",
    "CostTable",
    "CostTree",
    "Decoder",
    "DraftHeads",
    "FixedTree",
    "Gated",
    "Generation",
    "HeadsConfig",
    "KVCache",
    "Metrics",
    "ModelUnsupported",
    "Policy",
    "Result",
    "Step",
    "custom_generate",
]

if TYPE_CHECKING:
    from .adapter import Adapter, ModelUnsupported
    from .cache import KVCache
    from .cost_tree import CostTree
    from .costs import CostTable
    from .decode import Decoder, Generation, Result, Step
    from .heads import DraftHeads, HeadsConfig
    from .metrics import Metrics
    from .policy import AutoRegressive, FixedTree, Gated, Policy
    from .transformers_generate import custom_generate


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
