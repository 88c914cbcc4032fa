"""verify_tree against an oracle of its own in plain Python, the generator, and the distribution of the bonus."""

from __future__ import annotations

import math

import pytest
import torch
import verify_oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_cases import int32, some

import cerberus_kernels as ck
from cerberus_kernels import _native
from cerberus_kernels.ops.verify_tree import philox
from cerberus_kernels.ops.verify_tree.parameters import MODE_CODES

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


# Against the oracle


def test_the_noise_layout_is_the_oracles():
    tokens = torch.tensor([0, 1, 3, 4, 15, 16, 255, 256, 1000, 49151, 128255])
    for seed, position in ((0, 0), (-3, 2**33 + 9), (2**63 - 1, 17)):
        expected = [verify_oracle.word_of_token(seed, position, token) for token in tokens.tolist()]
        assert philox.token_words(seed, position, tokens).tolist() == expected
        for trial in (0, 1, 40):
            assert philox.coin(seed, position, trial) == verify_oracle.coin(seed, position, trial)


PARAMETERS = {
    "mode": st.sampled_from(["greedy", "typical", "sample", "sample", "rejection", "rejection", "rejection"]),
    "temperature": st.sampled_from([0.0, 0.03125, 0.5, 1.0, 1.0, 1.5, 4.0]),
    "top_k": st.sampled_from([0, 0, 0, 1, 2, 4]),
    "top_p": st.sampled_from([1.0, 1.0, 1.0, 0.3, 0.6, 0.9]),
    "min_p": st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.3]),
    "epsilon": st.sampled_from([0.0, 0.09, 0.4, 1.0]),
    "delta": st.sampled_from([0.1, 0.3, 0.7, 1.2]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "position": st.integers(0, 2**40),
}
ENTRY = st.sampled_from([x / 2 for x in range(-6, 7)] + [-math.inf])  # few values, so ties are common
WEIGHT = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 3.0, 7.0])


@st.composite
def batches(draw):
    """Requests over one vocabulary, all on one tree or on one each."""
    vocab_size, requests = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    nodes = [draw(st.integers(1, 9)) for _ in range(requests)]
    shared = draw(st.booleans())
    tree = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, max(nodes))]
    cases = []
    for count in nodes:
        own = tree if shared else [-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)]
        rows = draw(st.lists(st.lists(ENTRY, min_size=vocab_size, max_size=vocab_size), min_size=count, max_size=count))
        for row in rows:
            row[draw(st.integers(0, vocab_size - 1))] = 2.5  # no row without a finite entry
        weights = st.lists(WEIGHT, min_size=vocab_size, max_size=vocab_size)
        draft_rows = draw(st.lists(weights, min_size=count, max_size=count))
        for row in draft_rows:
            if draw(st.integers(0, 19)) == 0:
                row[draw(st.integers(0, vocab_size - 1))] = draw(st.sampled_from([math.nan, math.inf, -1.0]))
        drafts = [draw(st.integers(-1, vocab_size)) for _ in range(count)]
        parameters = {name: draw(strategy) for name, strategy in PARAMETERS.items()}
        case = verify_oracle.Case(rows, drafts, own[:count], draft_rows, **parameters)
        for _ in range(draw(st.integers(0, 4))):  # put what comes next where it is looked for, so that paths grow
            path, bonus, _ = verify_oracle.verify(case, count, "iid")
            if case.children(path[-1]):
                case.drafts[draw(st.sampled_from(case.children(path[-1])))] = bonus
        cases.append(case)
    return cases, shared


def padded(rows: list[list[float]], nodes: int, columns: int) -> torch.Tensor:
    """[nodes, columns] with NaN wherever nothing may be read."""
    result = torch.full((nodes, columns), math.nan)
    result[: len(rows), : len(rows[0])] = torch.tensor(rows)
    return result


def arguments(cases: list[verify_oracle.Case], form: str, ids: torch.dtype) -> dict:
    """One call for all cases: ``"dense"`` with num_nodes, ``"ragged"``, or ``"one tree"``, the longest of them."""
    counts, vocab_size = [len(case.drafts) for case in cases], cases[0].vocab_size
    nodes = [max(counts) + (form == "dense")] * len(cases) if form != "ragged" else counts
    logits = [padded(case.rows, size, vocab_size + 2) for case, size in zip(cases, nodes, strict=True)]
    probs = [padded(case.draft_rows, size, vocab_size + 1) for case, size in zip(cases, nodes, strict=True)]
    drafts = [torch.tensor(case.drafts + [99] * (n - len(case.drafts))) for case, n in zip(cases, nodes, strict=True)]
    trees = [int32(case.parents + [99] * (n - len(case.parents))) for case, n in zip(cases, nodes, strict=True)]
    join = torch.cat if form == "ragged" else torch.stack
    for row in probs:
        row[0] = math.nan  # the root was drawn from nothing
    call = {
        "logits": join(logits), "draft_tokens": join(drafts).to(ids), "draft_probs": join(probs),
        "parents": max(trees, key=lambda tree: int((tree < 99).sum())) if form == "one tree" else join(trees),
        "vocab_size": vocab_size, "mode": int32([list(MODE_CODES).index(case.mode) for case in cases]),
        **{
            name: torch.tensor([getattr(case, name) for case in cases])
            for name in PARAMETERS if name != "mode"
        },
    }  # fmt: skip
    if form == "ragged":
        call["cu_nodes"] = int32([sum(counts[:b]) for b in range(len(counts) + 1)])
    else:
        call["num_nodes"] = int32(counts)
    return call


def result(verdict: ck.Verdict, case: verify_oracle.Case, b: int) -> tuple[list[int], int, int]:
    """A request's path, bonus and status, after a look at what else the verdict holds."""
    accepted = int(verdict.num_accepted[b])
    tokens, path = verdict.tokens[b].tolist(), verdict.path[b].tolist()
    assert tokens[:accepted] == [case.drafts[node] for node in path[1 : accepted + 1]]
    assert all(entry == -1 for entry in tokens[accepted + 1 :] + path[accepted + 1 :])
    probs = torch.softmax(torch.tensor(case.rows[path[accepted]], dtype=torch.float64), 0)
    assert float(verdict.entropy[b]) == pytest.approx(float(torch.special.entr(probs).sum()), abs=1e-5)
    return path[: accepted + 1], tokens[accepted], int(verdict.status[b])


def test_every_mode_and_form_equals_the_oracle():
    compared = []

    @settings(max_examples=250, deadline=None)
    @given(
        batch=batches(),
        ragged=st.booleans(),
        max_depth=st.sampled_from([8, 8, 8, 2, 1, 0]),
        drafting=st.sampled_from(["iid", "without_replacement"]),
        ids=st.sampled_from([torch.int32, torch.int64]),
    )
    def run(batch, ragged, max_depth, drafting, ids):
        cases, shared = batch
        form = "ragged" if ragged else "one tree" if shared else "dense"
        call = {**arguments(cases, form, ids), "max_depth": max_depth, "drafting": drafting}
        verdicts = {name: ck.verify_tree(**call, backend=name) for name in ("native", "reference")}
        for b, case in enumerate(cases):
            case.least_margin = math.inf
            expected = verify_oracle.verify(case, max_depth, drafting)
            compared.append(case.least_margin > verify_oracle.SURE)
            for verdict in verdicts.values():
                actual = result(verdict, case, b)
                assert actual == expected or not compared[-1]

    run()
    assert sum(compared) > 0.8 * len(compared)


def test_bonus_has_the_distribution_of_the_passing_tokens(backend):
    """Chi-square at a fixed seed: up to 4 000 draws from p restricted to the tokens above the threshold."""
    probs = torch.tensor([0.38, 0.28, 0.20, 0.08, 0.06])  # the threshold is 0.0727: the last token never comes
    draws = {"native": 4000, "reference": 500}.get(backend, 24)
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
    few = some(backend, 100, 20)
    by_seed = ck.verify_tree(
        logits[:few], torch.zeros(few, 1, dtype=torch.int32), int32([-1]), mode="typical", seed=position[:few],
        backend=backend,
    )  # fmt: skip
    assert len(set(by_seed.tokens.flatten().tolist())) >= some(backend, 4, 3)
