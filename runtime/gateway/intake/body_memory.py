"""Limits the bytes of request bodies that an owner occupies before its requests are admitted."""

from ..interfaces import GatewayError

BODY = "sidestream.body"
"""Key of the request's `HeldBody` in its scope."""


class BodyMemory:
    """Bytes of bodies by owner. `limit`: the most of one owner."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[str, int] = {}


class HeldBody:
    """The bytes of one request. They count until `release`."""

    def __init__(self, memory: BodyMemory, owner: str) -> None:
        self._memory, self._owner = memory, owner
        self._bytes = 0

    def hold(self, count: int) -> None:
        """Count `count` bytes in all for this request. Raises GatewayError 429 above the owner's limit."""
        if count <= self._bytes:
            return
        memory, owner = self._memory, self._owner
        owned = memory.held.get(owner, 0) + count - self._bytes
        if owned > memory.limit:
            raise GatewayError(
                429,
                f"the bodies of your unfinished requests have more than {memory.limit} bytes; wait for answers, or "
                "send less at a time",
                "rate_limit_error",
                "too_many_body_bytes",
                retry_after=1.0,
            )
        memory.held[owner], self._bytes = owned, count

    def release(self) -> None:
        """Stop counting. May be called again."""
        if self._bytes:
            left = self._memory.held.pop(self._owner) - self._bytes
            if left:
                self._memory.held[self._owner] = left
            self._bytes = 0
