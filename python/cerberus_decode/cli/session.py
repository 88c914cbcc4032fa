"""From options to a loaded model and one decoder per method."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .messages import tell

if TYPE_CHECKING:
    from ..decode import Decoder
    from ..heads import DraftHeads
    from ..models import LoadedModel

HEADS_OF_METHOD = {
    "ar": None,
    "lookup": None,
    "medusa": "medusa",
    "cerberus": "cerberus",
    "cerberus_gated": "cerberus",
    "cerberus_cost": "cerberus",
    "cerberus_hybrid": "cerberus",
}
USES_CONTEXT = {"lookup": True, "cerberus_cost": False, "cerberus_hybrid": True}


@contextmanager
def activity() -> Iterator[Any]:
    """A spinner on a terminal, plain lines elsewhere, both on standard error; yields a function that takes a line."""
    if not sys.stderr.isatty():
        yield tell
        return
    from rich.console import Console

    with Console(stderr=True).status("loading", spinner="line") as status:
        yield status.update


class Session:
    """A base model and what runs on it.

    Args:
        model: as for :func:`cerberus_decode.models.load`.
        heads: as for :func:`cerberus_decode.models.find_heads`.
        methods: methods that will be asked for; their heads are loaded here.
        dtype: element type.
        threads: CPU threads, None for torch's choice.
        optimize: whether to repack the weights for this CPU.
        tree_size: drafts in the tree, or ``"auto"``.
        gate_threshold: nats, None for the calibrated value.
        report: takes a line about progress.

    Attributes:
        base: the loaded model.
        packing: what was made of its linear layers, in words.
        adapter: the model's adapter, shared by all decoders.
        decoders: one per method.
    """

    def __init__(
        self,
        *,
        model: str | None,
        heads: str | None,
        methods: list[str],
        dtype: str,
        threads: int | None,
        optimize: bool,
        tree_size: int | str,
        gate_threshold: float | None,
        report: Any,
    ) -> None:
        import torch

        from ..adapter import Adapter
        from ..models import load, load_heads

        if threads is not None:
            torch.set_num_threads(threads)
        report("loading the model")
        self.base: LoadedModel = load(model, dtype=dtype, report=report)
        kinds = {kind for method in methods if (kind := HEADS_OF_METHOD[method])}
        self._heads: dict[str, DraftHeads] = {kind: load_heads(self.base, kind, heads) for kind in sorted(kinds)}
        self.packing = "left as it is: --no-optimize"
        if optimize:
            from ..optimize import describe
            from ..optimize import optimize as repack

            report("packing the weights for this CPU")
            self.packing = describe(repack(self.base.model))
        self.adapter = Adapter(self.base.model)
        report("choosing trees and gate")
        self.decoders = {method: self._decoder(method, tree_size, gate_threshold) for method in methods}

    def _decoder(self, method: str, tree_size: int | str, gate_threshold: float | None) -> Decoder:
        from ..cost_tree import CostTree
        from ..decode import Decoder
        from ..policy import AutoRegressive, FixedTree, Gated

        kind = HEADS_OF_METHOD[method]
        heads = self._heads[kind] if kind else None
        if method == "ar":
            return Decoder(self.adapter, policy=AutoRegressive())
        if method in USES_CONTEXT:
            size = 48 if tree_size == "auto" else int(tree_size)
            return Decoder(self.adapter, heads=heads, policy=CostTree(size, context=USES_CONTEXT[method]))
        tree = FixedTree(size=tree_size)  # type: ignore[arg-type]  # the only word its parser lets through is auto
        if method == "cerberus_gated":
            gated = Gated(tree, threshold="auto" if gate_threshold is None else gate_threshold)
            return Decoder(self.adapter, heads=heads, policy=gated)
        return Decoder(self.adapter, heads=heads, policy=tree)
