"""verify_tree's output distribution, worked out over all coins and all drafts, is the target's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verify_enumeration import (
    PLAIN,
    FixedRows,
    Model,
    outcomes,
    pair_distribution,
    plain_pair_distribution,
    request_of,
    step_marginals,
    target_probabilities,
    total_variation,
)
from verify_enumeration import drawn_drafts as drawn

from cerberus_kernels.ops.verify_tree import reference
from cerberus_kernels.ops.verify_tree.parameters import Drafting, Mode
from cerberus_kernels.testing import T5

ROUNDING = 1e-12
CHAIN, STAR, PAIRS = (-1, 0, 1), (-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2)
SETTINGS = [
    PLAIN,
    PLAIN._replace(temperature=0.5),
    PLAIN._replace(temperature=1.7, top_k=2),
    PLAIN._replace(top_p=0.6),
    PLAIN._replace(min_p=0.4, temperature=0.8),
    PLAIN._replace(temperature=1.3, top_k=3, top_p=0.8, min_p=0.2),
    PLAIN._replace(temperature=0.0),
    PLAIN._replace(temperature=1e-3),
]


def named(settings) -> str:
    changed = [f"{name}={value}" for name, value in settings._asdict().items() if value != getattr(PLAIN, name)]
    return " ".join(changed) or "plain"


def rule_of(mode: Mode, settings, drafting: Drafting = Drafting.DETERMINISTIC, max_depth: int = 9):
    settings = settings._replace(mode=int(mode))
    return lambda request, randomness: reference.verify(request, max_depth, settings, drafting, randomness)


def distance(rule, model, settings, parents, drafts) -> float:
    joint = pair_distribution(rule, model, settings, parents, drafts)
    expected = plain_pair_distribution(model, settings)
    assert joint.sum() == pytest.approx(1, abs=ROUNDING)
    first = total_variation(joint.sum(1), expected.sum(1))
    return max(first, total_variation(joint, expected))


def fixed(drafts):
    return iter([(1.0, list(drafts))])


DETERMINISTIC = [
    (2, (-1,), (0,)),
    (2, CHAIN, (0, 1, 0)),
    (3, CHAIN, (0, 2, 2)),
    (3, STAR, (0, 1, 1, 2)),  # duplicates
    (3, STAR, (0, 0, 0, 0)),
    (4, PAIRS, (0, 2, 2, 1, 3, 0)),  # the second copy has children of its own
    (5, T5, (0, 4, 1, -1, 3)),
    (5, PAIRS, (0, 0, 1, 2, 2, 4)),
    (8, STAR, (0, 7, 3, 5)),
    (8, PAIRS, (0, 6, 1, 0, 7, 5)),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
@pytest.mark.parametrize(("vocab_size", "parents", "drafts"), DETERMINISTIC)
def test_sample_is_exact_for_deterministic_drafts(vocab_size, parents, drafts, settings):
    for seed in (0, 1):
        model = Model(vocab_size, seed)
        assert distance(rule_of(Mode.SAMPLE, settings), model, settings, parents, fixed(drafts)) < ROUNDING
    shallow = rule_of(Mode.SAMPLE, settings, max_depth=1)
    assert distance(shallow, model, settings, parents, fixed(drafts)) < ROUNDING


@pytest.mark.parametrize("drafting", ["iid", "without_replacement"])
@pytest.mark.parametrize("parents", [CHAIN, T5])
def test_sample_is_exact_for_drawn_drafts_too(parents, drafting):
    model = Model(3, seed=5)
    rule = rule_of(Mode.SAMPLE, PLAIN)
    assert distance(rule, model, PLAIN, parents, drawn(model, parents, drafting)) < ROUNDING


DRAWN = [
    (2, CHAIN, 0),
    (2, (-1, 0, 0), 0),
    (2, T5, 0),
    (3, STAR, 0),
    (3, T5, 0),
    (3, T5, 1),
    (4, STAR, 0),
    (4, STAR, 1),
    (5, CHAIN, 2),
    (8, (-1, 0), 0),
    (8, (-1, 0, 0), 5),
]


@pytest.mark.parametrize("settings", [SETTINGS[i] for i in (0, 2, 5)], ids=named)
@pytest.mark.parametrize("scheme", [Drafting.IID, Drafting.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize(("vocab_size", "parents", "sparse"), DRAWN)
def test_rejection_is_exact_for_drafts_drawn_as_it_is_told(vocab_size, parents, sparse, scheme, settings):
    model = Model(vocab_size, seed=3, sparse=sparse)
    drafts = drawn(model, parents, scheme.name.lower())
    assert distance(rule_of(Mode.REJECTION, settings, scheme), model, settings, parents, drafts) < ROUNDING


@pytest.mark.parametrize("scheme", [Drafting.IID, Drafting.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("settings", SETTINGS[1:], ids=named)
def test_rejection_is_exact_under_every_filter(settings, scheme):
    model = Model(3, seed=11)
    drafts = list(drawn(model, (-1, 0, 0), scheme.name.lower()))
    for depth in (0, 1):
        rule = rule_of(Mode.REJECTION, settings, scheme, max_depth=depth)
        assert distance(rule, model, settings, (-1, 0, 0), iter(drafts)) < ROUNDING


@pytest.mark.parametrize("scheme", [Drafting.IID, Drafting.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ((0.25, 0.25, 0.5), (0.25, 0.25, 0.5)),  # nothing is left after a rejection
        ((1.0, 0.0, 0.0), (0.0, 0.5, 0.5)),  # nothing in common
        ((0.0, 0.5, 0.5), (1.0, 0.0, 0.0)),
        ((0.2, 0.5, 0.3), (0.6, 0.3, 0.1)),
    ],
)
def test_rejection_is_exact_at_the_borders(target, draft, scheme):
    model = FixedRows(target, draft)
    siblings = 2 if sum(q > 0 for q in draft) > 1 or scheme == Drafting.IID else 1
    parents = (-1, *[0] * siblings)
    rule = rule_of(Mode.REJECTION, PLAIN, scheme)
    assert distance(rule, model, PLAIN, parents, drawn(model, parents, scheme.name.lower())) < ROUNDING


def test_greedy_and_typical_do_what_they_say():
    """Neither follows the target: greedy emits its greatest tokens, typical draws only the bonus, from what passes."""
    for seed in range(6):
        model = Model(5, seed)
        drafts, parents = [0, 2, 1, 3, 0], list(T5)
        request = request_of(model, parents, drafts)
        greedy = step_marginals(outcomes(lambda r, q=request: rule_of(Mode.GREEDY, PLAIN)(q, r)), drafts)
        assert len(greedy) == 1 and max(greedy.values()) == 1
        settings = PLAIN._replace(epsilon=0.2, delta=0.6, top_k=4)
        typical = list(outcomes(lambda r, q=request, s=settings: rule_of(Mode.TYPICAL, s)(q, r)))
        path = typical[0][1].path
        assert all(outcome.path == path for _, outcome in typical)
        probs = target_probabilities(request.rows[path[-1]], settings)
        entropy = -sum(p * np.log(p) for p in probs if p > 0)
        passing = np.where(probs > min(0.2, 0.6 * np.exp(-entropy)), probs, 0)
        got = np.zeros(5)
        for chance, outcome in typical:
            got[outcome.bonus] += chance
        assert total_variation(got, passing / passing.sum()) < ROUNDING


# What the enumeration would show of rules that others ship: target (.2, .5, .3), drafts from (.6, .3, .1).


TARGET, DRAFT = (0.2, 0.5, 0.3), (0.6, 0.3, 0.1)


def one_level_rule(update_residual: bool = True, merge_duplicates: bool = False, forbid_tried: bool = False):
    """Trials of the root's children as in rejection mode, with a step left out or put in."""

    def rule(request, randomness):
        target = torch.softmax(request.rows[0].double(), -1)
        residual, tried = target, []
        for node in request.children(0):
            token, draft = request.drafts[node], request.draft_rows[node].double()
            if token in tried and merge_duplicates:
                continue
            if randomness.accepts(float(residual[token]), float(draft[token]), 0, node):
                return reference.Outcome([0, node], randomness.draw(request.rows[node].double(), 1), 0)
            if update_residual:
                residual = (residual - draft).clamp(min=0)
                residual = residual / residual.sum()
            tried.append(token)
        if not update_residual:
            residual = (target - request.draft_rows[1].double()).clamp(min=0)
        return reference.Outcome([0], randomness.draw(residual.log(), 0), 0)

    return rule


def target_only_rule(request, randomness):
    """Accept sibling x with probability p(x) / (1 - sum of p of the siblings before); copies counted as others are."""
    target = torch.softmax(request.rows[0].double(), -1)
    passed = 0.0
    for node in request.children(0):
        share = float(target[request.drafts[node]])
        if randomness.accepts(share, max(1 - passed, 1e-300), 0, node):
            return reference.Outcome([0, node], randomness.draw(request.rows[node].double(), 1), 0)
        passed += share
    left = target.clone()
    left[[request.drafts[node] for node in request.children(0)]] = 0.0
    return reference.Outcome([0], randomness.draw(left.log(), 0), 0)


@pytest.mark.parametrize(
    ("rule", "drafting", "expected"),
    [
        (one_level_rule(), "iid", 0.0),  # the harness agrees with the right rule written anew
        (one_level_rule(update_residual=False), "iid", 0.08),
        (one_level_rule(update_residual=False), "without_replacement", 0.10),
        (one_level_rule(update_residual=False), (0, 0, 1), 0.30),
        (one_level_rule(merge_duplicates=True), "iid", 0.04),
        (rule_of(Mode.REJECTION, PLAIN, Drafting.IID), (0, 0, 1), 0.30),
        (target_only_rule, (0, 0, 1), 0.0),
        (target_only_rule, (0, 1, 0), 0.0),
        (target_only_rule, (0, 0, 0), 0.20),
        (target_only_rule, (0, 1, 0, 1), 0.30),
        (target_only_rule, (0, 1, 1), 0.50),
        (rule_of(Mode.SAMPLE, PLAIN), (0, 1, 0, 1), 0.0),
        (rule_of(Mode.SAMPLE, PLAIN), (0, 1, 1), 0.0),
    ],
)
def test_the_enumeration_shows_a_biased_rule(rule, drafting, expected):
    model = FixedRows(TARGET, DRAFT)
    if isinstance(drafting, str):
        parents, drafts = (-1, 0, 0), drawn(model, (-1, 0, 0), drafting)
    else:
        parents, drafts = (-1, *[0] * (len(drafting) - 1)), fixed(drafting)
    joint = pair_distribution(rule, model, PLAIN, parents, drafts)
    bias = total_variation(joint.sum(1), np.array(TARGET))
    assert bias == pytest.approx(expected, abs=1e-7)


def test_the_wrong_scheme_is_a_bias_one_way_and_not_the_other():
    model, parents = FixedRows(TARGET, DRAFT), (-1, 0, 0)

    def told(scheme):
        rule = rule_of(Mode.REJECTION, PLAIN, scheme)
        # without replacement a copy has no mass left, is no trial and flagged: that status is expected here
        return lambda request, randomness: rule(request, randomness)._replace(status=0)

    as_iid = distance(told(Drafting.IID), model, PLAIN, parents, drawn(model, parents, "without_replacement"))
    assert as_iid > 0.01
    # of independent drafts, those that differ from the ones before them are a sample without replacement
    distinct = distance(told(Drafting.WITHOUT_REPLACEMENT), model, PLAIN, parents, drawn(model, parents, "iid"))
    assert distinct < ROUNDING


# Worked by hand


class Scripted:
    """Coins in the order in which they are needed; a draw takes the token at its coin along the cumulated p."""

    def __init__(self, *coins: float) -> None:
        self.coins = list(coins)

    def accepts(self, target, draft, position, trial):
        return self.coins.pop(0) * draft < target

    def draw(self, scores, position):
        return int((torch.softmax(scores, -1).cumsum(-1) <= self.coins.pop(0)).sum())


def test_a_chain_of_one_by_hand():  # VER-03
    model = FixedRows([0.5, 0.3, 0.15, 0.05], [0.8, 0.1, 0.05, 0.05])
    rule = rule_of(Mode.REJECTION, PLAIN, Drafting.IID)
    rejected = request_of(model, (-1, 0), (0, 0))
    assert rule(rejected, Scripted(0.60, 0.0)).path == [0, 1]  # the ratio is .625
    assert rule(rejected, Scripted(0.65, 0.5)) == ([0], 1, 0)
    bonus = {outcome.bonus: chance for chance, outcome in outcomes(lambda r: rule(rejected, r)) if len(outcome[0]) == 1}
    assert {token: chance / 0.375 for token, chance in bonus.items()} == pytest.approx({1: 2 / 3, 2: 1 / 3}, abs=1e-6)
    always = request_of(model, (-1, 0), (0, 1))
    assert all(outcome.path == [0, 1] for _, outcome in outcomes(lambda r: rule(always, r)))
    accepted = 0.0
    for weight, drafts in drawn(model, (-1, 0), "iid"):
        request = request_of(model, (-1, 0), drafts)
        accepted += sum(
            weight * chance for chance, outcome in outcomes(lambda r, q=request: rule(q, r)) if len(outcome.path) > 1
        )
    assert accepted == pytest.approx(0.70, abs=1e-6)


def test_two_fixed_siblings_by_hand():  # VER-04
    model = FixedRows([0.5, 0.3, 0.15, 0.05], [0.25] * 4)
    drafts = [0, 0, 1]
    request = request_of(model, (-1, 0, 0), drafts)
    first: dict[tuple[int, ...], float] = {}
    for chance, outcome in outcomes(lambda r: rule_of(Mode.SAMPLE, PLAIN)(request, r)):
        key = tuple(outcome.path) if len(outcome.path) > 1 else (0, -1 - outcome.bonus)
        first[key] = first.get(key, 0.0) + chance
    assert first == pytest.approx({(0, 1): 0.5, (0, 2): 0.3, (0, -3): 0.15, (0, -4): 0.05}, abs=1e-6)
    assert first[0, 2] / (1 - first[0, 1]) == pytest.approx(0.6, abs=1e-6)
    left = first[0, -3] + first[0, -4]
    assert [first[0, -3] / left, first[0, -4] / left] == pytest.approx([0.75, 0.25], abs=1e-6)


def test_a_coin_of_zero_accepts_no_token_of_probability_zero(monkeypatch):
    monkeypatch.setattr(reference, "coin", lambda seed, position, trial: 0.0)
    randomness = reference.Randomness(0)
    assert not randomness.accepts(0.0, 0.5, 3, 0)
    assert randomness.accepts(1e-300, 0.5, 3, 0)
    monkeypatch.setattr(reference, "coin", lambda seed, position, trial: 0.5)
    assert not randomness.accepts(0.25, 0.5, 3, 0)
