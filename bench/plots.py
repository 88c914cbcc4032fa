"""The pictures of the performance page, as small SVG files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

from bench.report import Case

matplotlib.use("svg")
# Text stays text, and the same numbers give the same file.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cerberus", "font.size": 9})

from matplotlib import pyplot  # noqa: E402  the backend is chosen first

# Groups of tree_attention with the heads of SmolLM2-135M, in bf16.
ATTENTION = re.compile(r"tree_attention N=(\d+) S=(\d+) heads=9/3x64 bfloat16")


def draw(cases: list[Case], machine: dict[str, Any], folder: Path) -> dict[str, str]:
    """Draw what the cases allow into ``folder``; caption -> name of the file."""
    drawn = {}
    if "bandwidth" in machine and any(case.info.get("flops") for case in cases):
        drawn["Roofline: flops per second against flops per byte"] = roofline(cases, machine, folder / "roofline.svg")
    for variable, fixed, value in (("N", "S", 1024), ("S", "N", 32)):
        curves = attention_curves(cases, variable, value)
        if curves:
            name = {"N": "nodes.svg", "S": "prefix.svg"}[variable]
            title = f"tree_attention, {fixed} = {value}, 9/3 heads of 64, bf16"
            drawn[f"Cost of {title} against {variable}"] = cost(curves, variable, title, folder / name)
    return drawn


def save(figure: Any, path: Path) -> str:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    return path.name


def roofline(cases: Iterable[Case], machine: dict[str, Any], path: Path) -> str:
    figure, axes = pyplot.subplots(figsize=(6.5, 4))
    points: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        # Points of a curve may come from a cache, which this roof does not know.
        if case.kind == "native" and case.info.get("flops") and case.info.get("bytes") and "sweep" not in case.info:
            point = (case.info["flops"] / case.info["bytes"], case.info["flops"] / case.median)
            points.setdefault(case.operator, []).append(point)
    for marker, (operator, values) in zip("osD^v<>pP*" * 2, sorted(points.items()), strict=False):
        axes.scatter(*zip(*values, strict=True), s=14, marker=marker, label=operator)
    everything = [intensity for values in points.values() for intensity, _ in values]
    ridge = machine["matrix_rate"] / machine["bandwidth"]
    low, high = min([*everything, ridge]) / 2, max([*everything, ridge]) * 2
    axes.plot(
        [low, ridge, high], [low * machine["bandwidth"], machine["matrix_rate"], machine["matrix_rate"]], color="black",
        linewidth=1, label="measured roofs",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="flops per byte", ylabel="flops per second")
    axes.legend(fontsize=7)
    return save(figure, path)


def attention_curves(cases: Iterable[Case], variable: str, fixed: int) -> dict[str, list[tuple[int, float]]]:
    """Name of a case -> its seconds by N at one S, or by S at one N; curves of at least two points."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for case in cases:
        found = ATTENTION.fullmatch(case.group)
        if found:
            nodes, prefix = int(found[1]), int(found[2])
            size, other = (nodes, prefix) if variable == "N" else (prefix, nodes)
            if other == fixed:
                curves.setdefault(case.name, []).append((size, case.median))
    return {name: sorted(points) for name, points in curves.items() if len(points) > 1}


def cost(curves: dict[str, list[tuple[int, float]]], variable: str, title: str, path: Path) -> str:
    figure, axes = pyplot.subplots(figsize=(6.5, 4))
    for name, points in curves.items():
        axes.plot(
            [size for size, _ in points], [seconds * 1e6 for _, seconds in points], marker="o", markersize=4,
            label=name.replace("_", " "),
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel=variable, ylabel="us", title=title)
    sizes = sorted({size for points in curves.values() for size, _ in points})
    axes.set_xticks(sizes, labels=[str(size) for size in sizes])
    axes.minorticks_off()
    axes.legend(fontsize=7)
    return save(figure, path)
