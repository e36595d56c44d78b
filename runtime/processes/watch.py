"""What tells a process that is stopped, or a step that does not end, from one that only takes its time.

The process that waits counts the seconds in which it was awake itself: after a pause of everything (a suspended
machine, SIGSTOP of all processes) nothing is overdue, and what has arrived meanwhile is read first.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

HEARTBEAT_SECONDS = 0.5
"""A child process reports this often that it is alive."""
LOOK_SECONDS = 0.5
"""A loop that watches looks at least so often."""
STALL_SECONDS = 3.0
"""After so long without a beat the GPU process counts as stalled."""
SILENCE_SECONDS = 20.0
"""After so long without a beat a process is ended."""
START_SILENCE_SECONDS = 300.0
"""The same while it starts: imports and large allocations keep every thread of it waiting."""
STOPPED_SECONDS = 1.0
"""After so long a rank that a signal has stopped is ended: it holds up all others, and this is certain, as silence
never is."""
LOOK_AT_STOPPED_SECONDS = 0.2
CPU_STEP_SECONDS = 600.0
GPU_STEP_SECONDS = 120.0
"""What a step may take at least: room for a program that is built when it is first needed."""
STEP_FACTOR = 10.0
RECENT_STEPS = 256


class AwakeClock:
    """Seconds in which this process was awake; `look` is to be called every `LOOK_SECONDS`.

    A gap between two looks counts as at most twice that. `every`: instead of `LOOK_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, every: float = LOOK_SECONDS) -> None:
        self._clock, self._most = clock, 2 * every
        self._looked = clock()
        self.seconds = 0.0

    def look(self) -> float:
        """The time now."""
        now = self._clock()
        self.seconds += min(now - self._looked, self._most)
        self._looked = now
        return self.seconds


def is_stopped(process: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped a process of this host. A debugger's stop counts for none, nor does a
    system without /proc.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] == [b"T"]


class StopWatch:
    """Which processes a signal has stopped for longer than `STOPPED_SECONDS`, counted while this one was awake; `look`
    is to be called every `LOOK_AT_STOPPED_SECONDS`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, is_stopped: Callable[[int], bool] = is_stopped
    ) -> None:
        self._clock, self._is_stopped = AwakeClock(clock, LOOK_AT_STOPPED_SECONDS), is_stopped
        self._since: dict[int, float] = {}

    def look(self, processes: Iterable[int]) -> list[int]:
        """Those of `processes` that have been stopped for too long."""
        now = self._clock.look()
        self._since = {each: self._since.get(each, now) for each in processes if self._is_stopped(each)}
        return [each for each, since in self._since.items() if now - since > STOPPED_SECONDS]


class StepWatch:
    """How long the oldest step in flight has taken, and how long it may take.

    timeout  seconds that a step may take; 0: any time; None: ten times the longest step, and at least 120 (on a CPU
             600)
    device   what the GPU process says that it runs on
    longest  what the cost model gives the longest step; 0.0: it knows nothing of the device, and the longest of the
             last steps stands for it
    """

    def __init__(self, clock: AwakeClock, timeout: float | None, device: str, longest: float = 0.0) -> None:
        self._clock, self._timeout, self._longest = clock, timeout, longest
        self._floor = CPU_STEP_SECONDS if device == "cpu" else GPU_STEP_SECONDS
        self._steps: deque[int] = deque()
        self._since = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def shipped(self, step: int) -> None:
        """A step is on its way; it begins when those before it have returned."""
        if not self._steps:
            self._since = self._clock.seconds
        self._steps.append(step)

    def returned(self) -> None:
        """The oldest step is over."""
        self._steps.popleft()
        self._recent.append(self._clock.seconds - self._since)
        self._since = self._clock.seconds

    @property
    def limit(self) -> float:
        """Seconds that a step may take."""
        if self._timeout is not None:
            return self._timeout or float("inf")
        return max(self._floor, STEP_FACTOR * (self._longest or max(self._recent, default=0.0)))

    @property
    def late(self) -> bool:
        """Whether a step has taken a quarter of what it may."""
        return bool(self._steps) and self._clock.seconds - self._since > self.limit / 4

    @property
    def overdue(self) -> int | None:
        """The step that has taken longer than it may, if there is one."""
        return self._steps[0] if self._steps and self._clock.seconds - self._since > self.limit else None


class Pulse:
    """Calls `beat` every `HEARTBEAT_SECONDS` from a thread of its own, within a `with` block.

    The thread beats while another is busy for long, and does not while the process is stopped.
    """

    def __init__(self, beat: Callable[[], None], close: Callable[[], None]) -> None:
        self._beat, self._close = beat, close
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> "Pulse":
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
