"""The performance page from a small made-up run, and what the fixture of the benchmarks refuses to time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark", reason="the benchmarks need pytest-benchmark (the extra bench)")

from bench import report
from bench.scaling import fitted

MACHINE = {
    "cpu": "A | processor", "cores": 2, "threads": 2, "isa": "avx2", "python": "3.11", "versions": {"torch": "2.13"},
    "commit": "abc", "bandwidth": 2e10, "matrix_rate": 1e11,
}  # fmt: skip


def entry(group, case, median, **info):
    stats = {"median": median, "iqr": median / 10, "rounds": 5, "iterations": 1}
    operator = group.split()[0].rstrip(",")
    return {"group": group, "stats": stats, "extra_info": {"operator": operator, "case": case, **info}}


@pytest.fixture
def results():
    shape = "tree_attention N=8 S=1024 heads=9/3x64 bfloat16"
    larger = "tree_attention N=32 S=1024 heads=9/3x64 bfloat16"
    curve = {"sweep": "head_topk, R = 4", "variable": "V", "curve": [[8, 1e-5], [16, 2e-5]], "exponent": 1.0}
    return {
        "machine_info": {"cerberus": dict(MACHINE)},
        "datetime": "2026-01-02T03:04:05",
        "benchmarks": [
            entry(shape, "native", 20e-6, bytes=4000, flops=8000, of_bound=1.25),
            entry(shape, "native_paged", 25e-6, bytes=4000, flops=8000, of_bound=1.5),
            entry(shape, "reference", 2e-3, bytes=4000, flops=8000),
            entry(shape, "torch_sdpa", 50e-6),
            entry(shape, "torch_flex", 90e-6),
            entry(shape, "peer_other_library", 40e-6),
            entry(larger, "native", 60e-6),
            entry("verify_tree overhead", "native", 6e-6, of_bound=1.2),
            entry("threads head_topk", "torch_matmul", 3e-3),
            entry("threads head_topk", "native", 1e-3),
            entry("threads head_topk", "native_in_turns", 5e-3),
            entry("head_topk, R = 4, over V", "native", 1e-5, size=8, **curve),
            entry("head_topk, R = 4, over V", "native", 2e-5, size=16, **curve),
            {"group": "other", "stats": {"median": 1.0, "iqr": 0.0}, "extra_info": {}},
        ],
    }


def test_rows_compare_with_the_fastest_of_each_kind(results):
    text = report.page(results, {})
    assert (
        "| N=8 S=1024 heads=9/3x64 bfloat16 | 20.0 us | 10% | 100 | 2.50 (sdpa) | 2.00 (other library) | 1.25 |" in text
    )
    assert "bfloat16, paged | 25.0 us | 10% | 80 | 2.00 (sdpa) | 1.60 (other library) | 1.50 |" in text
    assert "| N=32 S=1024 heads=9/3x64 bfloat16 | 60.0 us | 10% | – | – | – | – |" in text


def test_overhead_threads_and_curves_have_their_own_tables(results):
    text = report.page(results, {})
    assert "| verify_tree | 6.0 us |" in text.partition("## Overhead of a call")[2]
    assert "| head_topk | 4.0 ms | 5.0 ms | 1.25 |" in text
    assert text.count("| head_topk, R = 4 | V | 1.00 | 8: 10.0 us, 16: 20.0 us |") == 1
    assert "## head_topk" not in text
    assert "## verify_tree" not in text


def test_the_page_names_machine_versions_commit_and_roofs(results):
    text = report.page(results, {"A curve": "performance/curve.svg"})
    for part in ("avx2", "torch 2.13", "Commit abc, 2026-01-02", "20.0 GB/s", "100 Gflop/s", "![A curve](performance/"):
        assert part in text


def test_a_quick_run_makes_a_page_too(results):
    for name in ("bandwidth", "matrix_rate"):
        del results["machine_info"]["cerberus"][name]
    assert "Measured at best" not in report.page(results, {})


def test_main_writes_the_page_and_small_pictures(results, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib (the extra bench)")
    (tmp_path / "run.json").write_text(json.dumps(results))
    out = tmp_path / "performance.md"
    report.main([str(tmp_path / "run.json"), "--out", str(out)])
    first = out.read_text()
    for name in ("roofline.svg", "nodes.svg"):
        picture = tmp_path / "performance" / name
        assert f"(performance/{name})" in first
        assert picture.stat().st_size < 100_000
        assert "font-face" not in picture.read_text()


def test_exponent_of_a_power_law_and_of_one_point():
    assert fitted([(n, 3e-6 * n**1.5) for n in (2, 8, 64)]) == 1.5
    assert fitted([(8, 1.0), (8, 2.0)]) is None
    assert math.isclose(fitted([(1, 1.0), (4, 1.0)]), 0.0)


REFUSED = """
import torch

def test_wrong(compare):
    calls = {"native": lambda: torch.tensor([1.0, 2.0]), "reference": lambda: torch.tensor([1.0, 2.5])}
    compare("some_operator N=2", calls, "native")

def test_right(compare):
    calls = {"native": lambda: torch.tensor([1.0, 2.0]), "reference": lambda: torch.tensor([1.0, 2.0])}
    compare("some_operator N=2", calls, "native")
"""


def test_a_case_that_disagrees_with_the_reference_is_not_timed(tmp_path):
    (tmp_path / "bench_wrong.py").write_text(REFUSED)
    arguments = ["-p", "bench.conftest", "--quick", "--benchmark-only", "--benchmark-json", str(tmp_path / "run.json")]
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-o", "python_files=bench_*.py"]
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        [*command, *arguments, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False, timeout=120
    )
    assert "some_operator: native is not timed, its result is not the reference's" in run.stdout
    assert "1 failed, 1 passed" in run.stdout
    timed = json.loads((tmp_path / "run.json").read_text())["benchmarks"]
    assert [entry["stats"]["rounds"] for entry in timed if entry["extra_info"]] == [1]
