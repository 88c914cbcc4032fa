"""Specification of verify_tree: acceptance rules, filters and the draw of the bonus token, request by request."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch

from ..._checks import refuse
from ...tree import first_malformed_node
from .parameters import OP, PARAMETERS, Drafting, Mode, check_rejection, check_rows
from .philox import coin, gumbel, token_words

LEAST_SCORE = -87.0


class VerifyStatus(enum.IntFlag):
    """Bits of ``Verdict.status``; 0 is a verdict with nothing to report.

    Only rows that were read count: in typical mode those of accepted nodes with a child to judge and the last one, in
    the other modes those on the path, and of draft rows those of the children that were tried.
    """

    NAN_ROW = 1
    """A row holds NaN. Nothing below it is accepted; its token is its greatest entry that is not NaN."""
    NO_FINITE_ENTRY = 2
    """A row has no finite entry. Nothing below it is accepted; its token is the lowest id of +inf, 0 if none is."""
    TOKEN_OUT_OF_RANGE = 4
    """A node other than the root holds a draft token outside [0, vocab_size) that is not the padding -1."""
    MALFORMED_TREE = 8
    """The tree breaks the parents encoding; only on devices where a ValueError would cost a host sync."""
    NO_DRAFT_MASS = 16
    """A child's row of draft_probs gives its token no mass or holds a NaN, infinite or negative entry: not tried."""


class Settings(NamedTuple):
    """One request's scalars, in the order of ``parameters.PARAMETERS``."""

    mode: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    epsilon: float
    delta: float
    seed: int
    position: int


class Request(NamedTuple):
    """One request: rows and draft rows [n, vocab_size], draft tokens and parents of its n nodes.

    Without draft_probs, which only rejection mode reads, the draft rows are empty.
    """

    rows: torch.Tensor
    draft_rows: torch.Tensor
    drafts: list[int]
    parents: list[int]

    def children(self, node: int) -> list[int]:
        """Children of a node, the lowest first."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


class Outcome(NamedTuple):
    """Accepted nodes from the root, the bonus token, and the status bits."""

    path: list[int]
    bonus: int
    status: int


def best_token(row: torch.Tensor) -> tuple[int, int]:
    """Id of the greatest entry that is not NaN, the lowest of equals, and the row's status bits."""
    row = row.float()
    nan = torch.isnan(row)
    token = int(torch.where(nan, -math.inf, row).argmax())
    status = VerifyStatus.NAN_ROW * bool(nan.any()) | VerifyStatus.NO_FINITE_ENTRY * (not bool(row.isfinite().any()))
    return token, int(status)


def scaled(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """(row - max) / T in fp32, so that no T overflows; entries equal to the maximum are 0, also where it is +inf.

    Below LEAST_SCORE it is -inf: exp of it would be subnormal in fp32, and the token's probability counts as 0.
    """
    row = row.float()
    greatest = row.max()
    score = torch.where(row == greatest, 0.0, (row - greatest) / temperature)
    return torch.where(score < LEAST_SCORE, -math.inf, score)


def row_entropy(row: torch.Tensor) -> float:
    """Entropy of softmax(row) in nats, with 0 ln 0 = 0."""
    return float(torch.special.entr(torch.softmax(scaled(row, 1.0).double(), -1)).sum())


def kept_tokens(scores: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Bool [V]: what top_k, then top_p, then min_p leave. ``scores`` is fp32 :func:`scaled` [V]."""
    order = torch.sort(scores, descending=True, stable=True).indices  # ties: lowest id first
    weights = scores[order].double().exp()  # relative to the maximum
    keep = weights >= settings.min_p
    if settings.top_k:
        keep[settings.top_k :] = False
        weights[settings.top_k :] = 0.0
    if settings.top_p < 1:
        before = weights.cumsum(-1) - weights
        keep &= before < settings.top_p * weights.sum()
    return torch.empty_like(keep).scatter_(0, order, keep)


def filtered_scores(row: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Float64 [V]: ln p after temperature and filters up to a constant, -inf where p is 0."""
    scores = scaled(row, settings.temperature)
    return torch.where(kept_tokens(scores, settings), scores, -math.inf).double()


class Randomness:
    """One request's random decisions. They depend on its seed, the absolute position and the token or trial alone."""

    def __init__(self, seed: int) -> None:
        """``seed`` as in :func:`philox.token_words`."""
        self.seed = seed

    def draw(self, scores: torch.Tensor, position: int) -> int:
        """A token in proportion to exp(scores), float64 [V]: argmax of score + Gumbel noise, the lowest of equals."""
        tokens = (scores > -math.inf).nonzero().flatten()
        noise = gumbel(token_words(self.seed, position, tokens))
        return int(tokens[(scores[tokens] + noise).argmax()])

    def accepts(self, target: float, draft: float, position: int, trial: int) -> bool:
        """True with probability min(1, target / draft), never for a target of 0."""
        return coin(self.seed, position, trial) * draft < target


class TypicalRow:
    """Typical acceptance at one row: p after filters, and the threshold min(epsilon, delta * exp(-H))."""

    def __init__(self, row: torch.Tensor, settings: Settings) -> None:
        """Read a row [V]; a flagged one gets a fallback token only."""
        self.fallback, self.status = best_token(row)
        if self.status:
            return
        self.scores = filtered_scores(row, settings)
        self.log_probs = torch.log_softmax(self.scores, -1)
        probs = self.log_probs.exp()
        limit = settings.delta * math.exp(-float(torch.special.entr(probs).sum()))
        self.accepts = probs > min(settings.epsilon, limit)

    def draw(self, randomness: Randomness, position: int) -> int:
        """One of the accepted tokens in proportion to p; the greatest entry if there are none."""
        if self.status or not self.accepts.any():
            return self.fallback
        return randomness.draw(torch.where(self.accepts, self.scores, -math.inf), position)


def walk_matching(request: Request, max_depth: int, choose: Callable[[torch.Tensor, int], int]) -> Outcome:
    """Step to the first child that holds the token that ``choose(row, depth)`` gives, a bad row's best one at most."""
    path, status = [0], 0
    while True:
        row = request.rows[path[-1]]
        token, flags = best_token(row)
        if not flags:
            token = choose(row, len(path) - 1)
        status |= flags
        child = next((node for node in request.children(path[-1]) if request.drafts[node] == token), None)
        if flags or child is None or len(path) > max_depth:
            return Outcome(path, token, status)
        path.append(child)


def verify_greedy(request: Request, max_depth: int) -> Outcome:
    """Follow the best token of each row."""
    return walk_matching(request, max_depth, lambda row, _: best_token(row)[0])


def verify_sample(request: Request, max_depth: int, settings: Settings, randomness: Randomness) -> Outcome:
    """Follow a token drawn at each row. The draws are those of plain sampling, so the text is plain sampling's text."""
    return walk_matching(
        request,
        max_depth,
        lambda row, depth: randomness.draw(filtered_scores(row, settings), settings.position + depth),
    )


def draft_distribution(row: torch.Tensor, tried: list[int]) -> torch.Tensor:
    """A draft row [V] without the tokens tried before it, in float64 and normalised; zeros if it is no distribution."""
    mass = row.double()
    if not bool((mass.isfinite() & (mass >= 0)).all()):
        return torch.zeros_like(mass)
    mass[tried] = 0.0
    total = mass.sum()
    return mass / total if total > 0 else mass


def verify_rejection(
    request: Request, max_depth: int, settings: Settings, drafting: int, randomness: Randomness
) -> Outcome:
    """Try the children in order, each rejection leaving the part of p that its draft row did not cover.

    With p the target after filters and q the child's draft row, child x is accepted with probability min(1, p(x) /
    q(x)); else p becomes max(p - q, 0), normalised. Drafts without replacement have the tokens of the siblings before
    them taken out of q. After the last rejection the bonus is drawn from what is left of p.
    """
    path, status = [0], 0
    while True:
        row = request.rows[path[-1]]
        fallback, flags = best_token(row)
        status |= flags
        if flags:
            return Outcome(path, fallback, status)
        position = settings.position + len(path) - 1
        target = torch.softmax(filtered_scores(row, settings), -1)
        accepted = None
        tried: list[int] = []
        for trial, node in enumerate(request.children(path[-1]) if len(path) <= max_depth else []):
            token = request.drafts[node]
            if not 0 <= token < len(target):
                continue
            draft = draft_distribution(request.draft_rows[node], tried)
            if draft[token] == 0:
                status |= VerifyStatus.NO_DRAFT_MASS
                continue
            if randomness.accepts(float(target[token]), float(draft[token]), position, trial):
                accepted = node
                break
            residual = (target - draft).clamp(min=0)
            if residual.sum() > 0:  # else the two are equal up to rounding
                target = residual / residual.sum()
            if drafting == Drafting.WITHOUT_REPLACEMENT:
                tried.append(token)
        if accepted is None:
            return Outcome(path, randomness.draw(target.log(), position), status)
        path.append(accepted)


def verify_typical(request: Request, max_depth: int, settings: Settings, randomness: Randomness) -> Outcome:
    """Accept a node whose token passes at its accepted parent's row; end in the deepest, then likeliest, then first."""
    vocab_size = request.rows.shape[-1]
    rows: dict[int, TypicalRow] = {}

    def read(node: int) -> TypicalRow:
        if node not in rows:
            rows[node] = TypicalRow(request.rows[node], settings)
        return rows[node]

    merit = {0: (0, 0.0)}  # accepted node -> depth, sum of ln p
    last = 0
    for node, (token, parent) in enumerate(zip(request.drafts, request.parents, strict=True)):
        if parent not in merit or merit[parent][0] == max_depth or not 0 <= token < vocab_size:
            continue
        row = read(parent)
        if row.status or not row.accepts[token]:
            continue
        depth, log_prob = merit[parent]
        merit[node] = (depth + 1, log_prob + float(row.log_probs[token]))
        if merit[node] > merit[last]:
            last = node
    path = [last]
    while path[0] != 0:
        path.insert(0, request.parents[path[0]])
    bonus = read(last).draw(randomness, settings.position + len(path) - 1)
    status = 0
    for row in rows.values():
        status |= row.status
    return Outcome(path, bonus, status)


def node_ranges(logits: torch.Tensor, num_nodes: torch.Tensor | None, cu_nodes: torch.Tensor | None) -> list[Any]:
    """Index of each request's nodes: ``(b, slice)`` into a dense batch, ``(slice,)`` into a ragged one."""
    if cu_nodes is not None:
        borders = cu_nodes.tolist()
        ranges = list(itertools.pairwise(borders))
        if borders[0] != 0 or borders[-1] > logits.shape[0] or any(first >= last for first, last in ranges):
            refuse(OP, "cu_nodes", f"rising from 0 to at most {logits.shape[0]}", borders)
        return [(slice(first, last),) for first, last in ranges]
    batch, nodes = logits.shape[:2]
    counts = [nodes] * batch if num_nodes is None else num_nodes.tolist()
    for b, count in enumerate(counts):
        if not 1 <= count <= nodes:
            refuse(OP, "num_nodes", f"in [1, {nodes}]", f"{count} in row {b}")
    return [(b, slice(0, count)) for b, count in enumerate(counts)]


def refuse_tree(parents: list[int], node: int, b: int) -> NoReturn:
    """Say which node of request b breaks the encoding."""
    constraint = "-1 for the root and lie in [0, node) for every other node"
    refuse(OP, "parents", constraint, f"{parents[node]} for node {node} in row {b}")


def requests_of(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor | None,
    cu_nodes: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    vocab_size: int,
) -> Iterator[Request]:
    """Cut a batch, dense or ragged, into checked requests."""
    for b, nodes in enumerate(node_ranges(logits, num_nodes, cu_nodes)):
        tree = parents[nodes if parents.ndim == len(nodes) else nodes[-1]].tolist()
        bad = first_malformed_node(tree)
        if bad >= 0:
            refuse_tree(tree, bad, b)
        rows = logits[nodes][:, :vocab_size]
        draft_rows = rows[:0] if draft_probs is None else draft_probs[nodes][:, :vocab_size]
        yield Request(rows, draft_rows, draft_tokens[nodes].tolist(), tree)


def single(scalar: float) -> float:
    """A scalar parameter as the tensor form would hold it: floats in fp32."""
    return torch.tensor(scalar, dtype=torch.float32).item() if isinstance(scalar, float) else scalar


def verify_tree_out(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: torch.Tensor | None,
    cu_nodes: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    vocab_size: int,
    max_depth: int,
    drafting: int,
    *rest: Any,
) -> None:
    """Verify every request and write the outputs. ``rest``: PARAMETERS' scalars, their tensors, a Verdict's fields."""
    count = len(PARAMETERS)
    scalars, per_request = rest[:count], rest[count : 2 * count]
    tokens, num_accepted, path, entropy, status = rest[2 * count :]
    requests = list(requests_of(logits, draft_tokens, parents, num_nodes, cu_nodes, draft_probs, vocab_size))
    check_rows(per_request)
    columns = [
        [single(scalar)] * len(requests) if tensor is None else tensor.tolist()
        for scalar, tensor in zip(scalars, per_request, strict=True)
    ]
    every = [Settings._make(row) for row in zip(*columns, strict=True)]
    check_rejection([settings.mode for settings in every], drafting, draft_probs)
    tokens.fill_(-1)
    path.fill_(-1)
    for b, (request, settings) in enumerate(zip(requests, every, strict=True)):
        outcome = verify(request, max_depth, settings, drafting, Randomness(settings.seed))
        accepted = len(outcome.path) - 1
        emitted = [request.drafts[node] for node in outcome.path[1:]] + [outcome.bonus]
        tokens[b, : accepted + 1] = tokens.new_tensor(emitted)
        path[b, : accepted + 1] = path.new_tensor(outcome.path)
        num_accepted[b] = accepted
        last_row = request.rows[outcome.path[-1]]
        entropy[b] = math.nan if best_token(last_row)[1] else row_entropy(last_row)
        status[b] = outcome.status


def verify(request: Request, max_depth: int, settings: Settings, drafting: int, randomness: Randomness) -> Outcome:
    """One request by its mode; temperature 0 is greedy."""
    if settings.mode == Mode.GREEDY or settings.temperature == 0:
        outcome = verify_greedy(request, max_depth)
    elif settings.mode == Mode.TYPICAL:
        outcome = verify_typical(request, max_depth, settings, randomness)
    elif settings.mode == Mode.SAMPLE:
        outcome = verify_sample(request, max_depth, settings, randomness)
    else:
        outcome = verify_rejection(request, max_depth, settings, drafting, randomness)
    known = range(-1, request.rows.shape[-1])
    if any(token not in known for token in request.drafts[1:]):
        outcome = outcome._replace(status=outcome.status | VerifyStatus.TOKEN_OUT_OF_RANGE)
    return outcome
