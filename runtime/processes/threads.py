"""Threads of a model or a client in a user's process, stopped and joined when the interpreter exits.

During finalization, Python ends a daemon thread at its next use of the interpreter lock. If the thread's stack has C++
or Rust frames, as inside torch and llguidance, their runtimes then abort the process (exit code 134). Non-daemon
threads do not help: the interpreter joins them before it calls anything that could stop them.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

SWITCH_SECONDS = 5e-5
"""Time after which a thread that waits for the interpreter lock gets it from one that runs Python code."""
END_SECONDS = 30.0
"""Time that an exit waits for all threads together: one may read a file over a network that is down."""
END_SECONDS_AFTER_INTERRUPT = 2.0
POLL_SECONDS = 0.05
"""Interval at which an exit looks for threads that were started meanwhile."""
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_started: dict[threading.Thread, Callable[[], None]] = {}


def switch_threads_often() -> None:
    """Switch between this process's threads after SWITCH_SECONDS instead of Python's 5 ms.

    A step gives up the interpreter lock at each of its dozens of calls of torch, and waits for it after each. While
    another thread reads an adapter, every wait takes that long.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


def prepare_types(*types: Any) -> None:
    """Build msgspec's tables of the types that `msgspec.convert` returns. Call it in the module that defines them.

    msgspec builds the table of a struct or a dataclass at its first use, and shows it to other threads before it is
    complete: two threads that use a new type at once crash the process (seen with msgspec 0.22). Only one thread at a
    time imports a module. `decode(..., type=)` is not used with such types; modules make decoders instead.
    """
    for each in types:
        msgspec.json.Decoder(each)


def start_thread(target: Callable[..., None], *args: Any, name: str, stop: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread that is stopped and joined when the interpreter exits.

    `stop` makes the thread return soon. It must not block or hold a reference to the thread's owner, and may be called
    more than once.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    with _lock:
        for ended in [each for each in _started if not each.is_alive()]:
            del _started[ended]
        _started[thread] = stop
    return thread


def end_threads(seconds: float = END_SECONDS) -> None:
    """Stop and join all threads of `start_thread`, including those started meanwhile, for at most `seconds`."""
    deadline, stopped = time.monotonic() + seconds, set[threading.Thread]()
    while True:
        try:
            with _lock:
                alive = {thread: stop for thread, stop in _started.items() if thread.is_alive()}
            for thread in alive.keys() - stopped:
                stopped.add(thread)
                _stop(alive[thread])
            if not alive or time.monotonic() >= deadline:
                return
            next(iter(alive)).join(POLL_SECONDS)
        except KeyboardInterrupt:
            deadline = min(deadline, time.monotonic() + END_SECONDS_AFTER_INTERRUPT)


def _stop(stop: Callable[[], None]) -> None:
    try:
        stop()
    except Exception:
        _log.exception("a thread could not be stopped")


def _reset_after_fork() -> None:
    """Reset the state in a forked child, which has none of the threads and may have copied a held lock."""
    global _lock
    _lock = threading.Lock()
    _started.clear()


atexit.register(end_threads)
os.register_at_fork(after_in_child=_reset_after_fork)
