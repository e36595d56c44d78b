"""The engines that Ray says there are, as a process that answers HTTP sees them: name -> address of each.

Ray makes the request router, on a thread of its own; nothing can be handed to it. So the list belongs to the process:
the request router tells, the gateway's router is told.
"""

import threading
from collections.abc import Callable, Mapping

_lock = threading.Lock()
_now: Mapping[str, str] = {}
_listener: Callable[[Mapping[str, str]], None] | None = None


def tell(now: Mapping[str, str]) -> None:
    """These are all, now."""
    global _now
    with _lock:
        if now == _now:
            return
        _now = now
        if _listener is not None:
            _listener(now)


def listen(listener: Callable[[Mapping[str, str]], None]) -> None:
    """`listener` is called with all of them, now and at each change, on whatever thread tells."""
    global _listener
    with _lock:
        _listener = listener
        listener(_now)
