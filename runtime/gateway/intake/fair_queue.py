"""Turns by owner: an owner with many requests delays its own, not those of others."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class FairQueue:
    """Grants turns to owners in rotation. Belongs to one asyncio loop.

    slots      turns at a time
    per_owner  turns of one owner at a time
    """

    def __init__(self, slots: int, per_owner: int) -> None:
        self._free, self._per_owner = slots, per_owner
        self._active: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # in the order of their turns

    def try_start(self, owner: str) -> bool:
        """Start a turn without waiting. Returns False if none is free; `end` must follow otherwise."""
        if not self._free or self._active[owner] >= self._per_owner:
            return False
        self._free -= 1
        self._active[owner] += 1
        return True

    async def start(self, owner: str) -> None:
        """Wait for a turn. `end` must follow, unless this is cancelled."""
        if self.try_start(owner):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # granted in the iteration in which it was cancelled
                self.end(owner)
            raise

    def end(self, owner: str) -> None:
        """End a turn, and grant the next one."""
        self._free += 1
        self._active[owner] -= 1
        if not self._active[owner]:
            del self._active[owner]
        for waiting, futures in list(self._waiting.items()):
            while futures and futures[0].cancelled():
                futures.popleft()
            granted = bool(futures) and self.try_start(waiting)
            if granted:
                futures.popleft().set_result(None)
                self._waiting.move_to_end(waiting)
            if not futures:
                del self._waiting[waiting]
            if granted:
                return

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None, None]:
        """Wait for a turn, which ends with the block."""
        await self.start(owner)
        try:
            yield
        finally:
            self.end(owner)
