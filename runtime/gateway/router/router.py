"""`Router` implements `Engines` for one or several engines."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...api.adapter_sum import sum_parts
from ...api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from ...protocol.chat_templates import welcome_templates
from ...protocol.messages import Chunk
from ...text.chat_files import ChatTemplates
from ..interfaces import (
    AdapterCard,
    AdapterUpload,
    EngineRequest,
    GatewayHealth,
    HealthStatus,
    ModelInfo,
    PauseMode,
    UpdatedAdapter,
)
from .adapter_catalogue import AdapterCatalogue, OfferedAdapter
from .adapter_changes import AdapterChanges
from .adapter_updates import AdapterUpdates
from .dispatch import (
    ADAPTER_MISMATCH,
    BUSY,
    PATIENCE_SECONDS,
    Dispatcher,
    Refusals,
)
from .engine_link import NOT_SERVING, POLL_SECONDS, EngineLink, query_all
from .load_balancer import EngineReport, LoadBalancer
from .prefill import PrefillStage, prompt_of
from .prefix_index import prefix_keys
from .stream_migration import MigratingStream

_log = logging.getLogger(__name__)
_RETRIED_ELSEWHERE = BUSY | NOT_SERVING
_BEST_FIRST: tuple[HealthStatus, ...] = ("ok", "stalled", "loading", "draining", "dead")

T = TypeVar("T")


class Router:
    """Engines of one model at `addresses`, named engine-0, engine-1 and so on. `add` and `remove` change them.

    keys                folder of client keys from `sidestream keys curve`
    patience_seconds    time that a request waits for an engine to start or restart
    request_engine      starts an engine, which `add` adds later; called repeatedly while a request waits and there is
                        none. None: no more engines can be started
    prefill_engines     number of the first engines that only compute prompts. They are named prefill-0 and so on, the
                        others decode-0 and so on
    prefill_min_tokens  see `PrefillStage`

    If the engine of a stream dies, the stream continues in another engine, or in the same one after its restart. The
    consumer only notices a pause.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: str | Path | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        balancer: LoadBalancer | None = None,
        request_engine: Callable[[], None] | None = None,
        prefill_engines: int = 0,
        prefill_min_tokens: int = 0,
    ) -> None:
        if not addresses and request_engine is None:
            raise ValueError("a router needs at least one engine's address")
        self._keys, self._poll_seconds = keys, poll_seconds
        self._balancer = balancer or LoadBalancer()
        self._catalogue = AdapterCatalogue()
        self._links: dict[str, EngineLink] = {}
        self._started = self._holds_requests = self._paused = False
        self._leaving: dict[EngineLink, asyncio.Task[None]] = {}
        self._changes = AdapterChanges(self._links, self._catalogue, poll_seconds, lambda: self._dispatch.no_engine())
        self._updates = AdapterUpdates(
            self._links, self._catalogue, self._changes, keys, lambda: self._dispatch.no_engine()
        )
        self._former_adapters: dict[str, AdapterCard] = {}  # of the engine that was removed last
        self._created = int(time.time())
        self._model: ModelInfo | None = None
        self._dispatch = Dispatcher(self._balancer, self._links, self._catalogue, patience_seconds, request_engine)
        self._prefill = PrefillStage(self._balancer, self._links, prefill_min_tokens)
        for number, address in enumerate(addresses[:prefill_engines]):
            self.add(f"prefill-{number}", address, is_prefill=True)
        for number, address in enumerate(addresses[prefill_engines:]):
            self.add(f"decode-{number}" if prefill_engines else f"engine-{number}", address)

    async def start(self) -> None:
        self._started = True
        for link in self._links.values():
            link.start()

    async def close(self) -> None:
        leaving = list(self._leaving.values())
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def expect_shutdown(self) -> None:
        self._dispatch.stopping = True
        self._dispatch.notify()

    # -- engines ---------------------------------------------------------------------------------------------------

    def add(self, name: str, address: str, is_prefill: bool = False) -> None:
        """Add an engine. Raises ValueError if the name is taken, AddressError for an invalid address. `is_prefill`: it
        only computes prompts.
        """
        callbacks = self._on_report, self._on_lost, self._before_use
        link = EngineLink(name, address, self._keys, self._catalogue, *callbacks, self._poll_seconds, is_prefill)
        self._balancer.add(name, is_prefill)
        self._links[name] = link
        if self._started:
            link.start()

    async def _before_use(self, link: EngineLink) -> None:
        """Get all changes of adapters, and pause a new engine if the others are paused."""
        await self._changes.pull_all()
        others = [each for each in self._links.values() if each is not link and each.lost_at is None]
        if self._paused and all(each.stats.get("paused") for each in others):  # not resumed by another gateway
            await link.client.pause(False)

    def remove(self, name: str) -> None:
        """Remove an engine that is stopping: it gets no new requests, and its streams continue until they end."""
        link = self._links.pop(name)
        self._balancer.remove(name)
        if link.welcome is not None:
            infos = link.adapters.values()
            self._former_adapters = {info.name: AdapterCard(info.name, info.rank, info.content) for info in infos}
        self._leaving[link] = asyncio.create_task(self._close_when_idle(link))
        self._dispatch.notify()

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """Engine name -> counters of routing reasons and of streams that moved away, also of removed engines that have
        streams.
        """
        return {link.name: link.counts for link in [*self._leaving, *self._links.values()]}

    def _is_current(self, link: EngineLink) -> bool:
        """Return whether a link was not removed; another engine may have its name."""
        return self._links.get(link.name) is link

    async def _close_when_idle(self, link: EngineLink) -> None:
        try:
            while link.streams:
                await self._dispatch.wait_for_change(None)
        finally:
            self._leaving.pop(link, None)
            await link.close()

    # -- requests --------------------------------------------------------------------------------------------------

    async def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        """See `Engines`. Moves the request to another engine if its own dies, stops, or is too busy."""
        stream = MigratingStream(request)
        # prefixes choose between engines, so a single engine needs none
        shares_base = self._shares_base(request.adapter)
        chain = None if shares_base else request.adapter
        keys = prefix_keys(request.prompt, chain) if len(self._links) > 1 else []
        refusals: Refusals = {}
        if self._holds_requests:
            with self._dispatch.waiting():
                while self._holds_requests:
                    await self._dispatch.wait_for_change(stream.seconds_left())
        while not stream.ended:
            required = stream.required_content or self._catalogue.required_content(request.adapter)
            async with self._prefill.held_pages(request, keys, stream, required, shares_base) as held:
                decision = await self._dispatch.choose(request, keys, stream, refusals, shares_base)
                link = self._links[decision.engine]
                link.count_routing(decision.reason)
                received = False
                required = stream.required_content or self._catalogue.required_content(request.adapter)
                link.streams += 1
                self._balancer.start_request(link.name, request.adapter, keys, time.monotonic())
                try:
                    for name, _ in () if request.adapter is None else sum_parts(request.adapter):
                        if name not in self._catalogue.offered:
                            continue
                        await link.load_offered(name)
                        required = stream.required_content or self._catalogue.required_content(request.adapter)
                    lists = link.client.stream_lists(
                        prompt_of(request),
                        request.params,
                        request.adapter,
                        priority=request.priority,
                        deadline_seconds=stream.seconds_left(),
                        request_id=request.request_id,
                        stream=stream.engine_streams or held is not None,  # to notice that the pages are read
                        continues=stream.continuations(),
                        when_accepted=stream.on_accepted,
                        owner=request.owner,
                        adapter_content=required,
                        direct=None if request.direct is None else stream.offer_direct,
                        scored=request.scored,
                        kv_pages=None if held is None else held.pages,
                    )
                    async with contextlib.aclosing(lists):
                        async for chunks in lists:
                            received = True
                            if held is not None:
                                await held.release()
                            chunks = stream.receive(chunks)
                            if chunks:
                                refusals.clear()
                                yield chunks
                except EngineDeadError as problem:
                    link.on_request_error(problem)
                    self._migrate(link, stream, problem)
                except OverloadedError as problem:
                    if problem.code in NOT_SERVING and self._is_current(link):
                        self._balancer.set_status(link.name, problem.code, time.monotonic())
                    link.on_request_error(problem)
                    if problem.code not in _RETRIED_ELSEWHERE or received:
                        self._migrate(link, stream, problem)
                    if problem.code in _RETRIED_ELSEWHERE:
                        refusals[link.name] = problem
                except RequestError as problem:
                    if problem.code not in ADAPTER_MISMATCH:
                        raise
                    link.on_request_error(problem)
                    if received or (problem.code == "adapter_changed" and not required):
                        self._migrate(link, stream, ServerError(str(problem), problem.code))
                    elif stream.required_content or not await self._has_changed(link, request.adapter, required):
                        refusals[link.name] = ServerError(str(problem), problem.code)
                finally:
                    link.streams -= 1
                    if self._is_current(link):
                        self._balancer.finish_request(link.name, stream.ended, time.monotonic())
                    self._dispatch.notify()

    def _shares_base(self, adapter: str | None) -> bool:
        """Return whether the adapter is an aLoRA: most pages of its prompts are the base model's."""
        return adapter is not None and any(
            link.adapters[adapter].invocation for link in self._links.values() if adapter in link.adapters
        )

    async def _has_changed(self, link: EngineLink, adapter: str | None, required: str) -> bool:
        """Return whether another version answers requests, after a look at the changes of the engine that refused."""
        if self._catalogue.required_content(adapter) == required:
            with contextlib.suppress(ServerError, RequestError, TimeoutError):
                await link.pull()
        return self._catalogue.required_content(adapter) != required

    def _migrate(self, link: EngineLink, stream: MigratingStream, problem: ServerError) -> None:
        stream.migrate(problem)
        link.counts["streams_moved_away_total"] += 1

    def _on_report(self, link: EngineLink, report: EngineReport) -> None:
        if not self._is_current(link):
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
                link.welcome.dtype,
                link.welcome.max_logprobs,
                link.welcome.logprobs_mode,
                tuple(link.welcome.eos_token_ids),
            )
            if self._model is None or not self._is_served_elsewhere(self._model, link):
                self._model = model
                self._former_adapters.clear()
            elif (model.name, model.vocabulary) != (self._model.name, self._model.vocabulary):
                if self._balancer.status(link.name) != "dead":
                    _log.error(
                        "%s serves %s, but the other engines serve %s; it is not used",
                        link.name,
                        model.name,
                        self._model.name,
                    )
                report = EngineReport("dead", report.queried_at)
        self._balancer.report(link.name, report, time.monotonic())
        self._dispatch.notify()

    def _is_served_elsewhere(self, model: ModelInfo, new_link: EngineLink) -> bool:
        """Return whether another engine serves this model. Then a new engine must serve it too."""
        others = [link.welcome for link in self._links.values() if link is not new_link and link.welcome is not None]
        return any((each.model, each.vocabulary) == (model.name, model.vocabulary) for each in others)

    def _on_lost(self, link: EngineLink, problem: Exception) -> None:
        if not self._is_current(link):
            return
        if not self._dispatch.stopping:
            _log.warning("lost connection to %s: %s", link.name, problem)
        self._balancer.mark_lost(link.name, time.monotonic())
        self._dispatch.notify()

    # -- model and health -----------------------------------------------------------------------------------------

    async def model(self) -> ModelInfo:
        model = self._model or await self._dispatch.wait_until_known(lambda: self._model)
        if model is None:
            loading = any(link.status == "loading" for link in self._links.values())
            if loading:
                raise OverloadedError("the model is loading", "loading", 1.0)
            raise self._dispatch.no_engine()
        return model

    async def health(self) -> GatewayHealth:
        statuses = {name: link.status for name, link in self._links.items()}
        if self._dispatch.stopping:
            return GatewayHealth("draining", engines=statuses)
        if not self._links:
            return GatewayHealth("idle", "no engine is running; a request starts one")
        answering = [link for link in self._links.values() if not link.is_prefill]
        best = min(answering or self._links.values(), key=lambda link: _BEST_FIRST.index(link.status))
        health = best.health
        if health is None:
            return GatewayHealth("dead", engines=statuses)
        return GatewayHealth(health.status, health.phase, health.progress, statuses)

    async def stats(self) -> dict[str, dict[str, int | float]]:
        """See `Engines`. Includes `counts`."""
        answers = await query_all(self._links.values(), lambda link: link.client.stats(1.0))
        counts = self.counts
        return {name: stats | counts[name] for name, stats in answers.items() if isinstance(stats, dict)}

    def last_stats(self) -> dict[str, dict[str, int | float]]:
        """See `Engines`."""
        return {name: link.stats for name, link in self._links.items() if link.lost_at is None}

    async def pause(self, mode: PauseMode) -> None:
        """See `Engines`. With `wait`, new requests wait here until those of this gateway have ended."""
        self._holds_requests = mode == "wait"
        try:
            while mode == "wait" and any(link.streams for link in [*self._links.values(), *self._leaving]):
                if not self._holds_requests:  # resumed, or paused in another mode
                    return
                await self._dispatch.wait_for_change(None)
            self._paused = True
            await self._call_all(lambda link: link.client.pause(mode == "abort"))
        except BaseException:
            self._paused = False
            raise
        finally:
            self._holds_requests = False
            self._dispatch.notify()

    async def resume(self) -> None:
        """See `Engines`."""
        self._holds_requests = self._paused = False
        self._dispatch.notify()
        await self._call_all(lambda link: link.client.resume())

    async def _call_all(self, call: Callable[[EngineLink], Coroutine[Any, Any, None]]) -> None:
        """Call all connected engines, and raise the first error. Raises EngineDeadError if there is none."""
        answers = await query_all(self._links.values(), call)
        if not answers:
            raise self._dispatch.no_engine()
        for answer in answers.values():
            if answer is not None:
                raise answer

    # -- adapters --------------------------------------------------------------------------------------------------

    async def adapters(self) -> list[AdapterCard]:
        """See `Engines`. The state is up to a second old; without a report yet, that of former engines."""
        names = {
            *self._former_adapters,
            *self._catalogue.offered,
            *(name for link in self._links.values() for name in link.adapters),
        }
        return [card for name in sorted(names) if (card := self._card(name)) is not None]

    async def adapter(self, name: str) -> AdapterCard | None:
        """See `Engines`. As old as in `adapters`; for an unknown name, the engines are queried first."""
        card = self._card(name)
        if card is None:
            await self._changes.look()
            card = self._card(name)
        return card

    def _card(self, name: str) -> AdapterCard | None:
        is_unloaded, offered = self._catalogue.is_unloaded(name), self._catalogue.offered.get(name)
        links = self._links.values()
        infos = {} if is_unloaded else {link: link.adapters[name] for link in links if link.serves(name)}
        if not infos:
            if not is_unloaded and name in self._former_adapters and all(link.welcome is None for link in links):
                return self._former_adapters[name]
            return None if offered is None else AdapterCard(name, offered.rank, "", chat_template=None)
        first, change = next(iter(infos.values())), self._catalogue.changes.loaded(name)
        return AdapterCard(
            name,
            first.rank,
            first.content,
            {link.name: "disk" if link.lost_at is not None else info.where for link, info in infos.items()},
            sum(info.running for info in infos.values()),
            sum(info.waiting for info in infos.values()),
            first.chat_template,
            "" if change is None or change.path is None else change.path,
        )

    async def chat_templates(self, name: str) -> ChatTemplates:
        decision = self._balancer.choose(name, (), time.monotonic())
        if decision is None:
            raise self._dispatch.no_engine()
        link = self._links[decision.engine]
        await link.load_offered(name)
        return await link.client.chat_templates(name)

    def set_offered(self, offered: Mapping[str, OfferedAdapter]) -> None:
        """Replace the adapters that engines load at their first request.

        An adapter that is no longer offered gets no new requests, and is unloaded when its open requests end.
        """
        self._catalogue.set_offered(offered)
        self._dispatch.notify()

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        await self._changes.load(name, path, replace)

    async def unload_adapter(self, name: str) -> None:
        await self._changes.unload(name, lambda: self._card(name) is not None)

    async def update_adapter(self, name: str, upload: AdapterUpload) -> UpdatedAdapter:
        return await self._updates.update(name, upload)

    # -- text ------------------------------------------------------------------------------------------------------

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._query_one(lambda link: link.client.tokenize(text, add_special_tokens))

    async def token_spellings(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, str]]:
        return await self._query_one(lambda link: link.client.token_spellings(text, add_special_tokens))

    async def token_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, tuple[int, int]]]:
        return await self._query_one(lambda link: link.client.token_offsets(text, add_special_tokens))

    async def detokenize(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return await self._query_one(
            lambda link: link.client.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def _query_one(self, query: Callable[[EngineLink], Awaitable[T]]) -> T:
        """Return the answer of the least loaded engine, or of the next one if that dies."""
        problem: Exception = self._dispatch.no_engine()
        tried: set[str] = set()
        while (decision := self._balancer.choose(None, (), time.monotonic(), tried)) is not None:
            tried.add(decision.engine)
            try:
                return await query(self._links[decision.engine])
            except (EngineDeadError, TimeoutError) as death:
                problem = death
        raise problem
