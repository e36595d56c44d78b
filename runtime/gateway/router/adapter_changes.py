"""Loads and unloads adapters on all engines, and adopts the changes that others make."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from weakref import WeakValueDictionary

from ...api.errors import EngineDeadError, ServerError
from ...protocol.adapter_map import AdapterEntry, Stamp
from .adapter_catalogue import AdapterCatalogue
from .dispatch import unknown_adapter
from .engine_link import NOT_SERVING, EngineLink, query_all

CHANGE_TRIES = 5
SETTLE_POLLS = 3.0
LOOK_SECONDS = 0.1
"""Least time between two queries of the engines for an unknown adapter."""


class AdapterChanges:
    """Changes adapters on the engines of a router, whose last changes are in `catalogue`.

    locks       name -> lock of the change in progress
    no_engine   returns the error for changes that no engine can apply
    """

    def __init__(
        self,
        links: Mapping[str, EngineLink],
        catalogue: AdapterCatalogue,
        poll_seconds: float,
        no_engine: Callable[[], ServerError],
    ) -> None:
        self._links, self._catalogue, self._poll_seconds = links, catalogue, poll_seconds
        self._no_engine = no_engine
        self.locks = WeakValueDictionary[str, asyncio.Lock]()
        self._look_lock, self._looks, self._last_look = asyncio.Lock(), 0, 0.0

    async def load(self, name: str, path: str, replace: bool) -> None:
        """Load an adapter. When this returns, all engines that accept requests have this version or a later one.

        An engine that is down gets it before its next request. If an engine refuses it, all return to the former one.
        """
        async with self.changing(name):
            before = self._catalogue.changes.entries.get(name)
            is_new = not any(name in link.adapters for link in self._links.values())
            entry, refused, replaced = await self._apply_new(name, path, replace)
            held = [each for each in (link.held.entries.get(name) for link in self._links.values()) if each]
            applied = {each.content for each in held if each.stamp == entry.stamp}
            if len(applied) > 1 and not refused:
                refused = {"the engines": ServerError("they read different files", "adapter_error")}
            if not refused:
                return
            problem = next(iter(refused.values()))
            if not applied:
                raise problem
            outcome = "the other engines have the new version"
            before = _latest([before, *held, *replaced], entry.stamp)
            if before is not None or is_new:
                failed = await self._undo(entry, before)
                outcome = "the change was undone" + (f", except by {', '.join(sorted(failed))}" if failed else "")
            text = f"adapter {name!r} was refused by {', '.join(sorted(refused))}: {problem}; {outcome}"
            raise ServerError(text, problem.code if isinstance(problem, ServerError) else "adapter_error")

    async def unload(self, name: str, is_served: Callable[[], bool]) -> None:
        """Unload an adapter. New requests cannot name the adapter; open ones finish."""
        async with self.changing(name):
            # an engine may be unable to read the files of a loaded adapter
            if not is_served() and self._catalogue.changes.loaded(name) is None:
                raise unknown_adapter(name)
            _, refused, _ = await self._apply_new(name, None, True)
            if refused:
                raise next(iter(refused.values()))

    async def look(self) -> None:
        """Adopt changes that engines acknowledged before this call, if they answer soon. Calls share queries."""
        looks = self._looks
        async with self._look_lock:
            if self._looks > looks:  # begun after this call
                return
            await asyncio.sleep(self._last_look + LOOK_SECONDS - time.monotonic())
            self._looks, self._last_look = self._looks + 1, time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self.pull_all()

    @contextlib.asynccontextmanager
    async def changing(self, name: str) -> AsyncGenerator[None]:
        """Change one adapter at a time, with all known changes adopted before; report the result to the balancer."""
        async with self.locks.setdefault(name, asyncio.Lock()):
            await query_all(self._links.values(), lambda link: link.pull())
            try:
                with self._catalogue.changing(name):
                    yield
            finally:
                await query_all(self._links.values(), lambda link: link.refresh(name))

    async def pull_all(self) -> None:
        """Adopt the changes of all engines.

        An engine that starts answers only when it has loaded, so that one would delay all others.
        """

        async def pull(each: EngineLink) -> None:
            if each.has_pulled or each.status != "loading":
                await each.pull()

        await query_all(self._links.values(), pull)

    async def _undo(self, entry: AdapterEntry, before: AdapterEntry | None) -> dict[str, Exception]:
        """Restore `before` in place of `entry` everywhere. Returns errors by engine.

        Another client's change may have been in progress on an engine. If it is later than `before`, it is restored.
        """
        undone = entry
        while True:
            undone = self._catalogue.undo(undone, before)
            failed, replaced = await self._apply_everywhere(undone, True)
            latest = _latest([before, *replaced], entry.stamp)
            if latest is None or (before is not None and latest.stamp <= before.stamp):
                return failed
            before = latest

    async def _apply_new(
        self, name: str, path: str | None, replace: bool
    ) -> tuple[AdapterEntry, dict[str, Exception], list[AdapterEntry]]:
        """Apply a new change everywhere. Returns it, the errors by engine, and the changes that it replaced.

        If an engine has a later change of another router, it is stamped again: if that router undoes its change, this
        one must remain.
        """
        own, former = set[Stamp](), list[AdapterEntry]()
        for _ in range(CHANGE_TRIES):
            entry = self._catalogue.new_entry(name, path)
            refused, replaced = await self._apply_everywhere(entry, replace)
            own.add(entry.stamp)
            former += replaced
            latest = self._catalogue.changes.entries.get(name)
            if refused or latest is None or latest.stamp <= entry.stamp:
                break
        return entry, refused, [each for each in former if each.stamp not in own]

    async def _apply_everywhere(
        self, entry: AdapterEntry, replace: bool
    ) -> tuple[dict[str, Exception], list[AdapterEntry]]:
        """Apply a change on all connected engines, also on those that connect meanwhile. Returns errors by engine, and
        the changes that it replaced.

        If one is not connected, it may accept requests of another router: waits until that one has polled the others.
        Raises EngineDeadError if no engine accepts requests.
        """
        done: set[EngineLink] = set()
        refused: dict[str, Exception] = {}
        replaced: list[AdapterEntry] = []
        applied, has_waited = 0, False
        while True:
            links = [each for each in self._links.values() if each.lost_at is None and each not in done]
            if not links:
                if has_waited or not applied or all(each.lost_at is None for each in self._links.values()):
                    break
                has_waited = True
                await asyncio.sleep(SETTLE_POLLS * self._poll_seconds)
                continue
            answers = await asyncio.gather(*(link.apply(entry, replace) for link in links), return_exceptions=True)
            for link, answer in zip(links, answers, strict=True):
                done.add(link)
                if answer is None or isinstance(answer, AdapterEntry):
                    applied += 1
                    replaced += [] if answer is None else [answer]
                elif not isinstance(answer, Exception):
                    raise answer
                elif not isinstance(answer, EngineDeadError) and getattr(answer, "code", "") not in NOT_SERVING:
                    refused[link.name] = answer
        if not applied and not refused:
            raise self._no_engine()
        return refused, replaced


def _latest(entries: Iterable[AdapterEntry | None], before: Stamp) -> AdapterEntry | None:
    """Return the last change that is earlier than a stamp."""
    found = [entry for entry in entries if entry is not None and entry.stamp < before]
    return max(found, key=lambda entry: entry.stamp, default=None)
