"""FastHistogram equals the histogram of prometheus-client."""

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from sidestream.runtime.gateway.metrics.metrics import FastHistogram

BOUNDS = (0.005, 0.01, 1, 2.5)


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_it_says_what_prometheus_clients_says() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = FastHistogram("x_seconds", "Words.", BOUNDS, ours)
    slow = Histogram("x_seconds", "Words.", buckets=BOUNDS, registry=theirs)
    assert lines(ours) == lines(theirs), "before the first value too"
    for value in (0.0, 0.005, 0.0051, 0.7, 1, 2.5, 2.6, 1e9):
        quick.observe(value)
        slow.observe(value)
    assert lines(ours) == lines(theirs)
