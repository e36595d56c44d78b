"""Several engines of one model on one host, each with a supervisor, a batcher and a GPU process of its own.

An engine that ends is started again alone; the others, and the HTTP front before them, go on.
"""

import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from ...processes.channel import ChannelClosed
from ...processes.child import Child, status_text
from ...processes.watch import LOOK_SECONDS, START_SILENCE_SECONDS, AwakeClock
from ...protocol.addresses import parse
from ..front import Front
from ..settings import ServeSettings
from ..supervisor import EXIT_DEAD, EXIT_SETTINGS

FIRST_REST, LONGEST_REST = 0.5, 60.0
"""Seconds before an engine that ended is started again: the first, doubling while it does not live for long."""
LIVED_SECONDS = 60.0
GPUS = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def addresses_of(bind: str, count: int) -> list[str]:
    """Where `count` engines listen: `NAME-0.sock`, `NAME-1.sock` ... for `ipc://.../NAME.sock`, ports from the one of
    `tcp://host:port` on.

    Raises ValueError for ports that end before.
    """
    address = parse(bind)
    if address.path is not None:
        path = address.path
        return [f"ipc://{path.with_name(f'{path.stem}-{index}{path.suffix}')}" for index in range(count)]
    if not 0 < address.port <= 65536 - count:
        raise ValueError(f"--bind {bind} needs a port from 1 to {65536 - count}: {count} engines take as many in a row")
    return [str(replace(address, port=address.port + index)) for index in range(count)]


def devices_of(
    count: int, device: str | None, environment: Mapping[str, str] = os.environ, ranks: int = 1
) -> list[dict[str, str]]:
    """What each of `count` engines' environment adds: a GPU of its own for each of its ranks, or nothing on a CPU.

    Raises ValueError when the host has fewer GPUs.
    """
    found = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    if device == "cpu" or not found:
        return [{} for _ in range(count)]
    named = environment.get(VISIBLE)
    visible = [str(index) for index in range(found)] if named is None else [each for each in named.split(",") if each]
    if len(visible) < count * ranks:
        each = "" if ranks == 1 else f" of {ranks} ranks each"
        raise ValueError(
            f"{count} engines{each} need {count * ranks} GPUs, and there are {len(visible)}; lower --data-parallel-size"
            + ("" if named is None else f" or name more in {VISIBLE}")
        )
    return [{VISIBLE: ",".join(visible[ranks * index : ranks * (index + 1)])} for index in range(count)]


class _Engine:
    """One engine: how it is started, and what became of it."""

    def __init__(self, settings: ServeSettings, environment: dict[str, str]) -> None:
        self.settings, self.environment = settings, environment
        self.child: Child | None = None
        self.started = 0.0
        self.served = False
        self.deaths = 0
        self.again_at: float | None = None

    def start(self, name: str, now: float) -> None:
        command = [sys.executable, "-m", "sidestream.runtime.server.replicas.engine"]
        self.child = Child.start(name, command, self.settings, now, environment=self.environment)
        self.started, self.again_at = now, None

    def ended(self, now: float) -> None:
        """Rest for a while, longer each time it lives but shortly."""
        self.deaths = 1 if now - self.started > LIVED_SECONDS else self.deaths + 1
        self.again_at = now + min(LONGEST_REST, FIRST_REST * 2.0 ** (self.deaths - 1))


class Replicas:
    """`count` engines with these settings. `run` serves until SIGTERM or SIGINT (exit code 0), a start that fails (2),
    or until no engine is left that is to be started again (1).

    Raises ValueError for a host with too few GPUs.
    """

    def __init__(
        self, settings: ServeSettings, count: int, say: Callable[[str], None] = print, front: Front | None = None
    ) -> None:
        self._say, self._front, self._restart = say, front, settings.restart
        self.addresses = addresses_of(settings.bind, count)
        devices = devices_of(count, settings.llm.get("device"), ranks=settings.llm.get("tensor_parallel_size", 1))
        self._engines = [
            _Engine(structs.replace(settings, bind=address), environment)
            for address, environment in zip(self.addresses, devices, strict=True)
        ]
        self._clock = AwakeClock()
        self._draining = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)

    def run(self) -> int:
        """See the class."""
        former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        former_fd = signal.set_wakeup_fd(self._waker.fileno())
        try:
            for index, engine in enumerate(self._engines):
                engine.start(f"engine {index}", self._clock.seconds)
            if self._front is not None:
                self._front.start(self.addresses, self._clock.seconds)
            return self._watch()
        finally:
            if self._front is not None:
                self._front.close()
            children = [engine.child for engine in self._engines if engine.child is not None]
            for child in children:
                child.channel.close()
            for child in children:
                child.stop()
            signal.set_wakeup_fd(former_fd)
            for number, handler in former.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        while True:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                for child in self._children():
                    selector.register(child.channel, selectors.EVENT_READ, child)
                ready = [key.data for key, _ in selector.select(LOOK_SECONDS)]
            self._clock.look()
            for child in ready:
                if child is None:
                    self._signalled()
                elif (code := self._hear(child)) is not None:
                    return code
            self._look_after_front()
            for index, engine in enumerate(self._engines):
                if engine.again_at is not None and self._clock.seconds >= engine.again_at and not self._draining:
                    self._say(f"starting engine {index} again")
                    engine.start(f"engine {index}", self._clock.seconds)
            waiting = not self._draining and any(engine.again_at is not None for engine in self._engines)
            if not waiting and all(engine.child is None for engine in self._engines):
                return 0 if self._draining else EXIT_DEAD

    def _children(self) -> Sequence[Child]:
        front = None if self._front is None else self._front.child
        return [child for child in (*(engine.child for engine in self._engines), front) if child is not None]

    def _signalled(self) -> None:
        """Every engine finishes what it has; a second signal stops them at once, as they know themselves."""
        for number in self._wake.recv(64):
            if number in (signal.SIGTERM, signal.SIGINT):
                self._draining = True
                if self._front is not None:
                    self._front.draining()
                for engine in self._engines:
                    if engine.child is not None:
                        engine.child.process.send_signal(signal.SIGTERM)

    def _hear(self, child: Child) -> int | None:
        try:
            messages = child.channel.receive()
        except ChannelClosed:
            return self._ended(child)
        child.heard = self._clock.seconds
        for message in messages:
            if message["event"] == "said":
                self._say(f"{child.name}: {message['line']}")
                if message["line"].startswith("serving at"):
                    self._engine_of(child).served = True
            elif message["event"] == "failed":
                self._say(f"error: {message['message']}")
                return EXIT_SETTINGS
            elif message["event"] == "ready":
                child.started = True
                self._say(f"answering HTTP at {message['address']}")
                self._say(f"console at {message['address']}/")
        return None

    def _engine_of(self, child: Child) -> _Engine:
        return next(engine for engine in self._engines if engine.child is child)

    def _ended(self, child: Child) -> int | None:
        status = child.stop()
        if self._front is not None and child is self._front.child:
            return self._front_died(self._front, status)
        engine = self._engine_of(child)
        engine.child = None
        if self._draining:
            return None
        if status == EXIT_SETTINGS and not engine.served:
            return EXIT_SETTINGS
        self._say(f"{child.name} ended ({status_text(status)})")
        if self._restart:
            engine.ended(self._clock.seconds)
        return None

    def _front_died(self, front: Front, status: int) -> int | None:
        front.child = None
        if self._draining:
            return None
        self._say(f"the gateway died ({status_text(status)})")
        if not self._restart or not front.again(self.addresses, self._clock.seconds):
            return EXIT_DEAD
        self._say("starting the gateway again")
        return None

    def _look_after_front(self) -> None:
        """Kill a gateway that has not beaten for too long; its death is then noticed like any other."""
        child = None if self._front is None else self._front.child
        if child is None or self._engines[0].settings.step_timeout == 0:
            return
        seconds = self._engines[0].settings.silence_seconds if child.started else START_SILENCE_SECONDS
        if self._clock.seconds - child.heard > seconds:
            child.heard = self._clock.seconds
            self._say(f"the gateway gave no sign of life for {seconds:g} s; ending it")
            child.process.kill()


def serve_replicas(
    settings: ServeSettings, count: int, say: Callable[[str], None] = print, front: Front | None = None
) -> int:
    """Serve with `count` engines until told to stop; returns the exit code.

    Raises ValueError for a host with too few GPUs, or ports.
    """
    return Replicas(settings, count, say, front).run()
