"""Every random outcome of a verification with its probability, and small models to verify drafts of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cerberus_kernels.ops.verify_tree.reference import LEAST_SCORE, Outcome, Request, Settings

PLAIN = Settings(mode=2, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, epsilon=0.09, delta=0.3, seed=0, position=7)
Tokens = tuple[int, ...]


class Branches:
    """Stands in for ``reference.Randomness``: takes the outcomes that a script names, then the first of each decision.

    No two decisions of a step may rest on the same coin: the one of a trial is known by position and trial, that of a
    draw by its position.
    """

    def __init__(self, script: Tokens) -> None:
        self.script = script
        self.options: list[list[tuple[Any, float]]] = []  # per decision its possible outcomes
        self.coins: list[tuple[int, int]] = []

    def choose(self, coin: tuple[int, int], options: list[tuple[Any, float]]) -> Any:
        assert coin not in self.coins
        self.coins.append(coin)
        self.options.append([option for option in options if option[1] > 0])
        return self.options[-1][self.taken(len(self.options) - 1)][0]

    def taken(self, decision: int) -> int:
        return self.script[decision] if decision < len(self.script) else 0

    def probability(self) -> float:
        return math.prod(options[self.taken(i)][1] for i, options in enumerate(self.options))

    def draw(self, scores: torch.Tensor, position: int) -> int:
        weights = [math.exp(score) for score in (scores - scores.max()).tolist()]
        return self.choose((position, -1), [(v, w / math.fsum(weights)) for v, w in enumerate(weights)])

    def accepts(self, target: float, draft: float, position: int, trial: int) -> bool:
        assert draft > 0
        chance = min(1.0, target / draft)
        return self.choose((position, trial), [(True, chance), (False, 1 - chance)])


def outcomes(run: Callable[[Any], Outcome]) -> Iterator[tuple[float, Outcome]]:
    """Run once for every combination of outcomes: its probability and the result."""
    scripts: list[Tokens] = [()]
    while scripts:
        branches = Branches(scripts.pop())
        result = run(branches)
        for decision in range(len(branches.script), len(branches.options)):
            prefix = tuple(branches.taken(i) for i in range(decision))
            scripts += [(*prefix, option) for option in range(1, len(branches.options[decision]))]
        yield branches.probability(), result


def target_probabilities(row: torch.Tensor, settings: Settings) -> np.ndarray:
    """Float64 [V]: a row's distribution after temperature and filters, by loops over a sorted list."""
    values = row.numpy().astype(np.float32)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if settings.temperature == 0:
        return np.eye(len(values))[order[0]]
    scores = (values - values.max()) / np.float32(settings.temperature)
    weights = {v: math.exp(scores[v]) if scores[v] >= LEAST_SCORE else 0.0 for v in order}
    kept = order[: settings.top_k or None]
    mass, total, nucleus = 0.0, math.fsum(weights[v] for v in kept), []
    for token in kept:
        if mass >= settings.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= settings.min_p]
    total = math.fsum(weights[v] for v in kept)
    return np.array([weights[v] / total if v in kept else 0.0 for v in range(len(values))])


class Model:
    """Logits after a context, and the rows drafts are drawn from; both unlike for every context.

    ``sparse`` takes that many tokens out of the drafts' rows, other ones in each.
    """

    def __init__(self, vocab_size: int, seed: int = 0, sparse: int = 0) -> None:
        self.vocab_size, self.seed, self.sparse = vocab_size, seed, sparse
        self.known: dict[Any, torch.Tensor] = {}

    def random_row(self, kind: int, context: Tokens) -> torch.Tensor:
        if (kind, context) not in self.known:
            number = self.seed
            for token in (kind, *context):
                number = number * 31 + token + 1
            generator = torch.Generator().manual_seed(number)
            self.known[kind, context] = torch.randn(self.vocab_size, generator=generator) * 1.5
        return self.known[kind, context]

    def logits(self, context: Tokens) -> torch.Tensor:
        return self.random_row(0, context)

    def drafts(self, context: Tokens) -> torch.Tensor:
        scores = self.random_row(1, context).clone()
        scores[self.random_row(2, context).argsort()[: self.sparse]] = -math.inf
        return torch.softmax(scores, -1)


class FixedRows(Model):
    """The same two distributions after every context."""

    def __init__(self, target: Sequence[float], draft: Sequence[float]) -> None:
        super().__init__(len(target))
        self.target = torch.tensor(target, dtype=torch.float64).log().float()
        self.draft = torch.tensor(draft)

    def logits(self, context: Tokens) -> torch.Tensor:
        return self.target

    def drafts(self, context: Tokens) -> torch.Tensor:
        return self.draft


def contexts(parents: Sequence[int], drafts: Sequence[int]) -> list[Tokens]:
    """Tokens from below the root to each node."""
    known: list[Tokens] = [()]
    for node in range(1, len(drafts)):
        known.append((*known[parents[node]], drafts[node]))
    return known


def drawn_drafts(model: Model, parents: Sequence[int], drafting: str) -> Iterator[tuple[float, list[int]]]:
    """Every way in which the nodes' tokens can be drawn as ``drafting`` says, with its probability."""

    def extend(drafts: list[int], weight: float) -> Iterator[tuple[float, list[int]]]:
        node = len(drafts)
        if node == len(parents):
            yield weight, drafts
            return
        row = model.drafts(contexts(parents, drafts)[parents[node]]).double()
        if drafting == "without_replacement":
            row[[drafts[i] for i in range(1, node) if parents[i] == parents[node]]] = 0.0
        for token, mass in enumerate((row / row.sum()).tolist()):
            if mass > 0:
                yield from extend([*drafts, token], weight * mass)

    return extend([0], 1.0)


def request_of(model: Model, parents: Sequence[int], drafts: Sequence[int]) -> Request:
    """One request; the root's draft row, which stands for nothing, is NaN."""
    places = contexts(parents, drafts)
    unused = torch.full((model.vocab_size,), math.nan)
    draft_rows = [unused] + [model.drafts(places[parent]) for parent in parents[1:]]
    rows = torch.stack([model.logits(place) for place in places])
    return Request(rows, torch.stack(draft_rows), list(drafts), list(parents))


Rule = Callable[[Request, Any], Outcome]


def pair_distribution(
    rule: Rule, model: Model, settings: Settings, parents: Sequence[int], drafts: Iterator[tuple[float, list[int]]]
) -> np.ndarray:
    """Float64 [V, V]: the first two tokens of the text, where a step that emits one goes on with plain sampling."""
    joint = np.zeros((model.vocab_size, model.vocab_size))
    for weight, tokens in drafts:
        request = request_of(model, parents, tokens)
        for chance, outcome in outcomes(lambda randomness, request=request: rule(request, randomness)):
            assert outcome.status == 0
            emitted = [tokens[node] for node in outcome.path[1:]] + [outcome.bonus]
            if len(emitted) > 1:
                joint[emitted[0], emitted[1]] += weight * chance
            else:
                joint[emitted[0]] += weight * chance * target_probabilities(model.logits((emitted[0],)), settings)
    return joint


def plain_pair_distribution(model: Model, settings: Settings) -> np.ndarray:
    """Float64 [V, V]: the first two tokens of plain sampling."""
    first = target_probabilities(model.logits(()), settings)
    second = [target_probabilities(model.logits((token,)), settings) for token in range(model.vocab_size)]
    return first[:, None] * np.stack(second)


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return 0.5 * float(np.abs(a - b).sum())


def step_marginals(outcome_list: Iterator[tuple[float, Outcome]], drafts: Sequence[int]) -> dict[Tokens, float]:
    """Probability of each emitted block of tokens."""
    blocks: dict[Tokens, float] = defaultdict(float)
    for chance, outcome in outcome_list:
        blocks[(*(drafts[node] for node in outcome.path[1:]), outcome.bonus)] += chance
    return dict(blocks)
