"""Limits the bytes of request bodies that an owner occupies before its requests are admitted."""

from collections import Counter

from ..interfaces import GatewayError

BODY = "sidestream.body"
"""Key of the request's `HeldBody` in its scope."""


class BodyMemory:
    """Bytes of bodies by owner. `limit`: the most of one owner."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: Counter[str] = Counter()


class HeldBody:
    """The bytes of one request. They count until `release`."""

    def __init__(self, memory: BodyMemory, owner: str) -> None:
        self._memory, self._owner = memory, owner
        self._bytes = 0

    def hold(self, count: int) -> None:
        """Count `count` bytes in all for this request. Raises GatewayError 429 above the owner's limit."""
        memory, more = self._memory, max(0, count - self._bytes)
        if memory.held[self._owner] + more > memory.limit:
            raise GatewayError(
                429,
                f"the bodies of your unfinished requests have more than {memory.limit} bytes; wait for answers, or "
                "send less at a time",
                "rate_limit_error",
                "too_many_body_bytes",
                retry_after=1.0,
            )
        self._bytes += more
        memory.held[self._owner] += more

    def release(self) -> None:
        """Stop counting. May be called again."""
        held = self._memory.held
        held[self._owner] -= self._bytes
        self._bytes = 0
        if not held[self._owner]:
            del held[self._owner]
