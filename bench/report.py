"""Turns a benchmark run's JSON into a page: ``python -m bench.report results.json [--out docs/performance.md]``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NONE = "–"


@dataclass(frozen=True)
class Case:
    """One timed case: seconds, and what ``bench/conftest.py`` wrote beside them."""

    group: str
    operator: str
    name: str
    median: float
    spread: float  # between the quartiles, over the median
    info: dict[str, Any] = field(hash=False)

    @property
    def kind(self) -> str:
        return self.name.partition("_")[0]

    @property
    def shape(self) -> str:
        return self.group.partition(" ")[2]


def cases_of(results: dict[str, Any]) -> list[Case]:
    """The cases of pytest-benchmark's JSON that went through the fixture ``compare``."""
    found = []
    for entry in results["benchmarks"]:
        info, stats = entry["extra_info"], entry["stats"]
        if "case" in info:
            spread = stats["iqr"] / stats["median"] if stats["median"] else 0.0
            found.append(Case(entry["group"], info["operator"], info["case"], stats["median"], spread, info))
    return found


def duration(seconds: float) -> str:
    """Three significant digits or a little more, in the unit that suits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.{1 if seconds * factor < 100 else 0}f} {unit}"
    return f"{seconds:.2f} s"


def times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def ratio(others: list[Case], ours: Case, named: bool) -> str:
    """How many times as long the best of the others takes; named where there may be several."""
    if not others:
        return NONE
    best = min(others, key=lambda case: case.median)
    name = best.name.partition("_")[2].replace("_", " ")
    return times(best.median / ours.median) + (f" ({name})" if named and name else "")


def grouped(cases: Iterable[Case]) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return groups


def operator_rows(cases: list[Case]) -> list[list[str]]:
    rows = []
    for members in grouped(cases).values():
        by_kind = {kind: [c for c in members if c.kind == kind] for kind in ("native", "reference", "torch", "peer")}
        for ours in by_kind["native"]:
            variant = ours.name.partition("_")[2].replace("_", " ")
            label = ours.operator if ours.shape == "overhead" else ours.shape
            bound = ours.info.get("of_bound")
            rows.append(
                [
                    label + (f", {variant}" if variant else ""),
                    duration(ours.median),
                    f"{ours.spread:.0%}",
                    ratio(by_kind["reference"], ours, False),
                    ratio(by_kind["torch"], ours, True),
                    ratio(by_kind["peer"], ours, True),
                    NONE if bound is None else times(bound),
                ]
            )
    return rows


def thread_rows(cases: list[Case]) -> list[list[str]]:
    rows = []
    for members in grouped(cases).values():
        median = {case.name: case.median for case in members}
        if {"torch_matmul", "native", "native_in_turns"} <= set(median):
            apart = median["torch_matmul"] + median["native"]
            rows.append(
                [members[0].shape, duration(apart), duration(median["native_in_turns"]),
                 times(median["native_in_turns"] / apart)]
            )  # fmt: skip
    return rows


def sweep_rows(cases: list[Case]) -> list[list[str]]:
    rows = {}
    for case in cases:
        info = case.info
        if info.get("exponent") is not None:
            curve = ", ".join(f"{size}: {duration(seconds)}" for size, seconds in info["curve"])
            rows[info["sweep"], case.name] = [info["sweep"], info["variable"], f"{info['exponent']:.2f}", curve]
    return list(rows.values())


def machine_lines(machine: dict[str, Any], moment: str) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    lines = [
        f"- Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('threads')} threads in use, "
        f"instruction-set level {machine.get('isa')}",
        f"- Versions: Python {machine.get('python')}, {versions}",
        f"- Commit {machine.get('commit')}, {moment[:10]}",
    ]
    if "bandwidth" in machine:
        lines.append(
            f"- Measured at best: {machine['bandwidth'] / 1e9:.1f} GB/s read from memory, "
            f"{machine['matrix_rate'] / 1e9:.0f} Gflop/s in torch's matrix product"
        )
    return lines


HEAD = """# Performance

Made by `python -m bench.report` from one run of `make bench`; do not edit by hand.
""".splitlines()
LEGEND = """
Every case's result was compared with the reference before it was timed. Times are medians; *spread* is the distance
between the quartiles over the median. *Reference*, *torch* and *peers* say how many times as long they take as the
native operator on the same inputs (the fastest of them, named): above 1 the operator is faster. *Of bound* is the time
over what reading the bytes from memory, or the multiplications, take here at least, and 5 us for the call; below 1 the
inputs came from a cache.
""".splitlines()
COLUMNS = ("shape", "native", "spread", "reference", "torch", "peers", "of bound")


def page(results: dict[str, Any], plots: dict[str, str]) -> str:
    """The page; ``plots`` maps captions to the pictures' paths from the page."""
    cases = cases_of(results)
    lines = [*HEAD, "", *machine_lines(results["machine_info"].get("cerberus", {}), results.get("datetime", ""))]
    lines += [*LEGEND, ""]
    points = [case for case in cases if "sweep" in case.info]
    apart = [case for case in cases if case.operator == "threads"]
    overhead = [case for case in cases if case.shape == "overhead"]
    for operator in sorted({case.operator for case in cases} - {"threads"}):
        own = [c for c in cases if c.operator == operator and "sweep" not in c.info and c.shape != "overhead"]
        if own:
            lines += [f"## {operator}", "", *table(COLUMNS, operator_rows(own)), ""]
    if overhead:
        rows = operator_rows(overhead)
        lines += ["## Overhead of a call", "", "The smallest inputs; the bound is the 5 us alone.", ""]
        lines += [*table(("operator", *COLUMNS[1:]), rows), ""]
    if apart:
        lines += ["## Threads", "", "A matrix product of torch and an operator, apart and in turns.", ""]
        lines += [*table(("operator", "apart", "in turns", "in turns / apart"), thread_rows(apart)), ""]
    if points:
        lines += ["## Cost against size", "", "The exponent is fitted by least squares to the logarithms.", ""]
        lines += [*table(("operator", "size", "exponent", "native"), sweep_rows(points)), ""]
    for caption, path in plots.items():
        lines += [f"![{caption}]({path})", ""]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON of pytest --benchmark-json")
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"), help="page to write (%(default)s)")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    plots: dict[str, str] = {}
    try:
        from bench.plots import draw
    except ImportError as error:
        print(f"no plots: {error}")
    else:
        folder = options.out.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        drawn = draw(cases_of(results), results["machine_info"].get("cerberus", {}), folder)
        plots = {caption: f"{folder.name}/{name}" for caption, name in drawn.items()}
    options.out.write_text(page(results, plots))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
