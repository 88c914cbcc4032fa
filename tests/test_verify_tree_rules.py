"""verify_tree against an oracle of its own in plain Python, the generator, and the distribution of the bonus."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cerberus_kernels as ck
from cerberus_kernels import _native
from cerberus_kernels.ops.verify_tree import philox

WORD = 2**32 - 1

# Random123's known answers: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def as_int32_bits(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def native_philox(counters: torch.Tensor, key: list[int]) -> torch.Tensor:
    words = torch.empty(counters.shape, dtype=torch.int32)
    _native.function("philox4x32")(as_int32_bits(counters), *key, words)
    return words.to(torch.int64) & WORD


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert philox.philox4x32(torch.tensor(counter), tuple(key)).tolist() == expected
    assert native_philox(torch.tensor([counter]), key)[0].tolist() == expected


def test_philox_is_the_same_on_both_sides():
    counters = torch.randint(2**32, (1000, 4))
    key = [0x89ABCDEF, 0x01234567]
    assert torch.equal(philox.philox4x32(counters, tuple(key)), native_philox(counters, key))


def test_gumbel_noise_is_finite_and_within_its_bound():
    edges = torch.tensor([0, 1, 2, 2**30 - 1, 2**30, 2**31 - 1, 2**31, WORD - 1, WORD])
    words = torch.cat([edges, torch.randint(2**32, (100_000,))])
    noise = torch.empty(words.shape)
    _native.function("gumbel_noise")(as_int32_bits(words), noise)
    exact = philox.gumbel(words)
    assert exact.isfinite().all()
    assert (noise.double() - exact).abs().max() < 1e-5
    assert exact.max() < 33 * math.log(2)
    assert exact[9:].mean().item() == pytest.approx(0.5772, abs=0.02)  # Euler's constant
    assert exact[9:].std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.02)


# The oracle: lists of Python floats, and a Philox of its own.


def oracle_block(seed: int, position: int, kind: int, index: int):
    a, b, c, d = index, kind, position & WORD, position >> 32
    key = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ key[0], second & WORD, (first >> 32) ^ d ^ key[1], first & WORD
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return a, b, c, d


def oracle_word(seed: int, position: int, token: int) -> int:
    tile, place = divmod(token, 256)
    digits = b"".join(word.to_bytes(4, "little") for word in oracle_block(seed, position, 0, tile * 16 + place % 16))
    return digits[place // 16] << 24 | oracle_block(seed, position, 1, token // 4)[token % 4] >> 8


def oracle_gumbel(word: int) -> float:
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))


class Margin:
    """The least distance of any decision from its border: below it, rounding may decide."""

    def __init__(self) -> None:
        self.least = math.inf

    def greater(self, a: float, b: float) -> bool:
        self.least = min(self.least, abs(a - b) / max(abs(a), abs(b), 1e-30))
        return a > b


def oracle_probabilities(row, rule, margin):
    """Tokens with their probabilities after temperature and filters."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    greatest = row[order[0]]
    weights = {token: math.exp((row[token] - greatest) / rule["temperature"]) for token in order}
    kept = order[: rule["top_k"]] if rule["top_k"] else order
    if rule["top_p"] < 1:
        target, mass, prefix = rule["top_p"] * sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if not margin.greater(target, mass):
                break
            prefix.append(token)
            mass += weights[token]
        kept = prefix
    if rule["min_p"] > 0:
        kept = [token for token in kept if not margin.greater(rule["min_p"], weights[token])]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def oracle_typical(rows, drafts, parents, rule, margin):
    def passing(node):
        probs = oracle_probabilities(rows[node], rule, margin)
        entropy = -sum(p * math.log(p) for p in probs.values())
        threshold = min(rule["epsilon"], rule["delta"] * math.exp(-entropy))
        return {token: p for token, p in probs.items() if margin.greater(p, threshold)}

    accepted = {0: []}  # node -> ln p along its path
    for node in range(1, len(drafts)):
        if parents[node] in accepted:
            probs = passing(parents[node])
            if drafts[node] in probs:
                accepted[node] = accepted[parents[node]] + [math.log(probs[drafts[node]])]
    longest = max(len(path) for path in accepted.values())
    ends = {node: math.fsum(path) for node, path in accepted.items() if len(path) == longest}
    best = max(ends.values())
    near = [node for node, score in ends.items() if best - score < 1e-4]
    if any(sorted(accepted[node]) != sorted(accepted[near[0]]) for node in near):
        margin.least = 0.0
    node = min(near)
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    probs = passing(path[-1])
    if not probs:
        return path, min(range(len(rows[0])), key=lambda token: (-rows[path[-1]][token], token))
    noise = {
        token: math.log(p) + oracle_gumbel(oracle_word(rule["seed"], rule["position"] + len(path) - 1, token))
        for token, p in probs.items()
    }
    ranked = sorted(noise, key=noise.get, reverse=True)
    if len(ranked) > 1 and noise[ranked[0]] - noise[ranked[1]] < 1e-4:
        margin.least = 0.0
    return path, ranked[0]


def oracle_greedy(rows, drafts, parents):
    path = [0]
    while True:
        row = rows[path[-1]]
        token = row.index(max(row))
        children = [i for i in range(1, len(drafts)) if parents[i] == path[-1] and drafts[i] == token]
        if not children:
            return path, token
        path.append(children[0])


@st.composite
def trees(draw):
    nodes, vocab_size = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, nodes)]
    drafts = [draw(st.integers(-1, vocab_size)) for _ in range(nodes)]
    entry = st.integers(-6, 6).map(lambda x: x / 2)  # few values, so ties are common
    rows = [[draw(entry) for _ in range(vocab_size)] for _ in range(nodes)]
    return rows, drafts, parents


def run(rows, drafts, parents, backend, **keywords):
    verdict = ck.verify_tree(torch.tensor([rows]), torch.tensor([drafts]), int32(parents), backend=backend, **keywords)
    accepted = int(verdict.num_accepted)
    tokens, path = verdict.tokens[0].tolist(), verdict.path[0].tolist()
    assert tokens[:accepted] == [drafts[node] for node in path[1 : accepted + 1]]
    assert all(entry == -1 for entry in tokens[accepted + 1 :] + path[accepted + 1 :])
    return path[: accepted + 1], tokens[accepted], float(verdict.entropy)


def check_entropy(row, entropy):
    probs = torch.softmax(torch.tensor(row, dtype=torch.float64), 0)
    assert entropy == pytest.approx(float(torch.special.entr(probs).sum()), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(case=trees())
def test_greedy_equals_the_oracle(case):
    for backend in ("reference", "native"):
        path, bonus, entropy = run(*case, backend)
        assert (path, bonus) == oracle_greedy(*case)
        check_entropy(case[0][path[-1]], entropy)


@settings(max_examples=120, deadline=None)
@given(
    case=trees(),
    rule=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.25, 0.5, 1.0, 1.5, 4.0]),
            "top_k": st.sampled_from([0, 0, 1, 2, 4]),
            "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.6, 0.9]),
            "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.3]),
            "epsilon": st.sampled_from([0.0, 0.09, 0.4, 1.0]),
            "delta": st.sampled_from([0.1, 0.3, 0.7, 1.2]),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "position": st.integers(0, 2**40),
        }
    ),
)
def test_typical_equals_the_oracle(case, rule):
    margin = Margin()
    expected = oracle_typical(*case, rule, margin)
    assume(margin.least > 1e-4)
    for backend in ("reference", "native"):
        path, bonus, entropy = run(*case, backend, mode="typical", **rule)
        assert (path, bonus) == expected
        check_entropy(case[0][path[-1]], entropy)


def test_bonus_has_the_distribution_of_the_passing_tokens(backend):
    """Chi-square at a fixed seed: 4 000 draws from p restricted to the tokens above the threshold."""
    probs = torch.tensor([0.38, 0.28, 0.20, 0.08, 0.06])  # the threshold is 0.0727: the last token never comes
    draws = 4000 if backend == "native" else 500
    logits = probs.log().expand(draws, 1, 5)
    position = torch.arange(draws)
    verdict = ck.verify_tree(
        logits, torch.zeros(draws, 1, dtype=torch.int32), int32([-1]), mode="typical", seed=5, position=position,
        backend=backend,
    )  # fmt: skip
    counts = torch.bincount(verdict.tokens.flatten(), minlength=5).double()
    assert counts[4] == 0
    expected = (probs[:4] / probs[:4].sum()).double() * draws
    statistic = float(((counts[:4] - expected) ** 2 / expected).sum())
    assert statistic < 16.3  # 3 degrees of freedom, p = 0.001
    by_seed = ck.verify_tree(
        logits[:200], torch.zeros(200, 1, dtype=torch.int32), int32([-1]), mode="typical", seed=position[:200],
        backend=backend,
    )  # fmt: skip
    assert len(set(by_seed.tokens.flatten().tolist())) == 4
