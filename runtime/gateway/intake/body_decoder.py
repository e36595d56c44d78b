"""Decodes request bodies: small ones in this process, large ones first in a child process (`body_worker`).

msgspec holds the interpreter while it decodes, up to half a second for ten million token ids. The child process
decodes a large body first, so that a malformed one costs no time here. Lists of token ids come back one by one.
"""

import asyncio
import contextlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from ...processes.helper_process import HelperProcess
from ..interfaces import GatewayError
from .body_errors import malformed

T = TypeVar("T")
Shapes = type[T] | Mapping[str, type[T]]
"""Struct type of a body; or several, each by a field that only its bodies have."""
LARGE_BODY_BYTES = 512 << 10
DECODE_SECONDS = 20.0
SEPARATOR = b"\x01"
"""Between the parts of an answer: a byte that JSON does not contain."""
_DECIMALS = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?\d+(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+)', re.DOTALL)
"""Strings, and numbers that are not written as integers."""
_decoders: dict[type, Any] = {}
_ids_decoder = msgspec.json.Decoder(list[int])


class BodyHead(msgspec.Struct, omit_defaults=True):
    """First part of the child's answer.

    field    key of the body's type in `Shapes`
    model    field of the body
    error    status, message and field of the error, if it cannot be decoded
    """

    field: str = ""
    model: str | None = None
    error: tuple[int, str, str | None] | None = None


_decode_head = msgspec.json.Decoder(BodyHead).decode


def decode(data: bytes, shapes: Shapes[T]) -> T:
    """Return a decoded body. Raises GatewayError 400."""
    return decode_with_source(data, by_field(shapes)[field_in(data, shapes)])[0]


def by_field(shapes: Shapes[T]) -> Mapping[str, type[T]]:
    """Return the types by field; the field of a single type is ""."""
    return shapes if isinstance(shapes, Mapping) else {"": shapes}


def field_in(data: bytes, shapes: Shapes[T]) -> str:
    """Return the first field of `shapes` that a body has, else the first one: decoding then reports the error."""
    fields, given = [*by_field(shapes)], dict[str, msgspec.Raw]()
    if len(fields) > 1:
        with contextlib.suppress(ValueError, RecursionError):
            given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return next((field for field in fields if field in given), fields[0])


def decode_with_source(data: bytes, shape: type[T]) -> tuple[T, bytes]:
    """Return a body as the struct type `shape`, and the JSON from which it was decoded.

    An integer may be written as a decimal number, such as 5.0 or 1e3, as in JSON Schema. msgspec refuses these, so
    that the JSON is then rewritten with integers. Raises GatewayError 400.
    """
    decoder = _decoders.get(shape)
    if decoder is None:
        decoder = _decoders[shape] = msgspec.json.Decoder(shape)
    try:
        try:
            return decoder.decode(data), data
        except msgspec.ValidationError as problem:
            rewritten = _DECIMALS.sub(_as_integer, data) if "got `float`" in str(problem) else data
            if rewritten == data:
                raise
            data = rewritten
            return decoder.decode(data), data
    except (ValueError, RecursionError) as problem:  # includes UnicodeDecodeError and the errors of msgspec
        raise malformed(problem, data, shape) from None


def _as_integer(token: re.Match[bytes]) -> bytes:
    text = token[0]
    if text.startswith(b'"'):
        return text
    value = float(text)
    return b"%d" % value if value.is_integer() and abs(value) < 1 << 53 else text


@dataclass(frozen=True)
class ValidBody(Generic[T]):
    """A large body that the child process has decoded.

    data     the body; if `prompts` is not empty, without its prompts
    prompts  its lists of token ids, as JSON
    """

    model: str | None
    shape: type[T]
    data: bytes
    prompts: list[bytes]

    async def decode(self) -> T:
        """Return the body. Other tasks run between two lists of ids."""
        body = decode(self.data, self.shape)
        if not self.prompts:
            return body
        prompts = []
        for ids in self.prompts:
            prompts.append(_ids_decoder.decode(ids))
            await asyncio.sleep(0)
        return msgspec.structs.replace(body, prompt=prompts)  # type: ignore[type-var]


class BodyDecoder:
    """Decodes large bodies in a child process, which the first one starts."""

    def __init__(self, max_body_bytes: int) -> None:
        # -P keeps the working directory off sys.path
        command = [sys.executable, "-P", "-m", f"{__package__}.body_worker"]
        self._child = HelperProcess(command, 2 * max_body_bytes + (1 << 20))

    def check(self, data: bytes, shapes: Shapes[T]) -> ValidBody[T]:
        """Decode a body in the child process. Raises GatewayError."""
        types = by_field(shapes)
        names = (f"{field}={shape.__module__}:{shape.__qualname__}" for field, shape in types.items())
        name = ",".join(names).encode() + b" "
        # a line cannot contain newlines; in JSON they are white space
        try:
            answer = self._child.ask(name + data.replace(b"\n", b" ") + b"\n", DECODE_SECONDS)
        except TimeoutError:
            raise GatewayError(
                400, f"the body takes more than {DECODE_SECONDS:g} s to decode; send less in one request"
            ) from None
        except OSError:
            raise GatewayError(
                503,
                "the process that decodes large bodies ended; try again, or send less in one request",
                "server_error",
                "decoder_ended",
                retry_after=1.0,
            ) from None
        first, *parts = answer[:-1].split(SEPARATOR)
        head = _decode_head(first)
        if head.error is not None:
            status, message, param = head.error
            raise GatewayError(status, message, param=param)
        return ValidBody(head.model, types[head.field], parts[0] if parts else data, parts[1:])

    def close(self) -> None:
        """End the child process."""
        self._child.close()
