"""Connection to one engine: reconnects, polls its state, and exchanges changes of adapters with it."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ...api.adapter_sum import is_sum, sum_parts
from ...api.errors import EngineDeadError, RequestError, ServerError
from ...client.async_client import AsyncClient
from ...protocol.adapter_map import MAX_AHEAD_SECONDS, AdapterEntry, AdapterMap
from ...protocol.messages import MAX_ENTRIES, AdapterInfo, Health, Welcome
from ..interfaces import HealthStatus
from .adapter_catalogue import AdapterCatalogue
from .load_balancer import EngineReport

_log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
ANSWER_SECONDS = 10.0
LOAD_SECONDS = 600.0
RETRY_SECONDS = 30.0
"""Time before a change that an engine has refused is passed on to it again."""
NOT_SERVING = frozenset({"loading", "draining"})

T = TypeVar("T")


class EngineLink:
    """The engine `name` at `address`.

    welcome           its last `welcome` message; kept after a loss
    health            its last health; None: unknown or lost
    adapters          its adapters by name; kept after a loss
    held              its changes of adapters
    stats             its last counters and gauges
    counts            counters of routing reasons and of streams that moved away
    streams           open streams of this router
    is_prefill        it only computes prompts
    loaded_versions   offered adapter -> version that it loaded for this router
    has_pulled        whether `pull` succeeded since the connection was made
    lost_at           time of the loss by the monotonic clock; None while connected

    `on_report(link, report)` is called with each report, and `on_lost(link, problem)` as soon as the connection is
    lost. An engine that did not serve at the last report gets the changes of `catalogue` before it is reported;
    `before_use(link)` is awaited first, to make the catalogue complete. Later changes are passed on between polls,
    since a load may be slow.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: str | Path | None,
        catalogue: AdapterCatalogue,
        on_report: Callable[["EngineLink", EngineReport], None],
        on_lost: Callable[["EngineLink", Exception], None],
        before_use: Callable[["EngineLink"], Awaitable[None]],
        poll_seconds: float = POLL_SECONDS,
        is_prefill: bool = False,
    ) -> None:
        self.name, self.is_prefill = name, is_prefill
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
        self.held = AdapterMap()
        self.stats: dict[str, int | float] = {}
        self.counts: Counter[str] = Counter()
        self.streams = 0
        self.loaded_versions: dict[str, str] = {}
        self._load_locks = WeakValueDictionary[str, asyncio.Lock]()  # those in use
        self.lost_at: float | None = time.monotonic()
        self._catalogue = catalogue
        self._on_report, self._on_lost, self._before_use = on_report, on_lost, before_use
        self._poll_seconds = poll_seconds
        self._poll_task: asyncio.Task[None] | None = None
        self._poll_now = asyncio.Event()
        self._refresh_lock = asyncio.Lock()
        self._sequence = 0
        self.has_pulled = False
        self._passed_on: dict[AdapterEntry, float] = {}  # when to try again
        self._pass_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start polling."""
        self._poll_task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Close the connection."""
        for task in (self._poll_task, self._pass_task):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
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

    def count_routing(self, reason: str) -> None:
        """Count a request that the load balancer sends here."""
        self.counts[f"routed_{reason.replace(':', '').replace(' ', '_')}_total"] += 1

    async def refresh(self, name: str | None = None) -> None:
        """Query the engine's state and report it, and wait until it has the last change of `name`.

        Raises ServerError or TimeoutError if it does not answer.
        """
        async with self._refresh_lock:
            await self._query()
        if name is not None and self.status in ("ok", "stalled") and self.welcome is not None and self.welcome.admin:
            await self._pass_on(name)

    async def _query(self) -> None:
        queried_at = time.monotonic()
        health = await self.client.health(ANSWER_SECONDS)
        if health.status in ("loading", "dead"):
            self._report(EngineReport(health.status, queried_at), health)
            return
        welcome = await self.client.connect()
        self.welcome, self.stats = welcome, await self.client.stats()
        await self.pull()
        is_new, accepts = self.status in ("dead", "loading"), health.status in ("ok", "stalled") and welcome.admin
        if is_new:
            await self._before_use(self)
        if accepts and is_new:
            await self._pass_on()
        elif accepts and (self._pass_task is None or self._pass_task.done()):
            self._pass_task = asyncio.create_task(self._pass_on_later())
        self._report(self._report_of(health, welcome, queried_at), health)

    def _report_of(self, health: Health, welcome: Welcome, queried_at: float) -> EngineReport:
        places = {
            info.name: "cpu" if info.where == "cpu" and not info.waiting else "gpu"
            for info in self.adapters.values()
            if info.where != "disk" or info.waiting
        }
        offered = self._catalogue.offered.keys()
        return EngineReport(
            health.status,
            queried_at,
            capacity=welcome.max_num_seqs,
            slots=welcome.max_adapter_slots,
            open=int(self.stats.get("requests_open", 0)),
            places=places,
            known=frozenset(name for name in self.adapters if self.serves(name)) | offered,
        )

    def serves(self, name: str) -> bool:
        """Return whether the engine has the version of an adapter, or of all of a sum, that answers requests."""
        if is_sum(name):
            return all(self.serves(part) for part, _ in sum_parts(name))
        info = self.adapters.get(name)
        return info is not None and self._catalogue.required_content(name) in ("", info.content)

    def may_get(self, name: str) -> bool:
        """Return whether the engine does not have the required version yet, and has not refused it."""
        if is_sum(name):
            missing = [part for part, _ in sum_parts(name) if not self.serves(part)]
            return bool(missing) and all(map(self.may_get, missing))
        entry = self._catalogue.changes.loaded(name)
        return entry is not None and not self.serves(name) and entry not in self._passed_on

    async def pull(self) -> None:
        """Get the engine's adapters and its latest changes, and adopt these."""
        held, after, count = self.held, self._sequence, MAX_ENTRIES
        while count >= MAX_ENTRIES:
            state = await self.client.adapter_changes(after)
            if self.held is not held:
                raise EngineDeadError(f"{self.name} was restarted during a query", "wrong_instance")
            for entry in state.entries:
                held.merge(entry)
                self._catalogue.adopt(entry)
            after, count = state.sequence, len(state.entries)
        self._sequence, self.has_pulled = after, True
        self.adapters = {info.name: info for info in state.adapters}

    async def _pass_on_later(self) -> None:
        """Pass on changes while the engine is in use. If it does not answer, the next poll finds out why."""
        try:
            await self._pass_on()
        except (ServerError, TimeoutError, OSError):
            pass
        except Exception:
            _log.exception("unexpected error while changes are passed on to %s", self.name)

    async def _pass_on(self, name: str | None = None) -> None:
        """Apply the changes that the engine lacks, or that of `name`. Skips one that another router passes on now, but
        waits for that of `name`. Errors are logged, and the engine gets no requests for the name.
        """
        missing = self._catalogue.missing(self.held, self.adapters)
        self._passed_on = {entry: self._passed_on[entry] for entry in missing if entry in self._passed_on}
        due = [entry for entry in missing if self._passed_on.get(entry, 0.0) <= time.monotonic()]
        due = [entry for entry in due if name in (None, entry.name)]
        while due:
            entry = due[0]
            try:
                await self.client.apply_adapter_entry(entry, timeout=LOAD_SECONDS)
                self._passed_on[entry] = time.monotonic() + RETRY_SECONDS
            except EngineDeadError:
                raise
            except (ServerError, RequestError) as problem:
                if problem.code == "adapter_in_use" and name is not None:
                    await asyncio.sleep(self._poll_seconds)
                    continue
                if problem.code != "adapter_in_use":
                    self._passed_on[entry] = time.monotonic() + RETRY_SECONDS
                if problem.code not in ("adapter_in_use", "adapter_changed"):
                    _log.warning(
                        "%s does not get the current version of adapter %r: %s", self.name, entry.name, problem
                    )
            del due[0]
            if not due:
                await self.pull()
                self._poll_now.set()

    async def apply(self, entry: AdapterEntry, replace: bool) -> AdapterEntry | None:
        """Apply a change of this router, and adopt the engine's state. Waits while the engine changes this adapter.
        Returns the engine's change that it replaced.

        A later change that the engine has applied counts as well, if its stamp can be adopted. Raises the errors of
        `apply_adapter_entry`.
        """
        until = time.monotonic() + LOAD_SECONDS
        while True:
            is_applied, replaced = True, None
            try:
                replaced = await self.client.apply_adapter_entry(entry, replace, LOAD_SECONDS)
            except (ServerError, RequestError) as problem:
                if problem.code == "adapter_in_use" and replace and time.monotonic() < until:
                    await asyncio.sleep(self._poll_seconds)
                    continue
                if problem.code != "adapter_changed":
                    raise
                is_applied = False
            await self.pull()
            if not is_applied and not self._catalogue.changes.is_outdated(entry.name, entry.stamp):
                raise ServerError(
                    f"adapter {entry.name!r}: its last change on {self.name} is over {MAX_AHEAD_SECONDS:g} s ahead of "
                    "the gateway's clock. Synchronize the clocks of the hosts; if they agree now, restart that server",
                    "adapter_changed",
                )
            return replaced

    async def load_offered(self, name: str) -> None:
        """Load the current version of an offered adapter unless it is loaded. Raises the errors of `load_adapter`."""
        async with self._load_locks.setdefault(name, asyncio.Lock()):
            offered = self._catalogue.offered.get(name)
            if offered is None or (self.loaded_versions.get(name) == offered.version and name in self.adapters):
                return
            await self.apply(self._catalogue.new_entry(name, offered.path), True)
            self.loaded_versions[name] = offered.version
            await self.refresh()

    def _report(self, report: EngineReport, health: Health) -> None:
        self.health, self.lost_at = health, None
        self._on_report(self, report)

    def _disconnected(self, problem: Exception) -> None:
        self.health = None
        self.held, self._sequence, self.has_pulled = AdapterMap(), 0, False
        self._passed_on.clear()
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


async def query_all(
    links: Iterable[EngineLink], query: Callable[[EngineLink], Coroutine[Any, Any, T]]
) -> dict[str, T | Exception]:
    """Return the answer or the error of each connected engine."""
    connected = [link for link in links if link.lost_at is None]
    answers = await asyncio.gather(*(query(link) for link in connected), return_exceptions=True)
    by_name: dict[str, T | Exception] = {}
    for link, answer in zip(connected, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, Exception):
            raise answer
        by_name[link.name] = answer
    return by_name
