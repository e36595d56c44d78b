"""Base class of the gateway's observers, and an observer that forwards to several."""

from collections.abc import Sequence

from ...protocol.messages import Chunk
from ..interfaces import AdmittedRequest, Engines, HistoryReport, HttpExchange, Observer, UsageRecord


class BaseObserver:
    """An `Observer` without metrics whose methods do nothing. Subclasses override the events that they need."""

    def on_admitted(self, request: AdmittedRequest) -> None:
        """See `Observer`."""

    def on_first_token(self, request: AdmittedRequest, seconds: float) -> None:
        """See `Observer`."""

    def on_chunks(self, request: AdmittedRequest, prompt_index: int, chunks: list[Chunk], seconds: float) -> None:
        """See `Observer`."""

    def on_finished(self, request: AdmittedRequest, record: UsageRecord) -> None:
        """See `Observer`."""

    def on_http_exchange(self, exchange: HttpExchange) -> None:
        """See `Observer`."""


class CompositeObserver:
    """Forwards each event to `metrics`, which also renders /metrics, and then to `others`.

    Chunks arrive thousands of times per second, so they are forwarded only to classes that override `on_chunks`.
    """

    def __init__(self, metrics: Observer, others: Sequence[BaseObserver] = ()) -> None:
        self._metrics = metrics
        self._all: tuple[Observer | BaseObserver, ...] = (metrics, *others)
        self._chunk_observers = tuple(
            each for each in self._all if getattr(type(each), "on_chunks", None) is not BaseObserver.on_chunks
        )

    def on_admitted(self, request: AdmittedRequest) -> None:
        for observer in self._all:
            observer.on_admitted(request)

    def on_first_token(self, request: AdmittedRequest, seconds: float) -> None:
        for observer in self._all:
            observer.on_first_token(request, seconds)

    def on_chunks(self, request: AdmittedRequest, prompt_index: int, chunks: list[Chunk], seconds: float) -> None:
        for observer in self._chunk_observers:
            observer.on_chunks(request, prompt_index, chunks, seconds)

    def on_finished(self, request: AdmittedRequest, record: UsageRecord) -> None:
        for observer in self._all:
            observer.on_finished(request, record)

    def on_http_exchange(self, exchange: HttpExchange) -> None:
        for observer in self._all:
            observer.on_http_exchange(exchange)

    async def metrics(self, engines: Engines) -> tuple[str, bytes]:
        return await self._metrics.metrics(engines)

    async def add_sample(self, engines: Engines) -> None:
        await self._metrics.add_sample(engines)

    def history(self, after: float) -> HistoryReport:
        return self._metrics.history(after)
