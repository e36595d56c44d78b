"""A starlette application that only streams bytes under the same uvicorn, to compare the gateway with.

`python -m sidestream.tools.bench.serving.bare_app EVENT STEP_SECONDS` prints its address and streams EVENT until its
input ends: to each client at every step, or as fast as it reads if STEP_SECONDS is 0.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from ....runtime.gateway.server_process import listen, server_config, url_of
from ....runtime.gateway.settings import GatewaySettings


class Steps:
    """One timer for all streams, like the steps of an engine."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: list[asyncio.Future[None]] = []
        self._next: float | None = None

    async def end(self) -> None:
        """Wait for the end of the present step."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.time() + self._seconds
            loop.call_at(self._next, self._tick)
        ended = loop.create_future()
        self._waiting.append(ended)
        await ended

    def _tick(self) -> None:
        waiting, self._waiting = self._waiting, []
        for ended in waiting:
            if not ended.done():  # its client may have disconnected
                ended.set_result(None)
        loop = asyncio.get_running_loop()
        assert self._next is not None  # set by the first stream
        self._next = max(loop.time(), self._next + self._seconds)
        loop.call_at(self._next, self._tick)


def bare_app(event: bytes, step_seconds: float) -> Starlette:
    """Return an application that answers every POST with the event, without end.

    An event is sent every `step_seconds`, or as fast as the client reads if that is 0.
    """
    steps = Steps(step_seconds)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield event
            await (steps.end() if step_seconds else asyncio.sleep(0))

    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(endless(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])


def main() -> None:
    """Serve until standard input ends."""
    settings = GatewaySettings(port=0)
    app = bare_app(sys.argv[1].encode() + b"\n\n", float(sys.argv[2]))
    server = uvicorn.Server(server_config(app, settings, 0.0))

    def stop() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop, daemon=True).start()
    with listen(settings.host, settings.port) as listener:
        print(url_of(listener), flush=True)
        asyncio.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    main()
