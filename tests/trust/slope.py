"""A straight line through figures over time, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass

SURE = 1.96
"""Standard errors that hold 95 % of what may be true."""


@dataclass(frozen=True)
class Slope:
    """Per hour; `error` is one half of the 95 % interval."""

    per_hour: float
    error: float


def slope(at_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares; at least three points at different times."""
    count = len(at_s)
    assert count == len(values) and count >= 3, f"{count} points are no line"
    middle, mean = sum(at_s) / count, sum(values) / count
    spread = sum((t - middle) ** 2 for t in at_s)
    rise = sum((t - middle) * (v - mean) for t, v in zip(at_s, values, strict=True)) / spread
    left = sum((v - mean - rise * (t - middle)) ** 2 for t, v in zip(at_s, values, strict=True))
    return Slope(rise * 3600, SURE * (left / (count - 2) / spread) ** 0.5 * 3600)
