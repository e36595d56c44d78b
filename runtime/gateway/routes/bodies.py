"""A request's body: bounded, in time, decoded; and the client that waits for the answer."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from ..contracts import GatewayError
from ..settings import GatewaySettings
from .malformed import malformed

T = TypeVar("T")
_decoders: dict[type, Any] = {}


async def read_body(request: Request, shape: type[T], settings: GatewaySettings) -> T:
    """The body as `shape`.

    Raises GatewayError 413 for one that is too long, 408 for one that takes too long, 415 for one that is not called
    JSON, 400 for all else.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise GatewayError(415, "the body must be JSON; send Content-Type: application/json")
    data = await _read(request, settings)
    decoder = _decoders.get(shape)
    if decoder is None:
        decoder = _decoders[shape] = msgspec.json.Decoder(shape)
    try:
        return decoder.decode(data)
    except RecursionError:
        raise GatewayError(400, "the body is nested too deeply") from None
    except ValueError as problem:  # also UnicodeDecodeError, and every error of msgspec
        raise malformed(problem, data, shape) from None


async def _read(request: Request, settings: GatewaySettings) -> bytes:
    limit = settings.max_body_bytes
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdigit() and int(told[:20]) > limit:
        raise _too_long(limit)
    parts, length = [], 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                length += len(part)
                if length > limit:
                    raise _too_long(limit)
                parts.append(part)
    except TimeoutError:
        raise GatewayError(
            408, f"the body did not arrive within {settings.body_seconds:g} s", headers={"Connection": "close"}
        ) from None
    return b"".join(parts)


def _too_long(limit: int) -> GatewayError:
    return GatewayError(413, f"the body has more than {limit} bytes; send less in one request")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` returns, unless the client goes away before: then it is cancelled and ClientDisconnect is raised.
    `receive`: the request's, whose body has been read.
    """
    task = asyncio.current_task()
    assert task is not None  # a coroutine that runs has one
    cancelled_before, gone = task.cancelling(), False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() <= cancelled_before:  # nobody else wanted the end
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
