"""Policies and costs: sizes and thresholds from tables, automatic choices, the cost cache, refusals."""

from __future__ import annotations

import doctest
import importlib
import json
import math
from types import SimpleNamespace

import pytest
import torch
from cerberus_decode import Adapter, AutoRegressive, CostTable, Decoder, FixedTree, Gated
from cerberus_decode import costs as costs_module
from cerberus_decode.costs import cost_table
from cerberus_decode.policy import best_size, best_threshold
from decoding_models import TREE, random_heads, tiny_llama

CHEAP = CostTable({1: 1.0, 2: 1.01, 64: 1.02})
STEEP = CostTable({1: 1.0, 2: 2.0, 64: 64.0})


def refuse_costs():
    raise AssertionError("the cost table is not needed here")


def test_cost_table_interpolates():
    table = CostTable({1: 1.0, 4: 1.6, 8: 2.0}, draft_s=0.25)
    assert table.forward(1) == 1.0
    assert table.forward(2) == pytest.approx(1.2)
    assert table.forward(6) == pytest.approx(1.8)
    assert table.forward(12) == pytest.approx(2.4)
    assert table.step(0) == 1.0
    assert table.step(3) == pytest.approx(1.85)


def test_best_size():
    gains = [0.5, 0.3, 0.2, 0.1]
    assert best_size(gains, CHEAP) == 4
    assert best_size(gains, STEEP) == 0
    assert best_size([], CHEAP) == 0
    assert best_size(gains, CostTable({1: 1.0, 2: 1.1, 3: 1.2, 4: 2.0, 5: 3.0})) == 2
    assert best_size([0.3], CostTable({1: 1.0, 2: 1.0}, draft_s=0.5)) == 0


def test_best_threshold():
    calibration = {"edges": [0.0, 1.0, 2.0, 3.0], "accepted": {"4": [1.5, 0.5, 0.05], "16": [2.0, 1.0, 0.5]}}
    assert best_threshold(calibration, 4, CHEAP) == math.inf
    assert best_threshold(calibration, 4, CostTable({1: 1.0, 5: 10.0})) == -math.inf
    assert best_threshold(calibration, 4, CostTable({1: 1.0, 5: 1.3})) == 2.0
    assert best_threshold(calibration, 5, CostTable({1: 1.0, 6: 2.2})) == 1.0


def test_fixed_tree_takes_the_first_choices():
    config = SimpleNamespace(tree=TREE, tree_gains=())
    assert FixedTree().resolve(config, refuse_costs).choices == TREE
    assert FixedTree(size=3).resolve(config, refuse_costs).choices == TREE[:3]
    assert FixedTree(size=0).resolve(None, refuse_costs).choices == ()
    own = FixedTree(size=1, choices=((0,), (0, 0)))
    assert own.resolve(config, refuse_costs).choices == ((0,),)


def test_automatic_size_and_threshold():
    config = SimpleNamespace(
        tree=TREE[:4],
        tree_gains=(0.5, 0.3, 0.01, 0.001),
        gate={"edges": [0.0, 1.0, 2.0], "accepted": {"2": [1.5, 0.01]}},
    )
    table = CostTable({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.6})
    assert FixedTree(size="auto").resolve(config, lambda: table).choices == TREE[:2]
    gated = Gated(FixedTree(size="auto")).resolve(config, lambda: table)
    assert gated.choices == TREE[:2]
    assert gated.threshold == 1.0


def test_policy_refusals():
    for size in (-1, 1.5, "many"):
        with pytest.raises(ValueError, match="FixedTree: size must be a number of drafts >= 0"):
            FixedTree(size=size)
    with pytest.raises(ValueError, match=r"choices must list every prefix before its continuations, got \(0, 0\)"):
        FixedTree(choices=((0, 0), (0,)))
    with pytest.raises(ValueError, match="duplicates"):
        FixedTree(choices=((0,), (0,)))
    config = SimpleNamespace(tree=TREE, tree_gains=(), gate={})
    with pytest.raises(ValueError, match="size must be at most 12, the choices of this tree, got 13"):
        FixedTree(size=13).resolve(config, refuse_costs)
    with pytest.raises(ValueError, match="'auto' for a tree without measured gains"):
        FixedTree(size="auto").resolve(config, refuse_costs)
    with pytest.raises(ValueError, match="choices must be given"):
        FixedTree().resolve(None, refuse_costs)
    with pytest.raises(ValueError, match="threshold must be a number or 'auto', got nan"):
        Gated(threshold=math.nan)
    with pytest.raises(ValueError, match="threshold must be a number for kind 'learned', got 'auto'"):
        Gated(kind="learned")
    with pytest.raises(ValueError, match="'auto' for heads without a calibration"):
        Gated().resolve(config, refuse_costs)


def test_gate_kinds():
    hidden = torch.zeros(1, 4)
    entropy = torch.tensor([0.5])
    tree = FixedTree(choices=((0,), (1,)))
    assert Gated(tree, threshold=0.6).num_drafts(hidden, entropy) == 2
    assert Gated(tree, threshold=0.5).num_drafts(hidden, entropy) == 0
    assert Gated(tree, threshold=9.0).num_drafts(hidden, torch.tensor([math.nan])) == 0
    assert Gated(tree, threshold=1.4, kind="hidden_entropy").num_drafts(hidden, entropy) == 2
    assert Gated(tree, threshold=1.3, kind="hidden_entropy").num_drafts(hidden, entropy) == 0
    assert AutoRegressive().num_drafts(hidden, entropy) == 0


def test_costs_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CERBERUS_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "NODE_COUNTS", (1, 2, 4))
    monkeypatch.setattr(costs_module, "ROUNDS", 2)
    adapter = Adapter(tiny_llama())
    lines = []
    table = cost_table(adapter, report=lines.append)
    assert set(table.forward_s) == {1, 2, 4}
    assert all(seconds > 0 for seconds in table.forward_s.values())
    assert table.draft_s == 0
    assert cost_table(adapter, report=lines.append) == table
    assert lines == ["measuring the cost of a step by tree size (once)"]
    (path,) = tmp_path.glob("costs/*")
    path.write_text(path.read_text()[:20])
    cost_table(adapter, report=lines.append)
    assert len(lines) == 2
    assert set(json.loads(path.read_text())) == {"1", "2", "4"}
    decoder = Decoder(adapter, random_heads())
    assert decoder.costs().draft_s > 0
    assert len(list(tmp_path.glob("costs/*"))) == 2


@pytest.mark.parametrize("name", ["cache", "costs", "decode", "layout", "policy"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(
        importlib.import_module(f"cerberus_decode.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.attempted > 0
    assert result.failed == 0
