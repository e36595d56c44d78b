"""Errors that callers can cause or must handle, apart from bugs of the engine."""

from collections.abc import Collection
from itertools import islice

LISTED_NAMES = 5


def some_of(names: Collection[str]) -> str:
    """Return the first names for an error about an unknown one, and how many there are besides."""
    shown, more = ", ".join(islice(names, LISTED_NAMES)), len(names) - LISTED_NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "none"


class RequestError(ValueError):
    """A request cannot be served; the message names the field and the remedy. Other requests are not affected.

    code  error code of servers, see docs/protocol.md
    """

    code = "invalid_request"


class CapacityError(RuntimeError):
    """The device has too little memory for the options; the message says how much is missing and how to free it."""


class ServerError(RuntimeError):
    """A server reported an error or could not be reached.

    code         see docs/protocol.md
    retry_after  seconds to wait before a retry, or None
    """

    def __init__(self, message: str, code: str = "request_failed", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class EngineDeadError(ServerError):
    """The engine died, was restarted, or cannot be reached; open requests are lost.

    The client can still be used: it connects again.
    """


class OverloadedError(ServerError):
    """The server accepts no more requests now; retry after `retry_after` seconds."""


class DeadlineError(ServerError):
    """A request's deadline passed before the request finished."""
