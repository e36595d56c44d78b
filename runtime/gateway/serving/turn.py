"""When the middles of answers are written: at the end of a turn of the loop, one connection after the other.

All that has arrived is dealt with first. A write wakes the client that it goes to, and on a busy machine the client
takes the core; what an answer got from several steps, while the others were written, leaves in one write.
"""

import asyncio
from typing import Protocol


class Flushed(Protocol):
    """What is written at the end of a turn."""

    def flush(self) -> None:
        """Write."""


class Turn:
    """Belongs to one loop."""

    def __init__(self) -> None:
        self._waiting: list[Flushed] = []

    def add(self, connection: Flushed) -> None:
        """Flush it after what is ready now."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(connection)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.flush()
