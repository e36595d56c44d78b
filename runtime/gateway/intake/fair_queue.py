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
            if future.done() and not future.cancelled():  # granted in the iteration in which it was cancelled
                self.end(owner)
            elif owner in self._waiting:
                self._waiting[owner].remove(future)
                if not self._waiting[owner]:
                    del self._waiting[owner]
            raise

    def end(self, owner: str) -> None:
        """End a turn, and grant the next one."""
        self._free += 1
        self._active[owner] -= 1
        if not self._active[owner]:
            del self._active[owner]
        for waiting in list(self._waiting):
            if self.try_start(waiting):
                futures = self._waiting.pop(waiting)
                futures.popleft().set_result(None)
                if futures:
                    self._waiting[waiting] = futures  # now the last
                return

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None, None]:
        """Wait for a turn, which ends with the block."""
        await self.start(owner)
        try:
            yield
        finally:
            self.end(owner)
