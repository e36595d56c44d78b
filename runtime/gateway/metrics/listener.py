"""What hears of requests. Each part of an observer overrides what it needs."""

from ...protocol.messages import Chunk
from ..contracts import Exchange, HttpAnswer, UsageRecord


class Listener:
    """An `Observer` without metrics, which does nothing."""

    def begun(self, exchange: Exchange) -> None:
        """See `Observer`."""

    def first_token(self, exchange: Exchange, seconds: float) -> None:
        """See `Observer`."""

    def arrived(self, exchange: Exchange, place: int, chunks: list[Chunk], seconds: float) -> None:
        """See `Observer`."""

    def finished(self, exchange: Exchange, record: UsageRecord) -> None:
        """See `Observer`."""

    def answered(self, answer: HttpAnswer) -> None:
        """See `Observer`."""
