"""The limit that `sidestream bench gateway` compares with: a starlette application that streams bytes and does nothing
else, under the same uvicorn.

`python -m sidestream.tools.bench.serving.bare_app EVENT` prints its address, and streams EVENT until its input ends.
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

from ....runtime.gateway.serving.process import listen, server_config, url_of
from ....runtime.gateway.settings import GatewaySettings


def bare_app(event: bytes) -> Starlette:
    """Every POST is answered with the event, again and again, as fast as the client takes it."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield event
            await asyncio.sleep(0)

    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(endless(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])


def main() -> None:
    """Serves until standard input ends."""
    settings = GatewaySettings(port=0)
    server = uvicorn.Server(server_config(bare_app(sys.argv[1].encode() + b"\n\n"), settings, 0.0))

    def stop() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop, daemon=True).start()
    with listen(settings.host, settings.port) as listener:
        print(url_of(listener), flush=True)
        asyncio.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    main()
