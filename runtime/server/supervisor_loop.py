"""The loop over child processes that the supervisor of an engine and the one of several engines share.

It handles signals, messages, deaths and silent processes, and restarts the HTTP gateway.
"""

import contextlib
import selectors
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from ..processes.channel import ChannelClosed
from ..processes.child import Child, status_text
from ..processes.watchdog import POLL_SECONDS, START_SILENCE_SECONDS, AwakeClock
from .settings import ServeSettings

EXIT_DEAD = 1
EXIT_SETTINGS = 2
MAX_GATEWAY_DEATHS = 5
GATEWAY_LIFE_SECONDS = 30.0
"""A gateway that lived longer did not die at its start."""


class GatewayProcess:
    """The process of the HTTP gateway.

    command    its command, without the descriptors of the channel and the listener
    settings   returns its settings for the engines' addresses
    listener   a listening socket; it stays open during restarts, so that no connection is refused
    """

    def __init__(self, command: list[str], settings: Callable[[list[str]], Struct], listener: socket.socket) -> None:
        self._command, self._settings, self._listener = command, settings, listener
        self.child: Child | None = None
        self._started = 0.0
        self._deaths = 0

    def start(self, addresses: list[str], now: float) -> None:
        """Start it. `now`: time of the supervisor's clock."""
        self._started = now
        self.child = Child.start("gateway", self._command, self._settings(addresses), now, [self._listener.fileno()])

    def restart(self, addresses: list[str], now: float) -> bool:
        """Start it after a death; returns False if it died too often at its start."""
        self._deaths = 1 if now - self._started > GATEWAY_LIFE_SECONDS else self._deaths + 1
        if self._deaths >= MAX_GATEWAY_DEATHS:
            return False
        self.start(addresses, now)
        return True

    def send_draining(self) -> None:
        """Let the gateway refuse new requests, since the engines are shutting down."""
        if self.child is not None:
            with contextlib.suppress(ChannelClosed):
                self.child.channel.send({"event": "draining"})

    def close(self) -> None:
        """Accept no more connections, and stop the process after the open answers."""
        self._listener.close()
        if self.child is not None:
            self.child.stop()
            self.child = None


class SupervisorLoop(ABC):
    """Base of the supervisors. `_on_...` methods return an exit code to end the loop, or None.

    settings    settings of the engine or engines
    print_line  prints a line
    gateway     the HTTP gateway to run with them
    """

    def __init__(
        self, settings: ServeSettings, print_line: Callable[[str], None], gateway: GatewayProcess | None = None
    ) -> None:
        self._settings, self._print_line, self._gateway = settings, print_line, gateway
        self.addresses: list[str] = []
        self._clock = AwakeClock()
        self._draining = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)

    def run(self) -> int:
        """Start the processes and serve until the end. Returns the exit code."""
        former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        former_fd = signal.set_wakeup_fd(self._waker.fileno())
        try:
            self._start()
            return self._loop()
        finally:
            self._stop()
            signal.set_wakeup_fd(former_fd)
            for number, handler in former.items():
                signal.signal(number, handler)

    @abstractmethod
    def _start(self) -> None:
        """Start the processes."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop the processes."""

    @abstractmethod
    def _engines(self) -> list[Child]:
        """Return the running children except the gateway."""

    @abstractmethod
    def _on_signals(self, count: int) -> int | None:
        """Handle SIGTERM or SIGINT. `count`: number of signals so far."""

    @abstractmethod
    def _on_message(self, child: Child, message: dict[str, Any]) -> int | None:
        """Handle a message of an engine's process."""

    @abstractmethod
    def _on_death(self, child: Child, status: int) -> int | None:
        """Handle the death of an engine's process."""

    @abstractmethod
    def _on_turn_end(self) -> int | None:
        """Called once per turn of the loop."""

    def _with_heartbeat(self) -> list[Child]:
        """Return the running children that send heartbeats."""
        return [] if self._gateway is None or self._gateway.child is None else [self._gateway.child]

    def _timeout(self) -> float:
        """Return the longest time of a turn in seconds."""
        return POLL_SECONDS

    def _children(self) -> list[Child]:
        gateway = None if self._gateway is None else self._gateway.child
        return [*self._engines(), *([] if gateway is None else [gateway])]

    def _loop(self) -> int:
        while True:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                for child in self._children():
                    selector.register(child.channel, selectors.EVENT_READ, child)
                ready: list[Child | None] = [key.data for key, _ in selector.select(self._timeout())]
            ready.sort(key=lambda child: child is not None)  # signals first: what dies with them is not restarted
            self._clock.update()
            for source in ready:
                if source is None:
                    received = self._wake.recv(64)
                    count = sum(number in (signal.SIGTERM, signal.SIGINT) for number in received)
                    code = self._on_signals(count) if count else None
                elif source in self._children():
                    code = self._receive(source)
                else:  # ignore messages from a process that has been replaced
                    code = None
                if code is not None:
                    return code
            self._kill_silent()
            if (code := self._on_turn_end()) is not None:
                return code

    def _receive(self, child: Child) -> int | None:
        is_gateway = self._gateway is not None and child is self._gateway.child
        try:
            messages = child.channel.receive()
        except ChannelClosed:
            status = child.stop()
            return self._on_gateway_death(status) if is_gateway else self._on_death(child, status)
        child.last_message = self._clock.seconds
        for message in messages:
            code = self._on_gateway_message(child, message) if is_gateway else self._on_message(child, message)
            if code is not None:
                return code
        return None

    def _on_gateway_message(self, child: Child, message: dict[str, Any]) -> int | None:
        if message["event"] == "failed":
            self._print_line(f"error: {message['message']}")
            return EXIT_SETTINGS
        if message["event"] == "ready":
            child.started = True
            self._print_line(f"answering HTTP at {message['address']}")
            self._print_line(f"console at {message['address']}/")
        return None

    def _on_gateway_death(self, status: int) -> int | None:
        """Restart the gateway alone; the engines continue."""
        gateway = self._gateway
        if gateway is None:
            return None
        gateway.child = None
        if self._draining:
            return None
        self._print_line(f"the gateway died ({status_text(status)})")
        if not self._settings.restart or not gateway.restart(self.addresses, self._clock.seconds):
            return EXIT_DEAD
        self._print_line("starting the gateway again")
        return None

    def _kill_silent(self) -> None:
        """Kill processes without a heartbeat for too long; their deaths are handled as any other."""
        if self._settings.step_timeout == 0:
            return
        for child in self._with_heartbeat():
            seconds = self._settings.silence_seconds if child.started else START_SILENCE_SECONDS
            if self._clock.seconds - child.last_message > seconds:
                child.last_message = self._clock.seconds
                self._print_line(f"the {child.name} sent no heartbeat for {seconds:g} s; killing it")
                child.process.kill()
