"""The middle of an answer that is sent in chunks, as HTTP 1.1 spells them. Plain calls give it to the connection, where
uvicorn has a coroutine for each part.
"""

from typing import Protocol

_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


class Connection(Protocol):
    """`writable`: it is open, and its buffer is not full."""

    writable: bool

    def add(self, data: bytes) -> None:
        """Write soon."""


class DirectBody:
    """One answer's body on a connection, see `routes.event_stream.DirectBody`. `sent`: bytes of parts that were
    written here.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._chunked = False
        self.sent = 0

    def begin(self, head: bytes) -> None:
        """The answer's head, as uvicorn worded it. Its body is written here only if it is sent in chunks."""
        self._chunked = _CHUNKED in head.lower()

    @property
    def ready(self) -> bool:
        """See `routes.event_stream.DirectBody`."""
        return self._chunked and self._connection.writable

    def write(self, part: bytes) -> None:
        """See `routes.event_stream.DirectBody`. An empty part would be the end."""
        self.sent += len(part)
        self._connection.add(b"%x\r\n%b\r\n" % (len(part), part))
