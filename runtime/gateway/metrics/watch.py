"""Several observers as one."""

from collections.abc import Sequence

from ...protocol.messages import Chunk
from ..contracts import Engines, Exchange, HttpAnswer, UsageRecord
from .listener import Listener
from .metrics import Metrics


class Watch:
    """An `Observer` that tells `metrics`, which answers /metrics, and then each of `others` what it is told itself.

    Chunks come thousands of times a second: only those are told of them that override `arrived`.
    """

    def __init__(self, metrics: Metrics, others: Sequence[Listener] = ()) -> None:
        self._metrics = metrics
        self._all: tuple[Listener, ...] = (metrics, *others)
        self._arrivals = tuple(one for one in self._all if type(one).arrived is not Listener.arrived)

    def begun(self, exchange: Exchange) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.begun(exchange)

    def first_token(self, exchange: Exchange, seconds: float) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.first_token(exchange, seconds)

    def arrived(self, exchange: Exchange, place: int, chunks: list[Chunk], seconds: float) -> None:
        """See `Observer`."""
        for observer in self._arrivals:
            observer.arrived(exchange, place, chunks, seconds)

    def finished(self, exchange: Exchange, record: UsageRecord) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.finished(exchange, record)

    def answered(self, answer: HttpAnswer) -> None:
        """See `Observer`."""
        for observer in self._all:
            observer.answered(answer)

    async def metrics(self, engines: Engines) -> tuple[str, bytes]:
        """See `Observer`."""
        return await self._metrics.metrics(engines)
