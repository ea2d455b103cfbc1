"""A histogram that is told of every token: counting one more is a search and two sums.

The library's own looks at each bound in turn and takes a lock for each of two sums, which for every
token of every stream was most of what metrics cost. Told and read on the event loop alone.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class QuickHistogram(Collector):
    """
    Args:
        bounds: upper ones, rising; the last is infinite.
    """

    def __init__(
        self, name: str, about: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._about = about
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], QuickSeries] = {}

    def labels(self, *values: str) -> "QuickSeries":
        """That of these values."""
        return self._series.setdefault(values, QuickSeries(self._bounds))

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._about, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.buckets(), series.sum)
        yield family


class QuickSeries:
    """What was told under the same labels."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * len(bounds)

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were not above it)."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            found.append((floatToGoString(bound), total))
        return found
