"""verify_tree's rules once more, on lists of Python floats and with a Philox of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cerberus_kernels import VerifyStatus

WORD = 2**32 - 1
LEAST_SCORE = -87.0
SURE = 1e-4  # a decision that is nearer to its border may be rounding's


def block(seed: int, position: int, kind: int, index: int) -> tuple[int, int, int, int]:
    """Four words of Philox4x32-10."""
    a, b, c, d = index, kind, position & WORD, position >> 32
    key = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ key[0], second & WORD, (first >> 32) ^ d ^ key[1], first & WORD
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return a, b, c, d


def word_of_token(seed: int, position: int, token: int) -> int:
    tile, place = divmod(token, 256)
    digits = b"".join(word.to_bytes(4, "little") for word in block(seed, position, 0, tile * 16 + place % 16))
    return digits[place // 16] << 24 | block(seed, position, 1, token // 4)[token % 4] >> 8


def gumbel(word: int) -> float:
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))


def coin(seed: int, position: int, trial: int) -> float:
    high, low, _, _ = block(seed, position, 2, trial)
    return ((high << 32 | low) >> 11) / 2**53


@dataclass
class Case:
    """One request: rows, drafts and parents of its nodes, the draft rows, and its parameters."""

    rows: list[list[float]]
    drafts: list[int]
    parents: list[int]
    draft_rows: list[list[float]]
    mode: str = "greedy"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    epsilon: float = 0.09
    delta: float = 0.3
    seed: int = 0
    position: int = 0
    least_margin: float = field(default=math.inf, init=False)

    @property
    def vocab_size(self) -> int:
        return len(self.rows[0])

    def children(self, node: int) -> list[int]:
        return [child for child in range(1, len(self.parents)) if self.parents[child] == node]

    def greater(self, a: float, b: float) -> bool:
        if a != b or a != 0:  # two exact zeros are no close call
            self.least_margin = min(self.least_margin, abs(a - b) / max(abs(a), abs(b), 1e-30))
        return a > b

    def best(self, node: int) -> int:
        row = self.rows[node]
        return row.index(max(row))

    def probabilities(self, node: int) -> dict[int, float]:
        """Tokens that temperature and filters leave, with their probabilities."""
        row = self.rows[node]
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        scores = {token: (row[token] - row[order[0]]) / self.temperature for token in order}
        weights = {token: math.exp(score) if score >= LEAST_SCORE else 0.0 for token, score in scores.items()}
        kept = order[: self.top_k or None]
        if self.top_p < 1:
            goal, mass, prefix = self.top_p * math.fsum(weights[token] for token in kept), 0.0, []
            for token in kept:
                if not self.greater(goal, mass):
                    break
                prefix.append(token)
                mass += weights[token]
            kept = prefix
        if self.min_p > 0:
            kept = [token for token in kept if not self.greater(self.min_p, weights[token])]
        total = math.fsum(weights[token] for token in kept)
        return {token: weights[token] / total for token in kept if weights[token] > 0}

    def draw(self, probs: dict[int, float], position: int, precision: float = 0.0) -> int:
        """Argmax of ln p + noise; ``precision`` is how far each p may be off."""
        ranked = sorted(
            ((math.log(p) + gumbel(word_of_token(self.seed, position, v)), -v) for v, p in probs.items()), reverse=True
        )
        doubt = {-v: SURE + 2 * precision / probs[-v] for _, v in ranked}
        for score, v in ranked[1:]:
            if ranked[0][0] - score < doubt[-v] + doubt[-ranked[0][1]]:
                self.least_margin = 0.0
        return -ranked[0][1]


Result = tuple[list[int], int, int]  # path, bonus, status of draft rows


def matching(case: Case, max_depth: int, choose) -> Result:
    path = [0]
    while True:
        token = choose(path[-1], len(path) - 1)
        matches = [child for child in case.children(path[-1]) if case.drafts[child] == token]
        if not matches or len(path) > max_depth:
            return path, token, 0
        path.append(matches[0])


def rejection(case: Case, max_depth: int, drafting: str) -> Result:
    path, status = [0], 0
    while True:
        target, position, tried = case.probabilities(path[-1]), case.position + len(path) - 1, set()
        step, error = None, 0.0
        for trial, child in enumerate(case.children(path[-1]) if len(path) <= max_depth else []):
            token = case.drafts[child]
            if not 0 <= token < case.vocab_size:
                continue
            weights = list(case.draft_rows[child])
            if any(not 0 <= weight < math.inf for weight in weights):
                status |= VerifyStatus.NO_DRAFT_MASS
                continue
            if drafting == "without_replacement":
                weights = [0.0 if v in tried else weight for v, weight in enumerate(weights)]
            if weights[token] == 0:
                status |= VerifyStatus.NO_DRAFT_MASS
                continue
            draft = [weight / math.fsum(weights) for weight in weights]
            if case.greater(target.get(token, 0.0), coin(case.seed, position, trial) * draft[token]):
                step = child
                break
            left = {v: p - draft[v] for v, p in target.items() if p > draft[v]}
            total = math.fsum(left.values())
            error += 1e-6
            if 0 < total < 1e-3:  # of what cancels so nearly, rounding makes something else
                case.least_margin = 0.0
            if total > 0:
                target, error = {v: p / total for v, p in left.items()}, error / total
            tried.add(token)
        if step is None:
            return path, case.draw(target, position, error), status
        path.append(step)


def typical(case: Case, max_depth: int) -> Result:
    def passing(node):
        probs = case.probabilities(node)
        entropy = -math.fsum(p * math.log(p) for p in probs.values())
        threshold = min(case.epsilon, case.delta * math.exp(-entropy))
        return {token: p for token, p in probs.items() if case.greater(p, threshold)}

    accepted: dict[int, list[float]] = {0: []}  # node -> ln p along its path
    for node in range(1, len(case.drafts)):
        parent = case.parents[node]
        if parent in accepted and len(accepted[parent]) < max_depth:
            probs = passing(parent)
            if case.drafts[node] in probs:
                accepted[node] = [*accepted[parent], math.log(probs[case.drafts[node]])]
    longest = max(len(path) for path in accepted.values())
    ends = {node: math.fsum(path) for node, path in accepted.items() if len(path) == longest}
    near = [node for node, score in ends.items() if max(ends.values()) - score < SURE]
    if any(sorted(accepted[node]) != sorted(accepted[near[0]]) for node in near):
        case.least_margin = 0.0
    path = [min(near)]
    while path[0]:
        path.insert(0, case.parents[path[0]])
    probs = passing(path[-1])
    if not probs:
        return path, case.best(path[-1]), 0
    return path, case.draw(probs, case.position + len(path) - 1), 0


def verify(case: Case, max_depth: int, drafting: str = "deterministic") -> Result:
    """Path, bonus and status of one request whose rows are free of NaN and have a finite greatest entry."""
    if case.mode == "greedy" or case.temperature == 0:
        path, bonus, status = matching(case, max_depth, lambda node, _: case.best(node))
    elif case.mode == "typical":
        path, bonus, status = typical(case, max_depth)
    elif case.mode == "sample":
        path, bonus, status = matching(
            case, max_depth, lambda node, depth: case.draw(case.probabilities(node), case.position + depth)
        )
    else:
        path, bonus, status = rejection(case, max_depth, drafting)
    if any(not -1 <= token < case.vocab_size for token in case.drafts[1:]):
        status |= VerifyStatus.TOKEN_OUT_OF_RANGE
    return path, bonus, int(status)
