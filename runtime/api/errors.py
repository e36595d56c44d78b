"""What goes wrong through a caller's doing, told apart from faults of the engine."""


class RequestError(ValueError):
    """A request cannot be served as asked; the text names the field and the remedy. Only this request is affected.

    `code`: what a server calls it, see docs/protocol.md.
    """

    code = "invalid_request"


class CapacityError(RuntimeError):
    """The device's memory does not hold what the options ask for; the text says how much is missing and what would
    free it.
    """


class ServerError(RuntimeError):
    """A server answered with an error, or could not be reached.

    `code`: see docs/protocol.md; `retry_after`: seconds after which it may go better, or None.
    """

    def __init__(self, message: str, code: str = "request_failed", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class EngineDeadError(ServerError):
    """The engine died, was restarted, or cannot be reached: what was open is lost.

    The same client may be used again; it connects again.
    """


class OverloadedError(ServerError):
    """The server takes no more work at this moment; try again after `retry_after` seconds."""


class DeadlineError(ServerError):
    """A request's deadline passed before it was complete."""
