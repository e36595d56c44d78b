"""The HTTP front's process, where `sidestream serve` starts one. What it does is not known here: it gets the engine's
address and a socket that listens, and it is started again when it dies.
"""

import contextlib
import socket
from collections.abc import Callable

from msgspec import Struct

from ..processes.channel import ChannelClosed
from ..processes.child import Child

DEATHS = 5
LIVED_SECONDS = 30.0
"""A process that lived so long did not die at its start."""


class Front:
    """command       that runs it (its arguments: the channel's descriptor, the socket's)
    settings      of the engines' addresses
    listener      listens; it stays open while the process is started again, so nobody is turned away meanwhile
    """

    def __init__(self, command: list[str], settings: Callable[[list[str]], Struct], listener: socket.socket) -> None:
        self._command, self._settings, self._listener = command, settings, listener
        self.child: Child | None = None
        self._started = 0.0
        self._deaths = 0

    def start(self, addresses: list[str], now: float) -> None:
        """Run it. `now`: the supervisor's clock."""
        self._started = now
        self.child = Child.start("gateway", self._command, self._settings(addresses), now, [self._listener.fileno()])

    def again(self, addresses: list[str], now: float) -> bool:
        """Run it after a death; False when it died too often at its start."""
        self._deaths = 1 if now - self._started > LIVED_SECONDS else self._deaths + 1
        if self._deaths >= DEATHS:
            return False
        self.start(addresses, now)
        return True

    def draining(self) -> None:
        """Say that the engines are being stopped, so that their end is no news."""
        if self.child is not None:
            with contextlib.suppress(ChannelClosed):
                self.child.channel.send({"event": "draining"})

    def close(self) -> None:
        """No more connections; what is being answered may end."""
        self._listener.close()
        if self.child is not None:
            self.child.stop()
            self.child = None
