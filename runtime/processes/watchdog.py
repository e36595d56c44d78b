"""Detect processes that are stopped and steps that hang, without ending those that are only slow.

The watching process counts only the seconds in which it was awake itself. After a pause of all processes (a suspended
machine, SIGSTOP) nothing is overdue, and messages that arrived meanwhile are read first.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

HEARTBEAT_SECONDS = 0.5
"""Interval of a child's heartbeats."""
POLL_SECONDS = 0.5
"""Longest interval between two checks of a supervising loop."""
STALL_SECONDS = 3.0
"""Silence after which the GPU process counts as stalled."""
SILENCE_SECONDS = 20.0
"""Silence after which a process is killed."""
START_SILENCE_SECONDS = 300.0
"""The same during start-up, when imports and large allocations block all threads of the process."""
STOPPED_SECONDS = 1.0
"""Time after which a tensor-parallel process that is stopped by a signal is killed, because it blocks all others.
Unlike silence, this state is certain.
"""
STOPPED_POLL_SECONDS = 0.2
CPU_STEP_SECONDS = 600.0
GPU_STEP_SECONDS = 120.0
"""Lowest automatic step timeout: leaves time to compile a program at its first use."""
STEP_FACTOR = 10.0
RECENT_STEPS = 256


class AwakeClock:
    """Seconds in which this process was awake. Call `update` every `interval` seconds.

    A longer gap between two updates counts as at most two intervals.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, interval: float = POLL_SECONDS) -> None:
        self._clock, self._max_gap = clock, 2 * interval
        self._updated = clock()
        self.seconds = 0.0

    def update(self) -> float:
        now = self._clock()
        self.seconds += min(now - self._updated, self._max_gap)
        self._updated = now
        return self.seconds


def is_stopped(process: int) -> bool:
    """Return whether a signal (SIGSTOP) has stopped a process. False for a debugger's stop and without /proc."""
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] == [b"T"]


class StoppedProcesses:
    """Finds processes that a signal has stopped for longer than `STOPPED_SECONDS` of this process's awake time."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, is_stopped: Callable[[int], bool] = is_stopped
    ) -> None:
        self._clock, self._is_stopped = AwakeClock(clock, STOPPED_POLL_SECONDS), is_stopped
        self._since: dict[int, float] = {}

    def find(self, processes: Iterable[int]) -> list[int]:
        """Return those of `processes` that have been stopped too long. Call it every `STOPPED_POLL_SECONDS`."""
        now = self._clock.update()
        self._since = {each: self._since.get(each, now) for each in processes if self._is_stopped(each)}
        return [each for each, since in self._since.items() if now - since > STOPPED_SECONDS]


class StepWatchdog:
    """Time of the oldest step in flight, and its limit.

    timeout  limit in seconds; 0: none; None: ten times the longest step, but at least 120 s (600 s on a CPU)
    device   device name that the GPU process reports
    longest  the cost model's estimate for the longest step; 0.0: use the longest of the recent steps
    """

    def __init__(self, clock: AwakeClock, timeout: float | None, device: str, longest: float = 0.0) -> None:
        self._clock, self._timeout, self._longest = clock, timeout, longest
        self._min_limit = CPU_STEP_SECONDS if device == "cpu" else GPU_STEP_SECONDS
        self._steps: deque[int] = deque()
        self._since = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def step_submitted(self, step: int) -> None:
        """Add a step. Its time begins when the steps before it have returned."""
        if not self._steps:
            self._since = self._clock.seconds
        self._steps.append(step)

    def step_returned(self) -> None:
        self._steps.popleft()
        self._recent.append(self._clock.seconds - self._since)
        self._since = self._clock.seconds

    @property
    def limit(self) -> float:
        """Seconds that a step may take."""
        if self._timeout is not None:
            return self._timeout or float("inf")
        return max(self._min_limit, STEP_FACTOR * (self._longest or max(self._recent, default=0.0)))

    @property
    def late(self) -> bool:
        """Whether the oldest step has taken a quarter of its limit."""
        return bool(self._steps) and self._clock.seconds - self._since > self.limit / 4

    @property
    def overdue(self) -> int | None:
        """The oldest step if it has exceeded its limit."""
        return self._steps[0] if self._steps and self._clock.seconds - self._since > self.limit else None


class HeartbeatThread:
    """Calls `beat` every `HEARTBEAT_SECONDS` from its own thread within a `with` block, then `close`.

    It keeps beating while other threads are busy, and stops while the process is stopped.
    """

    def __init__(self, beat: Callable[[], None], close: Callable[[], None]) -> None:
        self._beat, self._close = beat, close
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "HeartbeatThread":
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending.wait(HEARTBEAT_SECONDS):
                self._beat()
        finally:
            self._close()
