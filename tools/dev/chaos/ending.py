"""End a run at a deadline, or at SIGTERM or SIGINT, wherever it waits."""

import signal
import time
from types import FrameType
from typing import Any, Self


class Ended(BaseException):
    """The run is over; `str` gives the reason. Not an Exception, so that handlers of failures do not catch it."""


class Ending:
    """Raise Ended once in the main thread within the block: at `deadline` (monotonic clock), SIGTERM or SIGINT.

    Later signals are ignored.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for each in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
            self._former[each] = signal.signal(each, self._end)
        signal.setitimer(signal.ITIMER_REAL, max(self._deadline - time.monotonic(), 0.001))
        return self

    def __exit__(self, *problem: object) -> None:
        self.over()
        for each, handler in self._former.items():
            signal.signal(each, handler)

    def over(self) -> None:
        """Raise Ended no more; ignore the signals."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for each in self._former:
            signal.signal(each, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.over()
        raise Ended("the time is over" if number == signal.SIGALRM else f"stopped by {signal.Signals(number).name}")
