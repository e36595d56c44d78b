"""Body of an adapter's update: a safetensors file whose header is checked before its tensors are passed on."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request

from ...api.adapter_update import MAX_TENSORS
from ..interfaces import GatewayError

PART_BYTES = 1 << 20
MAX_HEADER_BYTES = (64 << 10) + 256 * MAX_TENSORS
"""Limit of the engines at their largest number of tensors; PEFT's headers have about 170 bytes per tensor."""
_REMEDY = (
    "send what safetensors.torch.save(tensors, metadata={'adapter_config': text}) returns, with the text of "
    "adapter_config.json"
)


def declared_bytes(request: Request) -> int:
    """Return the size of a body that is not encoded. Raises GatewayError 411 without Content-Length, 415 and 400."""
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise GatewayError(415, "an update has no Content-Encoding; send the safetensors file itself")
    declared = request.headers.get("content-length", "")
    if not (declared.isascii() and declared.isdigit()) or len(declared) > 15:
        raise GatewayError(411, "an update needs its size first; send Content-Length")
    nbytes = int(declared)
    if nbytes <= 8:
        raise GatewayError(400, f"the body has {nbytes} bytes, which are no whole update; {_REMEDY}")
    return nbytes


async def update_parts(request: Request, nbytes: int, seconds: float) -> AsyncGenerator[bytes]:
    """Yield a body of `nbytes` in parts of about PART_BYTES. The header is checked before the first one.

    seconds   longest time without a byte

    Raises GatewayError 400 for a body that is not an update, 408 for one that arrives too slowly, and ClientDisconnect
    for one that is cut off.
    """
    stream, held, received, header = aiter(request.stream()), bytearray(), 0, 8
    while received < nbytes:
        try:
            part = await asyncio.wait_for(anext(stream), seconds)
        except TimeoutError:
            raise GatewayError(408, f"the body did not arrive: nothing came for {seconds:g} s") from None
        except StopAsyncIteration:
            break
        received += len(part)
        held += part
        if header == 8 and len(held) >= 8:
            header = 8 + _header_length(bytes(held[:8]), nbytes)
        if header and len(held) >= header > 8:
            await asyncio.to_thread(_check_header, bytes(held[8:header]), nbytes - header)
            header = 0
        if not header and len(held) >= PART_BYTES:
            yield bytes(held)
            held.clear()
    if received != nbytes or header:
        raise GatewayError(400, f"the body has {received} bytes, which are no whole update; {_REMEDY}")
    if held:
        yield bytes(held)


def _header_length(start: bytes, nbytes: int) -> int:
    length = int.from_bytes(start, "little")
    if not 0 < length <= min(nbytes - 8, MAX_HEADER_BYTES):
        raise GatewayError(
            400, f"the body says it has a header of {length} bytes in {nbytes}, so it is no safetensors file; {_REMEDY}"
        )
    return length


def _check_header(header: bytes, data_bytes: int) -> None:
    """Raise GatewayError 400 for a header without a config, or whose tensors do not fill the rest of the body."""
    try:
        entries: Any = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        end = max(ends)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise GatewayError(400, f"the header of the body is not that of a safetensors file; {_REMEDY}") from None
    if end != data_bytes:
        raise GatewayError(400, f"the tensors of the header end at byte {str(end)[:20]} of {data_bytes}; {_REMEDY}")
    try:
        config = json.loads(entries["__metadata__"]["adapter_config"])
    except (ValueError, TypeError, LookupError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise GatewayError(400, f"the header has no adapter_config with a JSON object in __metadata__; {_REMEDY}")
