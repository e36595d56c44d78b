"""An end that comes at its time, whatever is waited for: at a deadline, or when somebody sends SIGTERM or SIGINT."""

import signal
import time
from types import FrameType
from typing import Any, Self


class Ended(BaseException):
    """It is over; `str` says why. Not an Exception, so that nobody takes it for a fault of what was going on."""


class Ending:
    """Within the block Ended is raised once in the main thread: at `deadline` (of the monotonic clock), or at SIGTERM
    or SIGINT. What is left to do afterwards is not disturbed again. Only for the main thread.
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
        """Ended is not raised any more; the signals are ignored."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for each in self._former:
            signal.signal(each, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.over()
        raise Ended("the time is over" if number == signal.SIGALRM else f"stopped by {signal.Signals(number).name}")
