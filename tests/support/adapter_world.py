"""Engines without sockets behind real routers, in virtual time: `AdapterRequests` and `Router` are the real ones.

Calls take random times and fail when a connection is cut or the engine ends. A request's answer is the content hash of
the version that the engine would use.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.errors import EngineDeadError
from sidestream.runtime.client.async_client import AsyncClient
from sidestream.runtime.client.requests import exception_of
from sidestream.runtime.gateway.router import adapter_catalogue, adapter_changes, dispatch, engine_link, router
from sidestream.runtime.gateway.router.load_balancer import LoadBalancer
from sidestream.runtime.protocol import messages
from sidestream.runtime.protocol.adapter_map import FIRST, AdapterEntry, HybridClock, Stamp
from sidestream.runtime.protocol.messages import Chunk, Error, Health, Usage, Welcome
from sidestream.runtime.server import adapter_requests
from sidestream.runtime.server.adapter_requests import AdapterRequests
from sidestream.runtime.server.connections import Connections
from sidestream.runtime.server.gpu_link import Load, LoadedAdapter, LoadReply, Ready, Unload
from sidestream.runtime.server.open_requests import OpenRequests
from sidestream.runtime.server.server_state import ServerState
from sidestream.runtime.server.stepper import Stepper
from sidestream.runtime.server.submissions import missing_adapter

EPOCH = 1_700_000_000.0
SKEW = 0.05
RETRY_SECONDS = 4.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Engine:
    """One engine. `saved` outlives its process; `unreadable` are directories that it cannot read; `/a-1` and `/a-2`
    are versions of `/a`.
    """

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.saved: dict[str, AdapterEntry] = {}
        self.unreadable: set[str] = set()
        self.clients: list[Client] = []
        self.life = self.gpu_life = 0
        self.up = False
        self.start()

    def start(self) -> None:
        self.up = True
        self.life += 1
        self.gpu_life += 1
        self.stepper = self._start_gpu()
        self.state = ServerState(self.stepper)
        connections: Any = Connections(None, bytes(16))  # type: ignore[arg-type]
        connections.send = lambda client, message: client.set_result(message) if not client.done() else None
        self.adapters = AdapterRequests(
            self.state,
            connections,
            OpenRequests(connections),
            True,
            ["/"],
            self.saved.values(),
            self.keep,
        )

    def _start_gpu(self) -> Stepper:
        self._numbers = itertools.count()
        served = [
            LoadedAdapter(entry.name, next(self._numbers), 8, entry.content)
            for entry in self.saved.values()
            if entry.path is not None and self.reads(entry.path)
        ]
        ready = Ready(97, 40, PAGE_SIZE, 320, 4, 4096, 4, [], served)
        return Stepper(ready, SimpleNamespace(send=self._send, submit=None), None)  # type: ignore[arg-type]

    def restart_gpu(self, seconds: float) -> None:
        """Let the GPU process die. The server is loading until another one is ready."""
        self.gpu_life += 1
        self.stepper.close()
        self.state.stepper = None
        self.adapters.engine_died(None)
        for client in self.clients:
            client.cut()
        self.world.loop.call_later(seconds, self._gpu_ready, self.gpu_life)

    def _gpu_ready(self, life: int) -> None:
        if life == self.gpu_life and self.up:
            self.stepper = self.state.stepper = self._start_gpu()

    def reads(self, path: str) -> bool:
        return path.partition("-")[0] not in self.unreadable

    def keep(self, entry: AdapterEntry) -> None:
        self.saved[entry.name] = entry

    def stop(self) -> None:
        self.up = False
        self.stepper.close()
        for client in self.clients:
            client.cut()

    def _send(self, notice: Any) -> None:
        if isinstance(notice, (Load, Unload)):
            self.world.loop.call_later(self.world.source.choice((0.01, 0.3, 2.0)), self._reply, notice, self.gpu_life)

    def _reply(self, notice: Load | Unload, life: int) -> None:
        if life != self.gpu_life or not self.up:
            return
        reply = LoadReply(notice.ticket)
        if isinstance(notice, Load):
            if not self.reads(notice.path):
                reply = LoadReply(notice.ticket, problem=f"adapter {notice.name!r}: No such file or directory")
            else:
                adapter = LoadedAdapter(notice.name, next(self._numbers), 8, f"content of {notice.path}")
                reply = LoadReply(notice.ticket, adapter)
        self.adapters.receive_reply(reply)

    def call(self, message: Any, answer: "asyncio.Future[Any]") -> None:
        if isinstance(message, (messages.LoadAdapter, messages.UnloadAdapter)):
            self.adapters.change(answer, message)  # type: ignore[arg-type]
        elif isinstance(message, messages.ListAdapters):
            answer.set_result(self.adapters.list(message))


class Client(AsyncClient):
    """A client of an engine whose messages take a while."""

    def __init__(self, world: "World", engine: Engine, on_lost: Any = None) -> None:
        self.world, self.engine, self.on_lost = world, engine, on_lost
        self.connected = 0
        self.blocked_until = 0.0
        self._waiting: set[asyncio.Future[Any]] = set()
        engine.clients.append(self)

    def cut(self, seconds: float = 0.0) -> None:
        """Break the connection."""
        self.blocked_until = self.world.loop.time() + seconds
        problem = EngineDeadError("cut", "engine_dead")
        for answer in list(self._waiting):
            if not answer.done():
                answer.set_exception(problem)
        if self.connected and self.on_lost is not None:
            self.on_lost(problem)
        self.connected = 0

    async def _delay(self) -> None:
        life = self.engine.life
        await asyncio.sleep(self.world.source.choice((0.0, 0.001, 0.02)))
        if not self.engine.up or life != self.engine.life or self.world.loop.time() < self.blocked_until:
            raise EngineDeadError("not reachable", "engine_dead")

    async def connect(self) -> Welcome:
        await self._delay()
        self.connected = self.engine.life
        return Welcome("0", "fake", 97, 320, 4, 4, False, True)

    async def health(self, timeout: float | None = None) -> Health:
        await self._delay()
        return self.engine.state.health(0)

    async def stats(self, timeout: float | None = None) -> dict[str, int | float]:
        await self._delay()
        return {}

    async def close(self) -> None:
        pass

    async def _call(self, message: Any, reply: Any, timeout: float | None, **fields: Any) -> Any:
        await self.connect()
        answer = self.world.loop.create_future()
        self._waiting.add(answer)
        try:
            self.engine.call(msgspec.convert({"call": 1} | msgspec.to_builtins(fields), message), answer)
            found = await answer
            await self._delay()
        finally:
            self._waiting.discard(answer)
        if isinstance(found, Error):
            raise exception_of(found)
        return found

    async def stream_lists(self, prompt: Any, params: Any, adapter: str, **fields: Any) -> Any:  # type: ignore[override]
        await self._delay()
        if self.engine.state.stepper is None:
            raise exception_of(Error("loading", "the model is being loaded"))
        missing = missing_adapter(self.engine.stepper, adapter, fields["adapter_content"])
        if missing is not None:
            raise exception_of(Error(*missing))
        content = self.engine.stepper.adapters[adapter].content
        await self._delay()
        yield [Chunk("r", 0, 0, content, [1], "stop", usage=Usage(1, 1))]


class World:
    """`engines` engines and `gateways` routers."""

    def __init__(self, engines: int, gateways: int, seed: int) -> None:
        self.source = random.Random(seed)
        self.loop = VirtualLoop()
        self._nodes = itertools.count()
        self.engines = {f"ipc:///e{number}": Engine.__new__(Engine) for number in range(engines)}
        self._patches = mock.patch.multiple(
            engine_link, AsyncClient=self._client, time=self._time(), RETRY_SECONDS=RETRY_SECONDS
        )
        self._more = [
            mock.patch.object(dispatch, "time", self._time()),
            mock.patch.object(router, "time", self._time()),
            mock.patch.object(adapter_changes, "time", self._time()),
            mock.patch.object(adapter_catalogue, "HybridClock", self._clock),
            mock.patch.object(adapter_requests, "HybridClock", self._clock),
        ]
        for patch in [self._patches, *self._more]:
            patch.start()
        for name, engine in self.engines.items():
            engine.__init__(self, name)  # type: ignore[misc]
        self.routers = [
            router.Router(
                list(self.engines), patience_seconds=20.0, balancer=LoadBalancer(source=random.Random(seed + number))
            )
            for number in range(gateways)
        ]
        for each in self.routers:
            self.loop.run_until_complete(each.start())
        self.advance(2.0)

    def _client(self, address: str, **options: Any) -> Client:
        return Client(self, self.engines[address], options.get("on_lost"))

    def _clock(self, node: str, last: Stamp = FIRST) -> HybridClock:
        skew = self.source.uniform(-SKEW, SKEW)
        node = f"{node.partition('-')[0]}-{next(self._nodes)}"  # without random bytes
        return HybridClock(node, lambda: EPOCH + self.loop.time() + skew, last)

    def _time(self) -> Any:
        return SimpleNamespace(monotonic=self.loop.time, time=lambda: EPOCH + self.loop.time())

    def advance(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def client(self, engine: Engine) -> Client:
        return Client(self, engine)

    def close(self) -> None:
        for each in self.routers:
            self.loop.run_until_complete(each.close())
        for engine in self.engines.values():
            engine.stepper.close()
        self.loop.close()
        for patch in [self._patches, *self._more]:
            patch.stop()


@contextmanager
def world(engines: int, gateways: int, seed: int = 0) -> Iterator[World]:
    made = World(engines, gateways, seed)
    try:
        yield made
    finally:
        made.close()
