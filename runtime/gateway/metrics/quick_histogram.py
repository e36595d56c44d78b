"""A histogram of what is observed thousands of times a second, by one thread. prometheus-client's own takes two locks
for each value and goes through the buckets one by one.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class QuickHistogram(Collector):
    """Registers itself. `buckets`: upper bounds, ascending; one without a bound follows them."""

    def __init__(self, name: str, words: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._words, self._bounds = name, words, list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """As every metric of prometheus-client."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._words)
        family.add_metric([], buckets, self._sum)
        return [family]
