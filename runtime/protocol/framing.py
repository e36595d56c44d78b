"""Encode messages as frames, and decode frames; malformed ones raise FrameError."""

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
    """A malformed frame. `code`: the error code of the answer; `request_id`, `call`: what it refers to, if readable."""

    def __init__(self, code: ErrorCode, message: str, request_id: str | None = None, call: int | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.request_id = request_id
        self.call = call


@dataclass(frozen=True)
class Frame:
    """A decoded frame: the sender's engine-instance id, and the message."""

    instance: bytes
    message: Any


class _Ids(Struct):
    """The fields that identify a malformed message."""

    request_id: RequestId | None = None
    call: CallId | None = None


_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ClientMessage)
_ids: msgspec.msgpack.Decoder[_Ids] = msgspec.msgpack.Decoder(_Ids)
_from_server: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ServerMessage)


def header(instance: bytes) -> bytes:
    """Return the bytes before each message. Raises ValueError for an instance id of the wrong length."""
    if len(instance) != INSTANCE_BYTES:
        raise ValueError(f"an instance id has {INSTANCE_BYTES} bytes, not {len(instance)}")
    return MAGIC + PROTOCOL_VERSION.to_bytes(2, "big") + instance


def encode(message: Message, instance: bytes = NO_INSTANCE) -> bytes:
    """Return a message as a frame. Raises FrameError above MAX_FRAME_BYTES: the other side would disconnect."""
    frame = header(instance) + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError(
            "bad_frame", f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}; shorten the prompt"
        )
    return frame


def decode_from_client(frame: bytes) -> Frame:
    """Decode a frame with a ClientMessage. Raises FrameError, and nothing else, for any other bytes."""
    return _decode(frame, _from_client)


def decode_from_server(frame: bytes) -> Frame:
    """Decode a frame with a ServerMessage. Raises FrameError, and nothing else, for any other bytes."""
    return _decode(frame, _from_server)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Frame:
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError("bad_frame", f"the frame has {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    if len(frame) < HEADER_BYTES or frame[:2] != MAGIC:
        raise FrameError("bad_frame", "the frame does not begin with a Sidestream header")
    version = int.from_bytes(frame[2:4], "big")
    if version != PROTOCOL_VERSION:
        raise FrameError(
            "unsupported_version", f"the frame has protocol version {version}; this side has {PROTOCOL_VERSION}"
        )
    try:
        message = decoder.decode(memoryview(frame)[HEADER_BYTES:])
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError, and every error of msgspec
        raise _frame_error(memoryview(frame)[HEADER_BYTES:], f"the message is malformed: {_short(error)}") from None
    return Frame(bytes(frame[4:HEADER_BYTES]), message)


def _frame_error(body: memoryview, text: str) -> FrameError:
    try:
        ids = _ids.decode(body)
    except (ValueError, RecursionError):
        return FrameError("bad_frame", text)
    if ids.request_id is None and ids.call is None:
        return FrameError("bad_frame", text)
    return FrameError("invalid_request", text, ids.request_id, ids.call)


def _short(error: BaseException) -> str:
    """Return an error's text, shortened and printable: it may contain the sender's bytes."""
    text = "too deeply nested" if isinstance(error, RecursionError) else str(error)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])
