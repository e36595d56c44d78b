"""Requests that outlive the GPU process: after a step that did not return, everything that was open goes on in its next
life, and what was in that step is tried alone first.
"""

from typing import NamedTuple

from ..api.errors import RequestError
from ..api.request import Request
from .stepper import Stepper


class Retry(NamedTuple):
    """A request as it is asked of the next GPU process; `alone`: it may be at fault."""

    request: Request
    stream: bool
    alone: bool


class Retries:
    """What is asked again. A process that dies without such a step takes its requests with it."""

    def __init__(self) -> None:
        self._suspects: set[str] | None = None
        self._waiting: list[Retry] = []

    def accuse(self, stepper: Stepper, step: int) -> str | None:
        """A step does not return, and its process is about to be ended. Returns the key of the only request in it: that
        one is at fault.
        """
        inside = stepper.requests_of(step)
        self._suspects = (inside | stepper.scheduler.batch_builder.suspects.request_ids) - (
            inside if len(inside) == 1 else set()
        )
        return next(iter(inside)) if len(inside) == 1 else None

    def take(self, stepper: Stepper | None) -> set[str]:
        """The process has ended: returns the keys of the requests that go on in the next one."""
        suspects, self._suspects = self._suspects, None
        self._waiting = []
        if stepper is not None and suspects is not None:
            self._waiting = [
                Retry(request, stream, request.request_id in suspects)
                for request, stream in stepper.engine.unfinished()
            ]
        return {retry.request.request_id for retry in self._waiting}

    def resubmit(self, stepper: Stepper, keys: set[str]) -> dict[str, str]:
        """The next process is ready: ask for those of `keys`, which are still open. Returns why some cannot go on, by
        key.
        """
        waiting, self._waiting = self._waiting, []
        refused: dict[str, str] = {}
        for request, stream, alone in waiting:
            if request.request_id not in keys:
                continue
            try:
                stepper.engine.add(request, stream, alone)
            except RequestError as error:  # such as an adapter that a client had loaded
                refused[request.request_id] = str(error)
        return refused
