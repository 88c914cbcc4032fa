"""How every benchmark is timed: the fixture ``compare``, the option ``--quick``, and what the JSON says besides.

Names of cases begin with ``native`` (ours), ``reference``, ``torch`` (plain PyTorch) or ``peer`` (another library);
bench/report.py reads them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pytest
import torch
from torch.utils import _pytree as pytree

from bench import measure
from bench.scaling import Sweep, fitted
from cerberus_kernels.testing import assert_close

KINDS = ("native", "reference", "torch", "peer")
ROUND_SECONDS = 1e-3
CASE_SECONDS = 0.1
SWEEPS = pytest.StashKey[dict[str, Sweep]]()


class Compare(Protocol):
    def __call__(
        self,
        group: str,
        calls: Mapping[str, Callable[[], Any]],
        case: str,
        agree: Callable[[Any, Any], None] = ...,
        *,
        work: measure.Work | None = None,
        sweep: tuple[str, str, int] | None = None,
        expected: Callable[[], Any] | None = None,
    ) -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run each benchmark once, to see that it works")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SWEEPS] = {}
    measure.commit()  # of the code that is about to be imported, whatever is checked out meanwhile


def same(actual: Any, expected: Any) -> None:
    """Equal structure; tensors by the table of tolerances, everything else exactly."""
    actual_leaves, actual_form = pytree.tree_flatten(actual)
    expected_leaves, expected_form = pytree.tree_flatten(expected)
    assert actual_form == expected_form, f"{actual_form} where the reference has {expected_form}"
    for mine, theirs in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert_close(mine, theirs)
        else:
            assert mine == theirs


def copied(result: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def schedule(call: Callable[[], Any], seconds: float) -> tuple[int, int]:
    """Rounds, and iterations of a round, for a call whose first run took ``seconds``.

    A round lasts at least a millisecond and there are at least five, but three where a single call takes half a second.
    """
    if seconds > 0.05:  # unless the first call compiled something, or woke the threads
        seconds = min(seconds, timed(call)[1])
    if seconds > 0.05:
        return 3 if seconds > 0.5 else max(5, int(CASE_SECONDS / seconds)), 1
    times: list[float] = []
    while len(times) < 20 and sum(times) < 0.02:
        times.append(timed(call)[1])
    iterations = math.ceil(ROUND_SECONDS / min(times))
    return max(5, min(100, int(CASE_SECONDS / (iterations * min(times))))), iterations


@pytest.fixture
def compare(benchmark: Any, request: pytest.FixtureRequest) -> Compare:
    """Time ``calls[case]`` in ``group`` (operator, then shape), refusing to if its result is not the reference's.

    ``agree(result, expected)`` raises where two results differ; ``expected()`` replaces ``calls["reference"]`` as what
    is right. Calls are repeated, so one that changes its inputs must lead to the same result every time. With ``work``,
    ``extra_info`` gets ``of_bound``, the median over the time that the work takes at least here. With
    ``sweep=(name, variable, size)`` the case is a point of a curve.
    """
    quick = request.config.getoption("quick") or not benchmark.enabled

    def run(group, calls, case, agree=same, *, work=None, sweep=None, expected=None):
        assert case.startswith(KINDS), f"the name of case {case!r} must begin with one of {KINDS}"
        operator = group.split()[0].rstrip(",")
        call = calls[case]
        truth, seconds = timed(expected or calls["reference"])
        if expected is not None or case != "reference":
            truth = copied(truth)
            result, seconds = timed(call)
            try:
                agree(result, truth)
            except AssertionError as error:
                pytest.fail(f"{operator}: {case} is not timed, its result is not the reference's ({group}): {error}")
            del result
        del truth
        benchmark.group = group
        benchmark.extra_info.update(operator=operator, case=case)
        rounds, iterations = (1, 1) if quick else schedule(call, seconds)
        benchmark.pedantic(call, rounds=rounds, iterations=iterations, warmup_rounds=0)
        if work is not None:
            benchmark.extra_info.update(bytes=work.bytes, flops=work.flops)
        if quick:
            return
        median = benchmark.stats.stats.median
        if work is not None:
            bound = work.bound()
            benchmark.extra_info.update(bound_us=round(bound * 1e6, 2), of_bound=round(median / bound, 2))
        if sweep is not None:
            name, variable, size = sweep
            benchmark.extra_info.update(sweep=name, variable=variable, size=size)
            sweeps = request.config.stash[SWEEPS]
            sweeps.setdefault(f"{name} {case}", Sweep(variable)).add(size, median)

    return run


@pytest.fixture(scope="module", autouse=True)
def _free_inputs(request: pytest.FixtureRequest):
    """Inputs that a module keeps between its cases go when it is done."""
    yield
    for thing in vars(request.module).values():
        if hasattr(thing, "cache_clear"):
            thing.cache_clear()


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["cerberus"] = measure.machine()
    if not config.getoption("quick"):
        machine_info["cerberus"].update(bandwidth=measure.bandwidth(), matrix_rate=measure.matrix_rate())


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    sweeps = config.stash[SWEEPS]
    for entry in output_json["benchmarks"]:
        sweep = sweeps.get(f"{entry['extra_info'].get('sweep')} {entry['extra_info'].get('case')}")
        if sweep is not None:
            entry["extra_info"].update(curve=sweep.points, exponent=fitted(sweep.points))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    sweeps = config.stash[SWEEPS]
    if sweeps:
        terminalreporter.section("cost against size")
    for name, sweep in sweeps.items():
        curve = ", ".join(f"{size}: {seconds * 1e6:.1f}" for size, seconds in sweep.points)
        terminalreporter.line(f"{name}: {sweep.variable}^{fitted(sweep.points)}; us at {sweep.variable} = {curve}")
