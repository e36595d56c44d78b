"""Messages as frames: the header before each, and what is refused when bytes are no message."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from .messages import (
    HEADER_BYTES,
    INSTANCE_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    NO_INSTANCE,
    PROTOCOL_VERSION,
    CallId,
    ClientMessage,
    ErrorCode,
    Message,
    RequestId,
    ServerMessage,
)


class FrameError(ValueError):
    """A frame that is not one of the protocol's.

    `code` is the error code to answer with, `request_id` or `call` what the answer belongs to (where that much could be
    read).
    """

    def __init__(self, code: ErrorCode, message: str, request_id: str | None = None, call: int | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.request_id = request_id
        self.call = call


@dataclass(frozen=True)
class Frame:
    """A decoded frame: the engine instance that its sender means, and the message."""

    instance: bytes
    message: Any


class _Named(Struct):
    """As much of a faulty message as tells whose it is."""

    request_id: RequestId | None = None
    call: CallId | None = None


_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ClientMessage)
_named: msgspec.msgpack.Decoder[_Named] = msgspec.msgpack.Decoder(_Named)
_from_server: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ServerMessage)


def header(instance: bytes) -> bytes:
    """The bytes before every message. Raises ValueError for an instance id of the wrong length."""
    if len(instance) != INSTANCE_BYTES:
        raise ValueError(f"an instance id has {INSTANCE_BYTES} bytes, not {len(instance)}")
    return MAGIC + PROTOCOL_VERSION.to_bytes(2, "big") + instance


def encode(message: Message, instance: bytes = NO_INSTANCE) -> bytes:
    """A message as a frame.

    Raises FrameError for one that is too long to be sent (the other side would cut the connection).
    """
    frame = header(instance) + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError(
            "bad_frame", f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}; shorten the prompt"
        )
    return frame


def decode_from_client(frame: bytes) -> Frame:
    """What a client sent: a Frame with a ClientMessage.

    Raises FrameError, and nothing else, for any bytes that are no such frame.
    """
    return _decode(frame, _from_client)


def decode_from_server(frame: bytes) -> Frame:
    """What a server sent: a Frame with a ServerMessage.

    Raises FrameError, and nothing else, for any bytes that are no such frame.
    """
    return _decode(frame, _from_server)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Frame:
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError("bad_frame", f"the frame has {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    if len(frame) < HEADER_BYTES or frame[:2] != MAGIC:
        raise FrameError("bad_frame", "the frame does not begin with a Sidestream header")
    version = int.from_bytes(frame[2:4], "big")
    if version != PROTOCOL_VERSION:
        raise FrameError(
            "unsupported_version", f"the frame speaks protocol version {version}; this side speaks {PROTOCOL_VERSION}"
        )
    try:
        message = decoder.decode(memoryview(frame)[HEADER_BYTES:])
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError, and every error of msgspec
        raise _attributed(memoryview(frame)[HEADER_BYTES:], f"the message is malformed: {_short(error)}") from None
    return Frame(bytes(frame[4:HEADER_BYTES]), message)


def _attributed(body: memoryview, text: str) -> FrameError:
    try:
        named = _named.decode(body)
    except (ValueError, RecursionError):
        return FrameError("bad_frame", text)
    if named.request_id is None and named.call is None:
        return FrameError("bad_frame", text)
    return FrameError("invalid_request", text, named.request_id, named.call)


def _short(error: BaseException) -> str:
    """What was wrong, without more of the sender's bytes than needed to find it."""
    text = "too deeply nested" if isinstance(error, RecursionError) else str(error)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])
