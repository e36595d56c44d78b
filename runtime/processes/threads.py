"""Threads of a model or a client in a user's process. Each is stopped and joined when the interpreter exits.

Once finalization has begun, Python ends a daemon thread at its next use of the interpreter's lock. Where the thread has
frames of C++ or Rust on its stack, as inside torch and llguidance, their runtimes abort the process then (exit code
134). Other threads are no remedy: the interpreter waits for them before it calls anything that could stop them.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

END_SECONDS = 30.0
"""How long an exit waits for all threads together: one may read a file of a network that is gone."""
IMPATIENT_SECONDS = 2.0
"""The same after Ctrl-C."""
LOOK_SECONDS = 0.05
"""How often an exit looks for threads that were started meanwhile."""
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_started: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(target: Callable[..., None], *args: Any, name: str, stop: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread that is stopped and joined at the interpreter's exit.

    stop   makes the thread return soon. It does not block, may be called more than once, and holds no reference to the
           thread's owner.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    with _lock:
        for ended in [each for each in _started if not each.is_alive()]:
            del _started[ended]
        _started[thread] = stop
    return thread


def end_threads(seconds: float = END_SECONDS) -> None:
    """Stop and join all threads of `start_thread`, those that are started meanwhile included, for at most `seconds`."""
    until, stopped = time.monotonic() + seconds, set[threading.Thread]()
    while True:
        try:
            with _lock:
                alive = {thread: stop for thread, stop in _started.items() if thread.is_alive()}
            for thread in alive.keys() - stopped:
                stopped.add(thread)
                _call(alive[thread])
            if not alive or time.monotonic() >= until:
                return
            next(iter(alive)).join(LOOK_SECONDS)
        except KeyboardInterrupt:
            until = min(until, time.monotonic() + IMPATIENT_SECONDS)


def _call(stop: Callable[[], None]) -> None:
    try:
        stop()
    except Exception:
        _log.exception("a thread could not be stopped")


def _forget() -> None:
    """A forked child has none of the threads, and another one may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _started.clear()


atexit.register(end_threads)
os.register_at_fork(after_in_child=_forget)
