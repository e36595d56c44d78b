"""Reads, decompresses and decodes request bodies, and cancels work when the client disconnects."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from ..intake.body_decoder import LARGE_BODY_BYTES, Shapes, decode
from ..intake.body_memory import HeldBody
from ..interfaces import GatewayError
from ..settings import GatewaySettings

T = TypeVar("T")
BOM = b"\xef\xbb\xbf"
"""Mark of UTF-8 that some programs write at the start of a text."""
BODY_READ = "sidestream.body_read"
"""Key in a request's scope if its body was read to its end."""
PIECE_BYTES = 256 << 10
"""Most bytes that are decompressed at a time, so that the caller can check its limits between two pieces."""
_GZIP = 31
"""zlib's `wbits` of a gzip header and the largest window."""


async def read_body(
    request: Request,
    shape: Shapes[T],
    settings: GatewaySettings,
    held: HeldBody | None = None,
    decode_large: Callable[[bytes], Awaitable[T]] | None = None,
) -> T:
    """Return the body decoded as a struct type of `shape`. `held` counts its bytes.

    decode_large   decodes bodies above LARGE_BODY_BYTES; None: they are decoded here

    Raises GatewayError 413 if it is too large, also when decompressed, 408 if it arrives too slowly, 415 without a
    JSON Content-Type or for a Content-Encoding other than gzip, 429 if `held` is full, else 400.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise GatewayError(415, "the body must be JSON; send Content-Type: application/json")
    data = (await _read(request, settings, held)).removeprefix(BOM)
    if decode_large is not None and len(data) > LARGE_BODY_BYTES:
        return await decode_large(data)
    return decode(data, shape)


async def _read(request: Request, settings: GatewaySettings, held: HeldBody | None) -> bytes:
    limit = settings.max_body_bytes
    decompressor = body_decompressor(request.headers.get("content-encoding", ""))
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit():
        size = int(declared.lstrip("0")[:20] or 0)
        if size > limit:
            raise _too_large(limit)
        if held is not None:
            held.hold(size)
    parts, received, length = [], 0, 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                received += len(part)
                if received > limit:
                    raise _too_large(limit)
                for piece in (part,) if decompressor is None else decompressor.pieces(part):
                    length += len(piece)
                    if length > limit:
                        raise _too_large(limit)
                    if held is not None:
                        held.hold(length)
                    parts.append(piece)
                    if decompressor is not None:  # a few bytes may become many pieces: others run in between
                        await asyncio.sleep(0)
    except TimeoutError:
        raise GatewayError(
            408, f"the body did not arrive within {settings.body_seconds:g} s", headers={"Connection": "close"}
        ) from None
    request.scope[BODY_READ] = True
    if decompressor is not None:
        decompressor.check_end()
    return b"".join(parts)


def _too_large(limit: int) -> GatewayError:
    return GatewayError(413, f"the body has more than {limit} bytes; send less in one request")


class GzipBody:
    """Decompresses the members of one body."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next compressed bytes. Raises GatewayError 400 if they are not gzip."""
        while data:
            if self._member.eof:
                self._member = zlib.decompressobj(_GZIP)
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise GatewayError(
                    400, "the body is not gzip; compress it, or leave out Content-Encoding: gzip"
                ) from None
            data = self._member.unconsumed_tail or self._member.unused_data
            if piece:
                yield piece

    def check_end(self) -> None:
        """Raise GatewayError 400 unless the last member is complete."""
        if not self._member.eof:
            raise GatewayError(400, "the body ends in the middle of its gzip data; send all of it")


def body_decompressor(content_encoding: str) -> GzipBody | None:
    """Return the decompressor for a Content-Encoding header; None if the body is not compressed.

    Raises GatewayError 415 for other encodings than gzip.
    """
    encoding = content_encoding.strip().lower()
    if encoding in ("gzip", "x-gzip"):
        return GzipBody()
    if encoding not in ("", "identity"):
        raise GatewayError(
            415,
            f"Content-Encoding: {encoding[:40]!a} is not supported; send the body with gzip, or without this header",
            headers={"Accept-Encoding": "gzip"},
        )
    return None


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise ClientDisconnect.

    receive   of the request, after its body was read
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled_before, disconnected = task.cancelling(), False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected and task.uncancel() <= cancelled_before:  # only the disconnect cancelled the task
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
