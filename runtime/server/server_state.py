"""State that the batcher's parts share: the server's status, and requests to resubmit to the next GPU process."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..api.errors import RequestError
from ..api.request import Request
from ..protocol.messages import Health
from ..receipts.receipt import ReceiptMaker
from .stepper import Stepper


@dataclass
class ServerState:
    """Written by the batcher, read by its parts.

    stepper          None while no model is ready
    phase, progress  state of the start, progress from 0 to 1
    draining         new requests are refused
    dead             the GPU process will not be restarted
    stalled          the GPU process sends no heartbeats, or a step is late
    paused           no steps are planned
    receipts         makes receipts; None without a key
    updating         adapter -> number of its updates in progress
    named_sums       names that clients have given to sums of adapters -> names of the sums
    """

    stepper: Stepper | None = None
    phase: str = "starting"
    progress: float = 0.0
    draining: bool = False
    dead: bool = False
    stalled: bool = False
    paused: bool = False
    receipts: ReceiptMaker | None = None
    updating: Counter[str] = field(default_factory=Counter)
    named_sums: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the planning of steps, also by later GPU processes."""
        self.paused = paused
        if self.stepper is not None:
            self.stepper.paused = paused

    @property
    def uptime(self) -> float:
        """Seconds since the batcher's start."""
        return time.monotonic() - self.started

    def health(self, call: int) -> Health:
        status: Literal["loading", "ok", "stalled", "draining", "dead"] = "ok"
        if self.dead:
            status = "dead"
        elif self.stalled:
            status = "stalled"
        elif self.draining:
            status = "draining"
        elif self.stepper is None:
            status = "loading"
        step = 0.0 if self.stepper is None else self.stepper.last_step_seconds
        return Health(call, status, self.phase, self.progress, self.uptime, step)


class Retry(NamedTuple):
    """A request to resubmit. `alone`: compute it in a step of its own, since it may have caused the hang."""

    request: Request
    stream: bool
    alone: bool


class RetryQueue:
    """Requests to resubmit after a step did not return and its GPU process was killed. Other deaths lose requests."""

    def __init__(self) -> None:
        self._suspects: set[str] | None = None
        self._waiting: list[Retry] = []

    def record_hang(self, stepper: Stepper, step: int) -> str | None:
        """Record the requests of a step that does not return. Returns the key of the only one: it caused the hang."""
        inside = stepper.requests_in_step(step)
        cause = next(iter(inside)) if len(inside) == 1 else None
        self._suspects = (inside | stepper.scheduler.batch_builder.suspects.request_ids) - {cause}
        return cause

    def save(self, stepper: Stepper | None) -> set[str]:
        """Save the open requests of a GPU process that has ended. Returns the keys of those to resubmit."""
        suspects, self._suspects = self._suspects, None
        self._waiting = []
        if stepper is not None and suspects is not None:
            self._waiting = [
                Retry(request, stream, request.request_id in suspects)
                for request, stream in stepper.engine.unfinished()
            ]
        return {retry.request.request_id for retry in self._waiting}

    def resubmit(self, stepper: Stepper, keys: set[str]) -> dict[str, str]:
        """Submit the saved requests with a key in `keys`. Returns the errors of refused ones by key."""
        waiting, self._waiting = self._waiting, []
        refused: dict[str, str] = {}
        for request, stream, alone in waiting:
            if request.request_id not in keys:
                continue
            try:
                stepper.engine.add(request, stream, alone)
            except RequestError as error:  # for example, the adapter was removed
                refused[request.request_id] = str(error)
        return refused
