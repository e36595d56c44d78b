"""The engine for a request now, or as soon as there is one; and when waiting is in vain."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ...api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from ..contracts import EngineRequest
from .catalogue import Catalogue
from .engine_link import EngineLink
from .load_balancer import Book, Choice
from .moved_stream import MovedStream

PATIENCE_SECONDS = 60.0
"""An engine that was lost for so long is not waited for."""
MAX_PATIENT = 4096
BUSY_SECONDS = 0.1
BUSY = frozenset({"overloaded", "too_many_requests"})
UNFIT = frozenset({"unknown_adapter", "adapter_changed"})
"""An engine that answers so does not have the adapter, or has another version of it."""
Refusals = dict[str, ServerError | RequestError]
"""Engines that have just refused a request, and how."""

T = TypeVar("T")


class Dispatch:
    """Asks the book, and waits while no engine can take a request but one is expected (back).

    `summon`: asks for an engine where there is none, again and again while a request waits for it; None: nobody would
    bring one.
    """

    def __init__(
        self,
        book: Book,
        links: Mapping[str, EngineLink],
        catalogue: Catalogue,
        patience: float,
        summon: Callable[[], None] | None = None,
    ) -> None:
        self._book, self._links, self._catalogue = book, links, catalogue
        self._patience, self._summon = patience, summon
        self._patient = 0
        self._news = asyncio.Event()

    async def choose(
        self,
        request: EngineRequest,
        keys: Sequence[bytes],
        moved: MovedStream,
        refused: Refusals,
    ) -> Choice:
        """The engine that the request goes to; waits while there is none but one may come back."""
        if request.adapter is not None and self._catalogue.gone(request.adapter):
            raise ServerError(f"adapter {request.adapter!r} is not known", "unknown_adapter")
        choice = self._book.choose(request.adapter, keys, time.monotonic(), refused)
        if choice is not None:
            return choice
        until = time.monotonic() + self._patience
        for name in refused.keys() - self._links.keys():
            del refused[name]
        self._give_up(request, refused, moved, until)
        with self._waiting():
            while choice is None:
                await self.news(moved.seconds_left())
                if any(problem.code in BUSY for problem in refused.values()):
                    await asyncio.sleep(BUSY_SECONDS)  # many things are news to a busy router
                for name in [name for name in refused if self._may_ask_again(name, refused[name], moved)]:
                    del refused[name]
                choice = self._book.choose(request.adapter, keys, time.monotonic(), refused)
                if choice is None:
                    self._give_up(request, refused, moved, until)
        return choice

    async def first(self, known: Callable[[], T | None]) -> T | None:
        """What an engine is to tell, once one has: after a second None, or where engines are summoned after the
        patience.
        """
        until = time.monotonic() + (self._patience if self._summon is not None else 0.0)
        with self._waiting():
            while (found := known()) is None:
                if not self._links and self._summon is not None:
                    self._summon()
                await self.news(None)
                if time.monotonic() >= until:
                    return known()
        return found

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """A request waits. Raises OverloadedError when too many do."""
        if self._patient >= MAX_PATIENT:
            raise OverloadedError("too many requests wait for an engine", "overloaded", 1.0)
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1

    def _give_up(self, request: EngineRequest, refused: Refusals, moved: MovedStream, until: float) -> None:
        """Raises what the request fails with, if no engine is expected to take it soon. One that had an engine waits
        until others are less busy.
        """
        busy = [problem for problem in refused.values() if problem.code in BUSY]
        if busy and not moved.moves:
            raise busy[0]
        now = time.monotonic()
        awaited = [link for link in self._links.values() if self._is_awaited(link, now)]
        if not awaited:
            if self._summon is None or now >= until:
                raise EngineDeadError("no engine serves at this moment", "engine_dead", 1.0)
            self._summon()
        adapter = request.adapter
        without = [
            link
            for link in awaited
            if link.welcome is not None
            and adapter not in self._catalogue.offers
            and (adapter not in link.adapters or getattr(refused.get(link.name), "code", "") in UNFIT)
        ]
        if adapter is not None and awaited and len(without) == len(awaited):
            changed = [problem for problem in refused.values() if problem.code == "adapter_changed"]
            if changed:
                raise changed[0]
            raise ServerError(f"adapter {adapter!r} is not known", "unknown_adapter")

    def _is_awaited(self, link: EngineLink, now: float) -> bool:
        if link.lost_at is not None:
            return now - link.lost_at < self._patience
        return link.status in ("ok", "stalled", "loading")

    def _may_ask_again(self, name: str, problem: ServerError | RequestError, moved: MovedStream) -> bool:
        """Whether an engine that was loading, about to stop or too busy may be asked once more; one that was removed is
        forgotten.
        """
        if name not in self._links:
            return True
        if problem.code in BUSY:
            return moved.moves > 0
        return problem.code in ("loading", "draining") and self._book.status(name) == "ok"

    async def news(self, seconds_left: float | None) -> None:
        """Wait until an engine says something new, or its rest is over."""
        rest = self._book.next_rest_end()
        seconds = 1.0 if rest is None else min(1.0, max(0.0, rest - time.monotonic()))
        if seconds_left is not None:
            seconds = min(seconds, seconds_left)
        news = self._news
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await news.wait()

    def wake(self) -> None:
        """An engine said something new, or a request ended."""
        self._news.set()
        self._news = asyncio.Event()
