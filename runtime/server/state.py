"""What the batcher's parts know of the server as a whole: the batcher writes it, the desks read it."""

import time
from dataclasses import dataclass, field
from typing import Literal

from ..protocol.messages import Health
from .stepper import Stepper


@dataclass
class ServerState:
    """`stepper` is None while no model is ready; `draining` refuses new requests; `dead`: no model will be ready any
    more; `stalled`: the GPU process gives no sign of life, or a step takes far too long. `phase` and `progress` (0..1)
    say how far a start has come.
    """

    stepper: Stepper | None = None
    phase: str = "starting"
    progress: float = 0.0
    draining: bool = False
    dead: bool = False
    stalled: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def uptime(self) -> float:
        """Seconds since the batcher's start."""
        return time.monotonic() - self.started

    def health(self, call: int) -> Health:
        """The answer to `get_health`."""
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
