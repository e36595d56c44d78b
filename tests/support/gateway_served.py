"""A gateway that a browser can reach: engines that answer what the test says, on a socket of the loopback."""

import asyncio
import math
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.interfaces import AdapterCard, Admission, EngineRequest, GatewayHealth, ModelInfo
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.runtime.protocol.messages import Chunk

from .gateway import FakeEngines


class LiveEngines(FakeEngines):
    """Two engines with numbers that a test may change; an answer's tokens come `pause` seconds apart, and no more than
    `most` of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pause, self.most = 0.01, math.inf
        self.info = ModelInfo("base", 256, 4096, True)
        self.status = GatewayHealth("ok", engines={"gpu-0": "ok", "gpu-1": "loading"})
        self.cards = [
            AdapterCard("pirate", 8, "aa", {"gpu-0": "gpu", "gpu-1": "cpu"}),
            AdapterCard("shout", 4, "bb", {"gpu-0": "disk"}),
        ]
        self.numbers: dict[str, int | float] = {
            "on_gpu": 1,
            "tokens_total": 1000, "requests_running": 3, "requests_waiting": 5, "pages": 400, "pages_in_use": 100,
            "adapters_resident": 1, "adapter_hits_total": 10, "adapter_misses_total": 2, "adapter_evictions_total": 1,
            "preemptions_total": 0,
        }  # fmt: skip

    async def stats(self) -> dict[str, Mapping[str, int | float]]:  # type: ignore[override]
        return {"gpu-0": dict(self.numbers)}

    async def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        count = 0
        async for chunks in super().stream(request):
            await asyncio.sleep(self.pause)
            while count >= self.most:
                await asyncio.sleep(0.01)
            yield chunks
            count += 1


@contextmanager
def served(engines: FakeEngines, admission: Admission | None = None, metrics: Metrics | None = None) -> Iterator[str]:
    """The address of a gateway over these engines, which counts in `metrics`."""
    app = build_app(engines, admission or NoAuth(), metrics or Metrics(), GatewaySettings())  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(60)
