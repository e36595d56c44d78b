"""One engine: a connection that is made again and again, and what the engine says of itself."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...api.errors import EngineDeadError, RequestError, ServerError
from ...client.async_client import AsyncClient
from ...protocol.messages import AdapterInfo, Health, Welcome
from ..contracts import HealthStatus
from .catalogue import Catalogue, Offer, Step
from .load_balancer import Report

_log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
ANSWER_SECONDS = 10.0
LOAD_SECONDS = 600.0
LOAD_TRIES = 20
Fetch = Callable[[str, Offer], Awaitable[str]]
"""Brings an offered adapter's files to an engine's host, given the engine's name; returns where they lie there."""


class EngineLink:
    """The engine at `address`, called `name`.

    welcome    what it is, once it has said so; kept when it is lost
    health     what it said last; None: nothing yet, or it is lost
    adapters   what it said last, by name; kept when it is lost
    told       its counters and gauges, as it said last
    streams    streams of this router that it answers
    brought    adapter -> version of the offer that it has loaded for this router
    lost_at    since when it cannot be reached, on the monotonic clock; None while it can be

    `on_report(link, report)` is called with each report, `on_lost(link, problem)` when it dies: at once, also between
    two polls. An engine that comes back gets the adapters of `catalogue` before it is reported.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: str | Path | None,
        catalogue: Catalogue,
        on_report: Callable[["EngineLink", Report], None],
        on_lost: Callable[["EngineLink", Exception], None],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.name = name
        self.client = AsyncClient(
            address, keys=keys, connect_timeout=1.0, call_timeout=ANSWER_SECONDS, name="gateway", on_lost=self._cut
        )
        self.welcome: Welcome | None = None
        self.health: Health | None = None
        self.adapters: dict[str, AdapterInfo] = {}
        self.told: dict[str, int | float] = {}
        self.streams = 0
        self.brought: dict[str, str] = {}
        self._bringing: dict[str, asyncio.Lock] = {}
        self.lost_at: float | None = time.monotonic()
        self._catalogue = catalogue
        self._on_report, self._on_lost = on_report, on_lost
        self._poll_seconds = poll_seconds
        self._polls: asyncio.Task[None] | None = None
        self._look = asyncio.Event()
        self._looking = asyncio.Lock()
        self._tried: set[Step] = set()

    def start(self) -> None:
        """Begin to look at the engine."""
        self._polls = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """End the connection."""
        if self._polls is not None:
            self._polls.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polls
        await self.client.close()

    @property
    def status(self) -> HealthStatus:
        """What it said last; `dead` when it cannot be reached."""
        return "dead" if self.health is None else self.health.status

    def failed(self, problem: Exception) -> None:
        """A request found the engine dead, or about to stop: look at it now."""
        if isinstance(problem, EngineDeadError):
            self._cut(problem)
        self._look.set()

    async def look(self) -> None:
        """Ask the engine how it is, and report it. Raises ServerError or TimeoutError when it does not answer."""
        async with self._looking:
            await self._ask()

    async def _ask(self) -> None:
        asked = time.monotonic()
        health = await self.client.health(ANSWER_SECONDS)
        if health.status in ("loading", "dead"):
            self._report(Report(health.status, asked), health)
            return
        welcome = await self.client.connect()
        told, adapters = await asyncio.gather(self.client.stats(), self.client.list_adapters())
        if health.status in ("ok", "stalled") and await self._restore(welcome, adapters):
            adapters = await self.client.list_adapters()
        self.welcome, self.told = welcome, told
        self.adapters = {info.name: info for info in adapters}
        places = {
            info.name: "cpu" if info.where == "cpu" and not info.waiting else "gpu"
            for info in adapters
            if info.where != "disk" or info.waiting
        }
        report = Report(
            health.status,
            asked,
            capacity=welcome.max_num_seqs,
            slots=welcome.max_adapter_slots,
            open=int(told.get("requests_open", 0)),
            places=places,
            known=frozenset(self.adapters) | self._catalogue.offers.keys(),
        )
        self._report(report, health)

    async def _restore(self, welcome: Welcome, adapters: list[AdapterInfo]) -> bool:
        """Load and unload what the catalogue asks for; True if anything has changed."""
        changed = False
        for step in self._catalogue.missing(adapters) if welcome.admin else ():
            if step in self._tried:
                continue
            try:
                if step.path is None:
                    await self.client.unload_adapter(step.name)
                else:
                    self._tried.add(step)  # once in an engine's life: its files may have changed since
                    await self.client.load_adapter(step.name, step.path, step.replace, LOAD_SECONDS)
                changed = True
            except EngineDeadError:
                raise
            except (ServerError, RequestError) as problem:
                _log.warning("%s: adapter %r is not as the others have it: %s", self.name, step.name, problem)
        return changed

    async def bring(self, name: str, fetch: Fetch | None) -> None:
        """Have the engine load an adapter that is offered, in its present version, unless it has. Raises what loading
        raises.
        """
        async with self._bringing.setdefault(name, asyncio.Lock()):
            offer = self._catalogue.offers.get(name)
            if offer is None or self.brought.get(name) == offer.version:
                return
            path = offer.path if fetch is None else await fetch(self.name, offer)
            for _ in range(LOAD_TRIES):
                try:
                    await self.client.load_adapter(name, path, True, LOAD_SECONDS)
                    break
                except ServerError as problem:  # another router has it loaded at this moment
                    if problem.code != "adapter_in_use":
                        raise
                    await asyncio.sleep(self._poll_seconds)
            self.brought[name] = offer.version
            await self.look()

    def _report(self, report: Report, health: Health) -> None:
        self.health, self.lost_at = health, None
        self._on_report(self, report)

    def _cut(self, problem: Exception) -> None:
        self.health = None
        self._tried.clear()
        self.brought.clear()
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            self._on_lost(self, problem)
        self._look.set()

    async def _poll(self) -> None:
        while True:
            self._look.clear()
            try:
                await self.look()
            except (ServerError, RequestError, TimeoutError, OSError) as problem:
                self._cut(problem)
                if getattr(problem, "code", "") != "wrong_instance":  # which only says that another engine is there
                    self._look.clear()
            except Exception:
                _log.exception("a fault while %s was looked at", self.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._look.wait()
                await asyncio.sleep(min(0.05, self._poll_seconds))  # what is asked for again and again is not hurried
