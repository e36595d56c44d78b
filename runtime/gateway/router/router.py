"""`Router`: several engines as the gateway's one."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from ...protocol.messages import Chunk
from ...protocol.templates import welcome_templates
from ...text.chat_files import ChatTemplates
from ...text.prompts import without_special_tokens
from ..contracts import AdapterCard, EngineHealth, EngineRequest, HealthStatus, ModelInfo
from .catalogue import Catalogue, Offer
from .dispatch import BUSY, PATIENCE_SECONDS, UNFIT, Dispatch, Refusals
from .engine_link import LOAD_SECONDS, POLL_SECONDS, EngineLink, Fetch
from .load_balancer import Book, Choice, Report
from .moved_stream import MovedStream
from .prefixes import chain

_log = logging.getLogger(__name__)
_TRIED_ELSEWHERE = BUSY | {"loading", "draining"}
_ORDER: tuple[HealthStatus, ...] = ("ok", "stalled", "loading", "draining", "dead")

T = TypeVar("T")


class Router:
    """Engines of one model at `addresses`, as `Engines`; they are called engine-0, engine-1 and so on. `add` and
    `remove` change which ones there are.

    keys              this client's folder of `sidestream keys curve`
    patience_seconds  how long a request waits for an engine to come (back) while there is none
    summon            asks for an engine, which `add` brings later; called again and again while a request waits and
                      there is none, so it must bear that. None: those that are there are all
    fetch             brings an adapter that is offered to an engine's host; None: its path is good for all

    `counts`: for each engine, why requests were sent to it, and how many streams left it when it died.

    A stream whose engine dies goes on in another one, or in the same one when it is back: its caller sees a pause.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: str | Path | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        book: Book | None = None,
        summon: Callable[[], None] | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        if not addresses and summon is None:
            raise ValueError("a router needs at least one engine's address")
        self._keys, self._poll_seconds, self._fetch = keys, poll_seconds, fetch
        self._book = book or Book()
        self._catalogue = Catalogue()
        self._links: dict[str, EngineLink] = {}
        self.counts: dict[str, Counter[str]] = {}
        self._started = self._stopping = False
        self._leaving: set[asyncio.Task[None]] = set()
        self._remembered: dict[str, AdapterCard] = {}  # of engines that were removed
        self._created = int(time.time())
        self._model: ModelInfo | None = None
        self._dispatch = Dispatch(self._book, self._links, self._catalogue, patience_seconds, summon)
        for number, address in enumerate(addresses):
            self.add(f"engine-{number}", address)

    async def start(self) -> None:
        """See `Engines`."""
        self._started = True
        for link in self._links.values():
            link.start()

    async def close(self) -> None:
        """See `Engines`."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def expect_end(self) -> None:
        """See `Engines`."""
        self._stopping = True

    # -- engines ---------------------------------------------------------------------------------------------------

    def add(self, name: str, address: str) -> None:
        """One more engine. Raises ValueError for a name that is taken, AddressError for an address that is none, or
        that needs keys.
        """
        link = EngineLink(name, address, self._keys, self._catalogue, self._reported, self._lost, self._poll_seconds)
        self._book.add(name)
        self._links[name], self.counts[name] = link, Counter()
        if self._started:
            link.start()

    def remove(self, name: str) -> None:
        """An engine is about to end: it gets no new requests, and its streams go on until it ends them."""
        link = self._links.pop(name)
        self._book.remove(name)
        self._remembered |= {
            info.name: AdapterCard(info.name, info.rank, info.content) for info in link.adapters.values()
        }
        task = asyncio.create_task(self._see_off(link))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self._dispatch.wake()

    async def _see_off(self, link: EngineLink) -> None:
        try:
            while link.streams:
                await self._dispatch.news(None)
        finally:
            del self.counts[link.name]
            await link.close()

    # -- requests --------------------------------------------------------------------------------------------------

    async def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        """See `Engines`. The same request goes to another engine when its own dies, stops, or is too busy."""
        moved = MovedStream(request)
        # among engines that are about as good a known beginning decides: one has nothing to decide
        keys = chain(request.prompt, request.adapter) if len(self._links) > 1 else []
        refused: Refusals = {}
        while not moved.ended:
            choice = await self._dispatch.choose(request, keys, moved, refused)
            link = self._links[choice.engine]
            self._count(choice)
            heard = False
            link.streams += 1
            self._book.begin(link.name, request.adapter, keys, time.monotonic())
            try:
                if request.adapter is not None and request.adapter in self._catalogue.offers:
                    await link.bring(request.adapter, self._fetch)
                text_alone = isinstance(request.prompt, str) and not request.add_special_tokens
                lists = link.client.stream_lists(
                    without_special_tokens(str(request.prompt)) if text_alone else request.prompt,
                    request.params,
                    request.adapter,
                    priority=request.priority,
                    deadline_seconds=moved.seconds_left(),
                    request_id=request.request_id,
                    stream=moved.streams,
                    continues=moved.continues(),
                    when_accepted=moved.accepted,
                    owner=request.owner,
                    adapter_content=moved.content,
                    direct=None if request.direct is None else moved.direct,
                )
                async with contextlib.aclosing(lists):
                    async for chunks in lists:
                        heard = True
                        chunks = moved.take(chunks)
                        if chunks:
                            refused.clear()
                            yield chunks
            except EngineDeadError as problem:
                link.failed(problem)
                self._move(link, moved, problem)
            except OverloadedError as problem:
                if problem.code in ("draining", "loading"):
                    self._says(link, problem.code)
                link.failed(problem)
                if problem.code not in _TRIED_ELSEWHERE or heard:
                    self._move(link, moved, problem)
                if problem.code in _TRIED_ELSEWHERE:
                    refused[link.name] = problem
            except RequestError as problem:
                if problem.code not in UNFIT:
                    raise
                link.failed(problem)
                if heard or (problem.code == "adapter_changed" and not moved.content):
                    self._move(link, moved, ServerError(str(problem), problem.code))
                else:
                    refused[link.name] = ServerError(str(problem), problem.code)
            finally:
                link.streams -= 1
                self._book.end(link.name, moved.ended, time.monotonic())
                self._dispatch.wake()

    def _says(self, link: EngineLink, status: str) -> None:
        if link.name in self._links:
            self._book.says(link.name, status, time.monotonic())

    def _move(self, link: EngineLink, moved: MovedStream, problem: ServerError) -> None:
        moved.moved(problem)
        self.counts[link.name]["streams_moved_away_total"] += 1

    def _count(self, choice: Choice) -> None:
        reason = choice.reason.replace(":", "").replace(" ", "_")
        self.counts[choice.engine][f"routed_{reason}_total"] += 1

    def _reported(self, link: EngineLink, report: Report) -> None:
        if link.name not in self._links:
            return
        if link.welcome is not None and report.status != "loading":
            model = ModelInfo(
                link.welcome.model,
                link.welcome.vocabulary,
                link.welcome.max_model_len,
                link.welcome.has_tokenizer,
                welcome_templates(link.welcome),
                link.welcome.sampling_defaults,
                link.welcome.admin,
                self._created,
                link.welcome.max_adapter_slots,
            )
            if self._model is None or not self._is_served_elsewhere(self._model, link):
                self._model = model
                self._remembered.clear()
            elif (model.name, model.vocabulary) != (self._model.name, self._model.vocabulary):
                if self._book.status(link.name) != "dead":
                    _log.error(
                        "%s serves %s, not %s as the others; it is not used", link.name, model.name, self._model.name
                    )
                report = Report("dead", report.asked)
        self._book.report(link.name, report, time.monotonic())
        self._dispatch.wake()

    def _is_served_elsewhere(self, model: ModelInfo, newcomer: EngineLink) -> bool:
        """Whether another engine serves this model: then the newcomer has to."""
        others = [link.welcome for link in self._links.values() if link is not newcomer and link.welcome is not None]
        return any((each.model, each.vocabulary) == (model.name, model.vocabulary) for each in others)

    def _lost(self, link: EngineLink, problem: Exception) -> None:
        if link.name not in self._links:
            return
        if not self._stopping:
            _log.warning("%s is lost: %s", link.name, problem)
        self._book.lost(link.name, time.monotonic())
        self._dispatch.wake()

    # -- what they are ---------------------------------------------------------------------------------------------

    async def model(self) -> ModelInfo:
        """See `Engines`."""
        model = self._model or await self._dispatch.first(lambda: self._model)
        if model is None:
            loading = any(link.status == "loading" for link in self._links.values())
            if loading:
                raise OverloadedError("the model is being loaded", "loading", 1.0)
            raise EngineDeadError("no engine serves at this moment", "engine_dead", 1.0)
        return model

    async def health(self) -> EngineHealth:
        """See `Engines`."""
        if not self._links:
            return EngineHealth("idle", "no engine runs; a request starts one")
        each = {name: link.status for name, link in self._links.items()}
        best = min(self._links.values(), key=lambda link: _ORDER.index(link.status))
        told = best.health
        if told is None:
            return EngineHealth("dead", engines=each)
        return EngineHealth(told.status, told.phase, told.progress, each)

    async def stats(self) -> dict[str, dict[str, int | float]]:
        """See `Engines`. Next to what an engine says: why requests were sent to it, how many streams left it when it
        died.
        """
        fresh = await self._of_all(lambda link: link.client.stats(1.0))
        return {name: told | self.counts[name] for name, told in fresh.items() if isinstance(told, dict)}

    # -- adapters --------------------------------------------------------------------------------------------------

    async def adapters(self) -> list[AdapterCard]:
        """See `Engines`; as they were at the last look, at most a second ago. While no engine has told of its own,
        those that the last ones had.
        """
        names = {
            *self._remembered,
            *self._catalogue.offers,
            *(name for link in self._links.values() for name in link.adapters),
        }
        return [card for name in sorted(names) if (card := self._card(name)) is not None]

    async def adapter(self, name: str) -> AdapterCard | None:
        """See `Engines`; as in `adapters`."""
        return self._card(name)

    def _card(self, name: str) -> AdapterCard | None:
        gone, offer, links = self._catalogue.gone(name), self._catalogue.offers.get(name), self._links.values()
        told = {} if gone else {link: link.adapters[name] for link in links if name in link.adapters}
        if not told:
            if not gone and name in self._remembered and all(link.welcome is None for link in links):
                return self._remembered[name]
            return None if offer is None else AdapterCard(name, offer.rank, "", chat_template=None)
        first = next(iter(told.values()))
        return AdapterCard(
            name,
            first.rank,
            first.content,
            {link.name: "disk" if link.lost_at is not None else info.where for link, info in told.items()},
            sum(info.running for info in told.values()),
            sum(info.waiting for info in told.values()),
            first.chat_template,
        )

    async def chat_templates(self, name: str) -> ChatTemplates:
        """See `Engines`."""
        choice = self._book.choose(name, (), time.monotonic())
        if choice is None:
            raise EngineDeadError("no engine serves at this moment", "engine_dead", 1.0)
        link = self._links[choice.engine]
        await link.bring(name, self._fetch)
        return await link.client.chat_templates(name)

    def offer(self, offers: Mapping[str, Offer]) -> None:
        """Adapters that requests may name besides; an engine loads one when its first request comes. One that is not
        offered any more takes no new request, and is unloaded when those under way are finished.
        """
        self._catalogue.offered(offers)
        self._dispatch.wake()

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        """See `Engines`. An engine that is down gets it when it is back. When one refuses it, the others keep what they
        had, except for one that was to be replaced.
        """
        had = {link.name for link in self._links.values() if name in link.adapters}
        again = replace or self._catalogue.gone(name)
        done = await self._of_all(lambda link: link.client.load_adapter(name, path, again, LOAD_SECONDS))
        failed = [
            each for each in done.values() if isinstance(each, Exception) and not isinstance(each, EngineDeadError)
        ]
        loaded = [self._links[place] for place, each in done.items() if each is None]
        if failed:
            if not replace:
                for link in loaded:
                    if link.name not in had:
                        with contextlib.suppress(ServerError, RequestError, TimeoutError):
                            await link.client.unload_adapter(name)
            raise failed[0]
        if not loaded:
            raise EngineDeadError("no engine serves at this moment", "engine_dead", 1.0)
        content = next(info.content for info in await loaded[0].client.list_adapters() if info.name == name)
        self._catalogue.loaded(name, path, content)
        await self._look()

    async def unload_adapter(self, name: str) -> None:
        """See `Engines`. No new request may name it from now on; those under way are finished."""
        if self._catalogue.gone(name) or not any(name in link.adapters for link in self._links.values()):
            raise ServerError(f"adapter {name!r} is not known", "unknown_adapter")
        if self._model is not None and not self._model.admin:
            raise ServerError(
                "adapters cannot be loaded or unloaded through these engines; start them with --allow-adapter-loading",
                "forbidden",
            )
        self._catalogue.unloaded(name)
        await self._look()

    async def _look(self) -> None:
        await self._of_all(lambda link: link.look())

    # -- text ------------------------------------------------------------------------------------------------------

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Engines`."""
        return await self._of_one(lambda link: link.client.tokenize(text, add_special_tokens))

    async def detokenize(self, token_ids: list[int]) -> str:
        """See `Engines`."""
        return await self._of_one(lambda link: link.client.detokenize(token_ids))

    async def _of_one(self, ask: Callable[[EngineLink], Awaitable[T]]) -> T:
        """The answer of the least loaded engine, or of another one if it dies meanwhile."""
        problem: Exception = EngineDeadError("no engine serves at this moment", "engine_dead", 1.0)
        tried: set[str] = set()
        while (choice := self._book.choose(None, (), time.monotonic(), tried)) is not None:
            tried.add(choice.engine)
            try:
                return await ask(self._links[choice.engine])
            except (EngineDeadError, TimeoutError) as death:
                problem = death
        raise problem

    async def _of_all(self, ask: Callable[[EngineLink], Coroutine[Any, Any, T]]) -> dict[str, T | Exception]:
        """What each engine that can be reached answers, or the error that it answers with."""
        links = [link for link in self._links.values() if link.lost_at is None]
        answers = await asyncio.gather(*(ask(link) for link in links), return_exceptions=True)
        told: dict[str, T | Exception] = {}
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            told[link.name] = answer
        return told
