"""Work that may wait: done by one thread when nothing was asked for in a while, given up when the process ends."""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

from ..processes.threads import start_thread

QUIET_SECONDS = 1.0
END_SECONDS = 5.0
Job = Callable[[threading.Event], None]
_log = logging.getLogger(__name__)


class Stopped(Exception):
    """A job noticed that it is to end."""


class _Line:
    """What the thread shares with its owner: it must not keep the owner alive."""

    def __init__(self, quiet: float) -> None:
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.stopped = threading.Event()
        self.quiet = quiet
        self.last = 0.0
        self.working = False
        self.hurried = 0


class Background:
    """A line of jobs and the daemon thread that does them, which is started with the first. It ends with its owner, or
    when the interpreter exits.

    A job is given an event; when that is set, it should raise `Stopped` soon.
    """

    def __init__(self, name: str, quiet: float = QUIET_SECONDS) -> None:
        self._name = name
        self._line = _Line(quiet)
        self._thread: threading.Thread | None = None

    def later(self, job: Job) -> None:
        """One more job. Returns at once."""
        with self._line.changed:
            self._line.last = time.monotonic()
            self._line.jobs.append(job)
            self._line.changed.notify_all()
            if self._thread is None:
                stop = partial(_stop, self._line)
                self._thread = start_thread(_work, self._line, name=self._name, stop=stop)
                weakref.finalize(self, _end, stop, self._thread).atexit = False

    def busy(self) -> None:
        """Something more urgent goes on: wait longer with the next job."""
        self._line.last = time.monotonic()

    def finish(self, timeout: float) -> bool:
        """Do all jobs now; False if that took more than `timeout` seconds."""
        line = self._line
        with line.changed:
            line.hurried += 1
            line.changed.notify_all()
            done = line.changed.wait_for(lambda: not line.jobs and not line.working, timeout)
            line.hurried -= 1
        return done


def _work(line: _Line) -> None:
    while True:
        with line.changed:
            while not line.stopped.is_set():
                wait = line.last + line.quiet - time.monotonic() if line.jobs and not line.hurried else 0.0
                if line.jobs and wait <= 0:
                    break
                line.changed.wait(wait if line.jobs else None)
            if line.stopped.is_set():
                return
            job = line.jobs.popleft()
            line.working = True
        try:
            job(line.stopped)
        except Stopped:
            pass
        except Exception:
            _log.exception("work that was put off failed")
        finally:
            del job
            with line.changed:
                line.working = False
                line.changed.notify_all()


def _stop(line: _Line) -> None:
    line.stopped.set()
    with line.changed:
        line.changed.notify_all()


def _end(stop: Callable[[], None], thread: threading.Thread) -> None:
    stop()
    if thread is not threading.current_thread():  # the owner's last reference may go in one of its jobs
        thread.join(END_SECONDS)
