"""Comparing decoding methods on the same prompts, in one process, taking turns, with plain decoding as the baseline.

Every figure counts tokens after end-token and length cuts, for every method alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cerberus_kernels import Tree

from .layout import TreeLayout
from .metrics import Metrics

METHODS = ("ar", "lookup", "medusa", "cerberus", "cerberus_gated", "cerberus_cost", "cerberus_hybrid")
BASELINE = "ar"
ALL = "all"

Generate = Callable[[list[int]], tuple[list[int], Metrics]]


@dataclass(frozen=True)
class Outcome:
    """What one method made of one prompt: ``tokens`` are the ids emitted."""

    prompt_index: int
    category: str
    method: str
    tokens: list[int]
    metrics: Metrics


@dataclass(frozen=True)
class Difference:
    """Where a greedy text first leaves the baseline's, and whether rounding explains it.

    Attributes:
        prompt_index: index of the prompt.
        method: the method whose text differs.
        position: index of the first differing token of the answer.
        gap: difference of the two largest logits of the baseline there.
        noise: largest change of any logit of this text between one row and many rows per forward pass.
    """

    prompt_index: int
    method: str
    position: int
    gap: float
    noise: float

    @property
    def is_explained(self) -> bool:
        """Whether the baseline's choice is as uncertain as the model's own rounding."""
        return self.gap < self.noise


def take_turns(methods: dict[str, Generate], prompts: Sequence[tuple[str, list[int]]]) -> Iterator[Outcome]:
    """Run every method on every prompt; which method goes first moves on by one with every prompt.

    Args:
        methods: by name, a function from prompt ids to emitted ids and metrics.
        prompts: category and ids of each prompt.

    Yields:
        Outcomes as they come.
    """
    names = list(methods)
    for index, (category, ids) in enumerate(prompts):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            tokens, metrics = methods[name](ids)
            yield Outcome(index, category, name, tokens, metrics)


def rows(outcomes: Sequence[Outcome], differences: Sequence[Difference] = ()) -> list[dict[str, Any]]:
    """One row per method and category in order of appearance, then one per method with category ``all``.

    ``tokens_per_second`` is tokens over seconds, summed over the prompts before dividing; ``accepted_per_step`` counts
    drafts only, ``tokens_per_step`` the model's own token as well. ``identical_to_ar`` is None where plain
    decoding was not among the methods. ``prompts``, ``differing_prompts`` and ``unexplained_differences`` are counts.
    """
    methods = sorted({outcome.method for outcome in outcomes}, key=METHODS.index)
    categories = list(dict.fromkeys(outcome.category for outcome in outcomes))
    baseline = {outcome.prompt_index: outcome.tokens for outcome in outcomes if outcome.method == BASELINE}
    table = []
    for category in [*categories, ALL]:
        for method in methods:
            chosen = [o for o in outcomes if o.method == method and category in (o.category, ALL)]
            if chosen:
                table.append(_row(method, category, chosen, baseline, differences))
    return table


def _row(
    method: str,
    category: str,
    outcomes: Sequence[Outcome],
    baseline: dict[int, list[int]],
    differences: Iterable[Difference],
) -> dict[str, Any]:
    total = sum((outcome.metrics for outcome in outcomes), Metrics())
    differing = [o.prompt_index for o in outcomes if baseline and o.tokens != baseline[o.prompt_index]]
    unexplained = [d for d in differences if d.method == method and d.prompt_index in differing and not d.is_explained]
    return {
        "method": method,
        "category": category,
        "tokens": total.tokens,
        "seconds": total.total_s,
        "tokens_per_second": total.tokens_per_second or 0.0,
        "steps": total.steps,
        "tokens_per_step": total.tokens_per_step or 0.0,
        "accepted_per_step": total.accepted_per_step or 0.0,
        "gate_open_share": total.gate_open_share or 0.0,
        "identical_to_ar": not differing if baseline else None,
        "draft_s": total.draft_s,
        "forward_s": total.forward_s,
        "verify_s": total.verify_s,
        "commit_s": total.commit_s,
        "other_s": total.other_s,
        "prompts": len(outcomes),
        "differing_prompts": len(differing),
        "unexplained_differences": len(unexplained),
    }


def differences(
    adapter: Any, outcomes: Sequence[Outcome], prompts: Sequence[tuple[str, list[int]]], num_rows: int
) -> list[Difference]:
    """Explain every greedy text that differs from the baseline's.

    Args:
        adapter: the decoder's model adapter.
        outcomes: of all methods; those of the baseline must be among them.
        prompts: as given to :func:`take_turns`.
        num_rows: nodes of the trees that were used, the rows of the pass that the noise is measured with.
    """
    baseline = {outcome.prompt_index: outcome.tokens for outcome in outcomes if outcome.method == BASELINE}
    found = []
    measured: dict[int, tuple[torch.Tensor, float]] = {}
    for outcome in outcomes:
        plain = baseline[outcome.prompt_index]
        position = first_difference(plain, outcome.tokens)
        if position is None:
            continue
        if outcome.prompt_index not in measured:
            prompt = prompts[outcome.prompt_index][1]
            measured[outcome.prompt_index] = row_count_noise(adapter, prompt, plain, num_rows)
        gaps, noise = measured[outcome.prompt_index]
        gap = float(gaps[min(position, len(gaps) - 1)])
        found.append(Difference(outcome.prompt_index, outcome.method, position, gap, noise))
    return found


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token in which two lists differ, the end of the shorter one included; None when equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


@torch.inference_mode()
def row_count_noise(
    adapter: Any, prompt: Sequence[int], answer: Sequence[int], num_rows: int
) -> tuple[torch.Tensor, float]:
    """How sure a text's greedy choices are, and how much the model's logits depend on rows per forward pass.

    The same text runs twice behind the same prompt, one row a pass and ``num_rows`` rows a pass.

    Args:
        adapter: the decoder's model adapter.
        prompt: ids of the prompt.
        answer: ids of the text, at least one.
        num_rows: rows of a pass in the second run.

    Returns:
        fp32 ``[len(answer)]``, the gap between the two largest logits at each token of the answer in the first run,
        and the largest change of any logit between the runs.
    """
    single = _logits_of_text(adapter, prompt, answer, 1)
    several = _logits_of_text(adapter, prompt, answer, max(2, num_rows))
    best = single.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1], float((single - several).abs().max())


def _logits_of_text(adapter: Any, prompt: Sequence[int], answer: Sequence[int], num_rows: int) -> torch.Tensor:
    """fp32 ``[len(answer), V]``, the logits that predict each token of the answer, ``num_rows`` rows a pass."""
    device = adapter.device
    cache = adapter.new_cache(len(prompt) + len(answer))
    _, logits = adapter.prefill(torch.tensor([prompt], device=device), cache)
    found = [logits[0].float()]
    text = torch.tensor([answer[:-1]], device=device)
    for chunk in text.split(num_rows, dim=1) if len(answer) > 1 else ():
        length = chunk.shape[1]
        _, logits = adapter.forward(chunk, TreeLayout(Tree.chain(length - 1), device), cache)
        cache.advance(length)
        found.append(logits[0].float())
    return torch.cat(found)
