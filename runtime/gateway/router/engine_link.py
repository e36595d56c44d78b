"""Connection to one engine: reconnects, polls its state, and restores its adapters."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...api.errors import EngineDeadError, RequestError, ServerError
from ...client.async_client import AsyncClient
from ...protocol.messages import AdapterInfo, Health, Welcome
from ..interfaces import HealthStatus
from .adapter_catalogue import AdapterCatalogue, AdapterChange, OfferedAdapter
from .load_balancer import EngineReport

_log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
ANSWER_SECONDS = 10.0
LOAD_SECONDS = 600.0
LOAD_TRIES = 20
Fetch = Callable[[str, OfferedAdapter], Awaitable[str]]
"""Copies an offered adapter's files to the host of an engine (by name). Returns the directory there."""


class EngineLink:
    """The engine `name` at `address`.

    welcome           its last `welcome` message; kept after a loss
    health            its last health; None: unknown or lost
    adapters          its adapters by name; kept after a loss
    stats             its last counters and gauges
    streams           open streams of this router
    loaded_versions   offered adapter -> version that it loaded for this router
    lost_at           time of the loss by the monotonic clock; None while connected

    `on_report(link, report)` is called with each report, and `on_lost(link, problem)` as soon as the connection is
    lost. A restarted engine gets the adapters of `catalogue` before it is reported.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: str | Path | None,
        catalogue: AdapterCatalogue,
        on_report: Callable[["EngineLink", EngineReport], None],
        on_lost: Callable[["EngineLink", Exception], None],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.name = name
        self.client = AsyncClient(
            address,
            keys=keys,
            connect_timeout=1.0,
            call_timeout=ANSWER_SECONDS,
            name="gateway",
            on_lost=self._disconnected,
        )
        self.welcome: Welcome | None = None
        self.health: Health | None = None
        self.adapters: dict[str, AdapterInfo] = {}
        self.stats: dict[str, int | float] = {}
        self.streams = 0
        self.loaded_versions: dict[str, str] = {}
        self._load_locks: dict[str, asyncio.Lock] = {}
        self.lost_at: float | None = time.monotonic()
        self._catalogue = catalogue
        self._on_report, self._on_lost = on_report, on_lost
        self._poll_seconds = poll_seconds
        self._poll_task: asyncio.Task[None] | None = None
        self._poll_now = asyncio.Event()
        self._refresh_lock = asyncio.Lock()
        self._tried: set[AdapterChange] = set()

    def start(self) -> None:
        """Start polling."""
        self._poll_task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Close the connection."""
        if self._poll_task is not None:
            self._poll_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poll_task
        await self.client.close()

    @property
    def status(self) -> HealthStatus:
        """Last reported status; `dead` if it cannot be reached."""
        return "dead" if self.health is None else self.health.status

    def on_request_error(self, problem: Exception) -> None:
        """Poll now: a request found the engine dead or stopping."""
        if isinstance(problem, EngineDeadError):
            self._disconnected(problem)
        self._poll_now.set()

    async def refresh(self) -> None:
        """Query the engine's state and report it. Raises ServerError or TimeoutError if it does not answer."""
        async with self._refresh_lock:
            await self._query()

    async def _query(self) -> None:
        queried_at = time.monotonic()
        health = await self.client.health(ANSWER_SECONDS)
        if health.status in ("loading", "dead"):
            self._report(EngineReport(health.status, queried_at), health)
            return
        welcome = await self.client.connect()
        stats, adapters = await asyncio.gather(self.client.stats(), self.client.list_adapters())
        if health.status in ("ok", "stalled") and await self._restore(welcome, adapters):
            adapters = await self.client.list_adapters()
        self.welcome, self.stats = welcome, stats
        self.adapters = {info.name: info for info in adapters}
        places = {
            info.name: "cpu" if info.where == "cpu" and not info.waiting else "gpu"
            for info in adapters
            if info.where != "disk" or info.waiting
        }
        report = EngineReport(
            health.status,
            queried_at,
            capacity=welcome.max_num_seqs,
            slots=welcome.max_adapter_slots,
            open=int(stats.get("requests_open", 0)),
            places=places,
            known=frozenset(self.adapters) | self._catalogue.offered.keys(),
        )
        self._report(report, health)

    async def _restore(self, welcome: Welcome, adapters: list[AdapterInfo]) -> bool:
        """Apply the changes of the catalogue. Returns whether there were any."""
        changed = False
        for change in self._catalogue.changes_for(adapters) if welcome.admin else ():
            if change in self._tried:
                continue
            try:
                if change.path is None:
                    await self.client.unload_adapter(change.name)
                else:
                    self._tried.add(change)  # only once per engine process: the files may have changed since
                    await self.client.load_adapter(change.name, change.path, change.replace, LOAD_SECONDS)
                changed = True
            except EngineDeadError:
                raise
            except (ServerError, RequestError) as problem:
                _log.warning("%s: adapter %r differs from the other engines: %s", self.name, change.name, problem)
        return changed

    async def load_offered(self, name: str, fetch: Fetch | None) -> None:
        """Load the current version of an offered adapter unless it is loaded. Raises the errors of `load_adapter`."""
        async with self._load_locks.setdefault(name, asyncio.Lock()):
            offered = self._catalogue.offered.get(name)
            if offered is None or self.loaded_versions.get(name) == offered.version:
                return
            path = offered.path if fetch is None else await fetch(self.name, offered)
            for _ in range(LOAD_TRIES):
                try:
                    await self.client.load_adapter(name, path, True, LOAD_SECONDS)
                    break
                except ServerError as problem:  # another router is loading it
                    if problem.code != "adapter_in_use":
                        raise
                    await asyncio.sleep(self._poll_seconds)
            self.loaded_versions[name] = offered.version
            await self.refresh()

    def _report(self, report: EngineReport, health: Health) -> None:
        self.health, self.lost_at = health, None
        self._on_report(self, report)

    def _disconnected(self, problem: Exception) -> None:
        self.health = None
        self._tried.clear()
        self.loaded_versions.clear()
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            self._on_lost(self, problem)
        self._poll_now.set()

    async def _poll(self) -> None:
        while True:
            self._poll_now.clear()
            try:
                await self.refresh()
            except (ServerError, RequestError, TimeoutError, OSError) as problem:
                self._disconnected(problem)
                if getattr(problem, "code", "") != "wrong_instance":  # a new engine process is already there
                    self._poll_now.clear()
            except Exception:
                _log.exception("unexpected error while polling %s", self.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._poll_now.wait()
                await asyncio.sleep(min(0.05, self._poll_seconds))  # limits the rate of polls after errors
