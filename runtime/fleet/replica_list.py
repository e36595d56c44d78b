"""The replicas that accept requests, in a process that serves HTTP: name -> address.

Ray creates the request router in its own thread without arguments, and sends the code of the router's module by value.
The list is therefore global state of this module: the request router publishes it, and the ingress subscribes.
"""

import threading
from collections.abc import Callable, Mapping

_lock = threading.Lock()
_replicas: Mapping[str, str] = {}
_listener: Callable[[Mapping[str, str]], None] | None = None


def publish(replicas: Mapping[str, str]) -> None:
    """Replace the list."""
    global _replicas
    with _lock:
        if replicas == _replicas:
            return
        _replicas = replicas
        if _listener is not None:
            _listener(replicas)


def subscribe(listener: Callable[[Mapping[str, str]], None]) -> None:
    """Call `listener` with the list now and after each change, in the publisher's thread."""
    global _listener
    with _lock:
        _listener = listener
        listener(_replicas)
