"""Chooses the engine for a request, and waits if none can accept it now."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ...api.adapter_sum import is_sum, sum_parts
from ...api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from ..interfaces import EngineRequest
from .adapter_catalogue import AdapterCatalogue, is_named_sum
from .engine_link import NOT_SERVING, EngineLink
from .load_balancer import LoadBalancer, RoutingDecision
from .stream_migration import MigratingStream

PATIENCE_SECONDS = 60.0
"""Time to wait for a lost engine."""
MAX_WAITING = 4096
BUSY_SECONDS = 0.1
BUSY = frozenset({"overloaded", "too_many_requests"})
ADAPTER_MISMATCH = frozenset({"unknown_adapter", "adapter_changed"})
"""Error codes of an engine that does not have the adapter, or has another version of it."""
Refusals = dict[str, ServerError | RequestError]
"""Engine name -> the error with which it refused the request."""

T = TypeVar("T")


class Dispatcher:
    """Chooses engines with the load balancer. Waits if none can accept a request now but one may soon.

    patience         seconds to wait for an engine
    request_engine   starts an engine if there is none; called repeatedly while a request waits. None: not possible
    stopping         the server is shutting down: requests are refused, also those whose engine has ended
    """

    def __init__(
        self,
        balancer: LoadBalancer,
        links: Mapping[str, EngineLink],
        catalogue: AdapterCatalogue,
        patience: float,
        request_engine: Callable[[], None] | None = None,
    ) -> None:
        self._balancer, self._links, self._catalogue = balancer, links, catalogue
        self._patience, self._request_engine = patience, request_engine
        self._num_waiting = 0
        self.stopping = False
        self._changed = asyncio.Event()

    async def choose(
        self,
        request: EngineRequest,
        keys: Sequence[bytes],
        stream: MigratingStream,
        refusals: Refusals,
        shares_base: bool = False,
    ) -> RoutingDecision:
        """Return the engine for a request. Waits while there is none but one may become available.

        `shares_base`: see `LoadBalancer.choose`.
        """
        if self.stopping:
            raise self.no_engine()
        if request.adapter is not None and self._catalogue.is_unloaded(request.adapter):
            raise unknown_adapter(request.adapter)
        decision = self._balancer.choose(request.adapter, keys, time.monotonic(), refusals, shares_base)
        if decision is not None:
            return decision
        until = time.monotonic() + self._patience
        for name in refusals.keys() - self._links.keys():
            del refusals[name]
        self._raise_if_hopeless(request, refusals, stream, until)
        with self.waiting():
            while decision is None:
                await self.wait_for_change(stream.seconds_left())
                if any(problem.code in BUSY for problem in refusals.values()):
                    await asyncio.sleep(BUSY_SECONDS)  # changes are frequent in a busy router
                for name in [name for name in refusals if self._may_retry(name, refusals[name], request, stream)]:
                    del refusals[name]
                decision = self._balancer.choose(request.adapter, keys, time.monotonic(), refusals, shares_base)
                if decision is None:
                    self._raise_if_hopeless(request, refusals, stream, until)
        return decision

    async def wait_until_known(self, get: Callable[[], T | None]) -> T | None:
        """Return the first value of `get` that is not None, or None after a second.

        If engines can be requested, it requests one if there is none, and waits for `patience` seconds.
        """
        until = time.monotonic() + (self._patience if self._request_engine is not None else 0.0)
        with self.waiting():
            while (value := get()) is None:
                if not self._links and self._request_engine is not None:
                    self._request_engine()
                await self.wait_for_change(None)
                if time.monotonic() >= until:
                    return get()
        return value

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a waiting request. Raises OverloadedError if too many wait."""
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError("too many requests wait for an engine", "overloaded", 1.0)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _raise_if_hopeless(
        self, request: EngineRequest, refusals: Refusals, stream: MigratingStream, until: float
    ) -> None:
        """Raise the request's error if no engine is expected to accept it soon.

        A request that already had an engine waits while the others are busy.
        """
        if self.stopping:
            raise self.no_engine()
        busy = [problem for problem in refusals.values() if problem.code in BUSY]
        if busy and not stream.migrations:
            raise busy[0]
        now = time.monotonic()
        expected = [link for link in self._links.values() if self._is_expected(link, now)]
        if not expected:
            if self._request_engine is None or now >= until:
                raise self.no_engine()
            self._request_engine()
        adapter = request.adapter
        if adapter is not None and expected and all(self._lacks(link, adapter, refusals) for link in expected):
            if now < until and not stream.required_content and any(link.may_get(adapter) for link in expected):
                return
            changed = [problem for problem in refusals.values() if problem.code == "adapter_changed"]
            if changed:
                raise changed[0]
            entry = self._catalogue.changes.loaded(adapter)
            raise unknown_adapter(adapter, entry is not None and is_named_sum(entry))

    def _lacks(self, link: EngineLink, adapter: str, refusals: Refusals) -> bool:
        """Return whether an engine does not have an adapter, or has another version of it."""
        missing = [part for part, _ in sum_parts(adapter) if part not in self._catalogue.offered]
        if link.welcome is None or not missing:
            return False
        return not all(map(link.serves, missing)) or getattr(refusals.get(link.name), "code", "") in ADAPTER_MISMATCH

    def _is_expected(self, link: EngineLink, now: float) -> bool:
        if link.is_prefill:
            return False
        if link.lost_at is not None:
            return now - link.lost_at < self._patience
        return link.status in ("ok", "stalled", "loading")

    def _may_retry(
        self, name: str, problem: ServerError | RequestError, request: EngineRequest, stream: MigratingStream
    ) -> bool:
        """Return whether a refusal can be dropped: its engine may accept the request now, or was removed."""
        if name not in self._links:
            return True
        if problem.code in BUSY:
            return stream.migrations > 0
        if problem.code == "adapter_changed" and not stream.required_content:
            return request.adapter is not None and self._links[name].serves(request.adapter)
        return problem.code in NOT_SERVING and self._balancer.status(name) == "ok"

    async def wait_for_change(self, seconds_left: float | None) -> None:
        """Wait until the state of an engine changes or a backoff ends, for at most a second."""
        backoff_end = self._balancer.next_backoff_end()
        seconds = 1.0 if backoff_end is None else min(1.0, max(0.0, backoff_end - time.monotonic()))
        if seconds_left is not None:
            seconds = min(seconds, seconds_left)
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await changed.wait()

    def no_engine(self) -> ServerError:
        """Return the error for a request that no engine accepts: the server is shutting down, or none runs."""
        if self.stopping or any(link.status == "draining" for link in self._links.values()):
            return OverloadedError("the server is shutting down; try again in a moment", "draining", 1.0)
        return EngineDeadError("no engine is running at the moment", "engine_dead", 1.0)

    def notify(self) -> None:
        """Wake waiting requests: the state of an engine changed, or a request ended."""
        self._changed.set()
        self._changed = asyncio.Event()


def unknown_adapter(name: str, is_named: bool = False) -> ServerError:
    """Return the error for an adapter that does not exist. `is_named`: it is the name of a sum, which lacks one."""
    text = f"an adapter of {name!r}" if is_sum(name) or is_named else f"adapter {name!r}"
    remedy = "; load it again, or give the name to another sum" if is_named else ""
    return ServerError(f"{text} is not known{remedy}", "unknown_adapter")
