"""The exponent of a cost against a size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Sweep:
    """Seconds at the sizes of one variable, ascending."""

    variable: str
    points: list[tuple[int, float]] = field(default_factory=list)

    def add(self, size: int, seconds: float) -> None:
        self.points.append((size, seconds))
        self.points.sort()


def fitted(points: list[tuple[int, float]]) -> float | None:
    """Exponent e of seconds = c * size^e by least squares over the logarithms; None for fewer than two sizes."""
    if len({size for size, _ in points}) < 2:
        return None
    xs, ys = [math.log(size) for size, _ in points], [math.log(seconds) for _, seconds in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return round(slope / sum((x - mean_x) ** 2 for x in xs), 2)
