"""Run jobs of low priority on one background thread."""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ..processes.threads import start_thread

IDLE_SECONDS = 1.0
END_SECONDS = 5.0
Job = Callable[[threading.Event], None]
_log = logging.getLogger(__name__)


class JobCancelled(Exception):
    """Raised by a job when its event is set."""


class _Queue:
    """State that the thread shares with its owner, without a reference to the owner."""

    def __init__(self, idle_seconds: float) -> None:
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.stopped = threading.Event()
        self.idle_seconds = idle_seconds
        self.last_activity = 0.0
        self.running = False
        self.num_flushing = 0


class BackgroundJobs:
    """A queue of jobs and the daemon thread that runs them. The thread starts with the first job, and ends with its
    owner or when the interpreter exits.

    A job starts after `idle_seconds` without `submit` or `postpone`. It gets an event and should raise `JobCancelled`
    soon after that is set.
    """

    def __init__(self, name: str, idle_seconds: float = IDLE_SECONDS) -> None:
        self._name = name
        self._queue = _Queue(idle_seconds)
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Enqueue a job; return at once."""
        with self._queue.changed:
            self._queue.last_activity = time.monotonic()
            self._queue.jobs.append(job)
            self._queue.changed.notify_all()
            if self._thread is None:
                stop = partial(_stop, self._queue)
                self._thread = start_thread(_run, self._queue, name=self._name, stop=stop)
                weakref.finalize(self, stop_threads, stop, [self._thread], END_SECONDS).atexit = False

    def postpone(self) -> None:
        """Restart the idle time before the next job."""
        self._queue.last_activity = time.monotonic()

    def flush(self, timeout: float) -> bool:
        """Run all jobs without waiting for idle time; return False after `timeout` seconds."""
        queue = self._queue
        with queue.changed:
            queue.num_flushing += 1
            queue.changed.notify_all()
            done = queue.changed.wait_for(lambda: not queue.jobs and not queue.running, timeout)
            queue.num_flushing -= 1
        return done


def _run(queue: _Queue) -> None:
    while True:
        with queue.changed:
            while not queue.stopped.is_set():
                hurry = not queue.jobs or queue.num_flushing
                wait = 0.0 if hurry else queue.last_activity + queue.idle_seconds - time.monotonic()
                if queue.jobs and wait <= 0:
                    break
                queue.changed.wait(wait if queue.jobs else None)
            if queue.stopped.is_set():
                return
            job = queue.jobs.popleft()
            queue.running = True
        try:
            job(queue.stopped)
        except JobCancelled:
            pass
        except Exception:
            _log.exception("a background job failed")
        finally:
            del job
            with queue.changed:
                queue.running = False
                queue.changed.notify_all()


def _stop(queue: _Queue) -> None:
    queue.stopped.set()
    with queue.changed:
        queue.changed.notify_all()


def stop_threads(stop: Callable[[], None], threads: Sequence[threading.Thread], timeout: float) -> None:
    """Call `stop` and join the threads; a finalizer of their owner may run on one of them."""
    stop()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout)
