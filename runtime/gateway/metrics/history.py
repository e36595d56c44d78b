"""The last day of a gateway's metrics, one sample a minute, and its last failed requests. Its memory is bounded."""

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable

from prometheus_client.core import Metric

from ..interfaces import FailedRequest, HistoryReport, HttpExchange, UsageRecord

INTERVAL_SECONDS = 60.0
MAX_SAMPLES = 24 * 60 + 1
MAX_FAILED = 100
_SERIES = {
    "tokens": "sidestream_engine_tokens_total",
    "running": "sidestream_engine_requests_running",
    "waiting": "sidestream_engine_requests_waiting",
    "pages": "sidestream_engine_pages",
    "pages_in_use": "sidestream_engine_pages_in_use",
    "prefix_queries": "sidestream_engine_prefix_queries_total",
    "prefix_hits": "sidestream_engine_prefix_hits_total",
    "draft_tokens": "sidestream_engine_draft_tokens_total",
    "accepted_tokens": "sidestream_engine_accepted_tokens_total",
    "requests": "sidestream_requests_total",
    "refused": "sidestream_owner_refused_total",
    "first_token_seconds": "sidestream_first_token_seconds_sum",
    "first_tokens": "sidestream_first_token_seconds_count",
    "queue_seconds": "sidestream_request_queue_seconds_sum",
    "queued": "sidestream_request_queue_seconds_count",
}
"""Name in the history -> name in /metrics. A value is the sum over all labels."""
FAILED = "failed"
"""Name in the history of the requests with a status of 500 or more."""
_PLACES = {name: place for place, name in enumerate(_SERIES.values())}


class History:
    """See the module. Counters are kept as they are; readers compute rates."""

    def __init__(self) -> None:
        self._samples: deque[array[float]] = deque(maxlen=MAX_SAMPLES)
        self._failed: OrderedDict[str, FailedRequest] = OrderedDict()

    def add_sample(self, families: Iterable[Metric]) -> None:
        """Add a sample of all metrics."""
        values = array("d", [0.0] * (len(_SERIES) + 2))
        for family in families:
            for sample in family.samples:
                place = _PLACES.get(sample.name)
                if place is not None:
                    values[place] += sample.value
                    if sample.labels.get("status", "") >= "500":
                        values[-2] += sample.value
        values[-1] = time.time()
        self._samples.append(values)

    def add_failed(self, record: UsageRecord) -> None:
        """Add an admitted request that failed."""
        model = record.adapter or record.model
        self._add(
            FailedRequest(
                record.time, record.request_id, record.status, record.error, record.endpoint, record.owner, model
            )
        )

    def add_refused(self, exchange: HttpExchange) -> None:
        """Add a refused POST request of a known client, unless it was added as a failed one."""
        if exchange.method == "POST" and exchange.owner and exchange.request_id not in self._failed:
            self._add(
                FailedRequest(
                    exchange.time,
                    exchange.request_id,
                    exchange.status,
                    "",
                    exchange.route,
                    exchange.owner,
                    exchange.model,
                )
            )

    def _add(self, request: FailedRequest) -> None:
        self._failed[request.request_id] = request
        if len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)

    def report(self, after: float) -> HistoryReport:
        """Return the samples taken after a time (seconds since the epoch), and the failed requests, latest first."""
        samples = [list(values) for values in self._samples if values[-1] > after]
        names = [*_SERIES, FAILED, "time"]
        return HistoryReport(INTERVAL_SECONDS, names, samples, list(reversed(self._failed.values())))
