"""Server-sent events: how one is spelled."""

import secrets
from collections.abc import Callable

import msgspec

from ..shapes.common import StreamOptions, Usage

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_MARK = secrets.token_hex(16)  # a text that no name and no id contains


class Frame:
    """What every event of one stream has around its choices: encoded once."""

    def __init__(self, kind: str, answer_id: str, created: int, model: str, options: StreamOptions | None) -> None:
        fields = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + encode(fields)[:-1] + b',"choices":'
        self.wants_usage = options is not None and bool(options.include_usage)
        self._tail = b',"usage":null}\n\n' if self.wants_usage else b"}\n\n"

    def event(self, choice: object) -> bytes:
        """One event of one choice. JSON has no bare line break, so one line holds it."""
        return self._head + b"[" + encode(choice) + b"]" + self._tail

    def end(self, usage: Usage) -> bytes:
        """The last events: the usage, if it was asked for, and the end."""
        told = self._head + b'[],"usage":' + encode(usage) + b"}\n\n" if self.wants_usage else b""
        return told + DONE


class PlainEvents:
    """Events of one choice that differ in their text only: all around it is encoded once. `choice` makes the choice
    with a text.
    """

    def __init__(self, frame: Frame, choice: Callable[[str], object]) -> None:
        self._before, self._after = frame.event(choice(_MARK)).split(encode(_MARK))

    def event(self, text: str) -> bytes:
        """The event of this text."""
        return self._before + encode(text) + self._after


def named_event(name: str, body: object) -> bytes:
    """One event with its name on a line of its own."""
    return b"event: " + name.encode() + b"\ndata: " + encode(body) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """The event that ends a stream in which something went wrong."""
    return b"data: " + body + b"\n\n"
