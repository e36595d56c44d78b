"""The supervisor of a server: starts the batcher and the GPU process, watches them, and stops them in good order.

    python: serve(ServeSettings(model="path", bind="ipc:///run/user/1000/sidestream/engine.sock"))

Each child hangs on a channel that closes with its process; each child ends when the supervisor's end closes, so nothing
outlives `kill -9` of any of them.
"""

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from ..processes.channel import ChannelClosed
from ..processes.child import STOP_SECONDS, Child, status_text
from ..processes.watch import LOOK_AT_STOPPED_SECONDS, LOOK_SECONDS, START_SILENCE_SECONDS, AwakeClock, StopWatch
from ..protocol.addresses import AddressLock, check_keys, make_private_directory, parse, temporary_root
from .front import Front
from .gpu_link import Ready
from .settings import ServeSettings

DEATHS = 5
"""So many deaths in a row, with no request answered between them, are not an accident any more."""
EXIT_DEAD = 1
EXIT_SETTINGS = 2


class Supervisor:
    """`run` serves until SIGTERM or SIGINT (exit code 0), a start that fails (2), or a death that is not to be
    repaired (1).
    """

    def __init__(self, settings: ServeSettings, say: Callable[[str], None] = print, front: Front | None = None) -> None:
        self._say, self._front = say, front
        self._address = parse(settings.bind)
        check_keys(self._address, settings.keys is not None)
        make_private_directory(self._address)
        self._lock = AddressLock(self._address)
        self._runtime = Path(
            tempfile.mkdtemp(prefix="sidestream-", dir=os.environ.get("XDG_RUNTIME_DIR") or temporary_root())
        )
        self._settings = structs.replace(settings, directory=str(self._runtime), generation=0)
        self._batcher: Child | None = None
        self._gpu: Child | None = None
        self._clock, self._stops = AwakeClock(), StopWatch()
        self._one_of_several = settings.llm.get("tensor_parallel_size", 1) > 1
        self._deaths = 0
        self._was_ready = False
        self._draining_until: float | None = None
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)

    def run(self) -> int:
        """See the class."""
        former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        former_fd = signal.set_wakeup_fd(self._waker.fileno())
        try:
            self._batcher = self._start_batcher()
            self._gpu = self._start_gpu()
            return self._watch()
        finally:
            children = [child for child in (self._gpu, self._batcher) if child is not None]
            self._order({"order": "end"})
            for child in children:
                child.channel.close()
            if self._front is not None:
                self._front.close()
            for child in children:
                child.stop()
            shutil.rmtree(self._runtime, ignore_errors=True)
            if self._address.path is not None:
                self._address.path.unlink(missing_ok=True)
            self._lock.release()
            signal.set_wakeup_fd(former_fd)
            for number, handler in former.items():
                signal.signal(number, handler)

    def _start_batcher(self) -> Child:
        command = [sys.executable, "-m", "sidestream.runtime.server.batcher"]
        return Child.start("batcher", command, self._settings, self._clock.seconds)

    def _start_gpu(self) -> Child:
        command = self._settings.gpu_command or [sys.executable, "-m", "sidestream.runtime.server.gpu_process"]
        return Child.start("GPU process", command, self._settings, self._clock.seconds)

    def _watch(self) -> int:
        while True:
            timeout = LOOK_AT_STOPPED_SECONDS if self._one_of_several else LOOK_SECONDS
            if self._draining_until is not None:
                timeout = min(timeout, max(0.0, self._draining_until - time.monotonic()))
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                for child in self._children():
                    selector.register(child.channel, selectors.EVENT_READ, child)
                ready: list[Child | None] = [key.data for key, _ in selector.select(timeout)]
            ready.sort(key=lambda child: child is not None)  # a signal first: what dies with it is not started again
            self._clock.look()
            code: int | None = None
            for caller in ready:
                # a process that another's death has replaced meanwhile has nothing more to say
                if caller is not None and all(caller is not child for child in self._children()):
                    continue
                code = self._hear(caller) if caller is not None else self._signalled()
                if code is not None:
                    return code
            self._end_silent()
            self._end_stopped()
            if self._draining_until is not None and time.monotonic() >= self._draining_until:
                return 0

    def _children(self) -> list[Child]:
        front = None if self._front is None else self._front.child
        return [child for child in (self._batcher, self._gpu, front) if child is not None]

    def _end_silent(self) -> None:
        """Kill a process that has not beaten for too long; its death is then noticed like any other."""
        for child in self._children():
            if self._settings.step_timeout == 0:
                continue
            seconds = self._settings.silence_seconds if child.started else START_SILENCE_SECONDS
            if self._clock.seconds - child.heard > seconds:
                child.heard = self._clock.seconds
                self._say(f"the {child.name} gave no sign of life for {seconds:g} s; ending it")
                child.process.kill()

    def _end_stopped(self) -> None:
        """Kill a GPU process that is stopped while other ranks wait for it, inside their kernels."""
        if self._gpu is None or not self._one_of_several or self._settings.step_timeout == 0:
            return
        if self._stops.look([self._gpu.process.pid]):
            self._say("the GPU process is stopped by a signal (SIGSTOP), and other ranks wait for it; ending it")
            self._gpu.process.kill()

    def _signalled(self) -> int | None:
        received = self._wake.recv(64)
        if not set(received) & {signal.SIGTERM, signal.SIGINT}:
            return None
        # the second signal, or nothing to drain
        if self._draining_until is not None or self._batcher is None or not self._was_ready:
            return 0
        seconds = self._settings.drain_seconds
        self._say(f"draining for up to {seconds:g} s; a second signal stops at once")
        self._draining_until = time.monotonic() + seconds + STOP_SECONDS
        if self._front is not None:
            self._front.draining()  # first: a batcher that has nothing to do ends at once
        self._order({"order": "drain", "seconds": seconds})
        return None

    def _hear(self, child: Child) -> int | None:
        try:
            messages = child.channel.receive()
        except ChannelClosed:
            return self._died(child)
        child.heard = self._clock.seconds
        if self._front is not None and child is self._front.child:
            return self._hear_front(child, messages)
        for message in messages:
            event = message["event"]
            if event == "failed":
                self._say(f"error: {message['message']}")
                if not (self._was_ready and self._settings.restart):
                    return EXIT_SETTINGS
                # it could start once: its end counts as a death
            elif event == "ready":
                child.started = True
                self._take_ready(msgspec.convert(message["ready"], Ready))
            elif event == "adapter":
                self._take_adapter(message["name"], message["path"])
            elif event == "serving":
                self._was_ready = True
                self._say(f"serving at {self._settings.bind}")
            elif event == "answered":
                self._deaths = 0
            elif event == "overdue":
                self._end_overdue(message)
            elif event == "bound":
                child.started = True
                self._settings = structs.replace(self._settings, bind=message["address"])
                if self._front is not None and self._front.child is None:
                    self._front.start([message["address"]], self._clock.seconds)
            elif event == "drained":
                return 0 if self._draining_until is not None else EXIT_DEAD
        return None

    def _take_ready(self, ready: Ready) -> None:
        """Later lives of the GPU process have the same room for adapters."""
        self._say(capacity_line(ready))
        room = {
            "max_loras": ready.num_slots,
            "max_lora_rank": ready.lora_rank,
            "lora_target_modules": ready.lora_targets,
        }
        if ready.lora_rank:
            given = {name: value for name, value in self._settings.llm.items() if value is not None}
            self._settings = structs.replace(self._settings, llm=room | given)

    def _take_adapter(self, name: str, path: str | None) -> None:
        """A client has had an adapter loaded from `path`, or unloaded: so do later lives of the GPU process."""
        given, loaded = dict(self._settings.adapters), dict(self._settings.loaded_adapters)
        given.pop(name, None)
        loaded.pop(name, None)
        if path is not None:
            loaded[name] = path
        self._settings = structs.replace(self._settings, adapters=given, loaded_adapters=loaded)

    def _end_overdue(self, message: dict[str, Any]) -> None:
        """The batcher has waited too long for a step: kill the GPU process, unless it has been replaced meanwhile."""
        if self._gpu is not None and message["generation"] == self._settings.generation:
            self._say(f"a step did not return within {message['seconds']:g} s; ending the GPU process")
            self._gpu.process.kill()

    def _hear_front(self, child: Child, messages: list[dict[str, Any]]) -> int | None:
        for message in messages:
            if message["event"] == "failed":
                self._say(f"error: {message['message']}")
                return EXIT_SETTINGS
            if message["event"] == "ready":
                child.started = True
                self._say(f"answering HTTP at {message['address']}")
                self._say(f"console at {message['address']}/")
        return None

    def _front_died(self, front: Front, status: int) -> int | None:
        """The HTTP front alone is started again: the engine, and who speaks with it otherwise, go on."""
        if self._draining_until is not None:
            return None
        self._say(f"the gateway died ({status_text(status)})")
        if not self._settings.restart or not front.again([self._settings.bind], self._clock.seconds):
            return EXIT_DEAD
        self._say("starting the gateway again")
        return None

    def _died(self, child: Child) -> int | None:
        status = child.stop()
        if self._front is not None and child is self._front.child:
            self._front.child = None
            return self._front_died(self._front, status)
        if self._draining_until is not None and child is self._batcher:
            return 0
        self._say(f"the {child.name} died ({status_text(status)})")
        self._deaths += 1
        restarting = (
            self._settings.restart and self._was_ready and self._deaths < DEATHS and self._draining_until is None
        )
        if child is self._gpu:
            self._gpu = None
            self._order({"order": "gpu_died", "restarting": restarting})
            if not restarting:
                return self._last_words()
            self._settings = structs.replace(self._settings, generation=self._settings.generation + 1)
            self._order({"order": "gpu_starting", "generation": self._settings.generation})
            self._say("starting the GPU process again")
            self._gpu = self._start_gpu()
            return None
        self._batcher = None
        if self._gpu is not None:
            self._gpu.stop()
            self._gpu = None
        if not restarting:
            return EXIT_DEAD
        self._settings = structs.replace(self._settings, generation=self._settings.generation + 1)
        self._say("starting both processes again")
        self._batcher, self._gpu = self._start_batcher(), self._start_gpu()
        return None

    def _last_words(self) -> int:
        """The GPU process is dead for good: the batcher tells its clients and ends."""
        if self._batcher is not None:
            try:
                self._batcher.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._say("the batcher did not end by itself")
        return EXIT_DEAD

    def _order(self, order: dict[str, Any]) -> None:
        if self._batcher is not None:
            try:
                self._batcher.channel.send(order)
            except ChannelClosed:
                return  # its own death is noticed by itself


def capacity_line(ready: Ready) -> str:
    """What the engine holds, on one line."""
    seconds = sum(ready.seconds.values())
    return (
        f"ready in {seconds:.1f} s on {ready.device}: {ready.num_pages * ready.page_size} KV tokens "
        f"({ready.num_pages} pages), "
        f"{len(ready.adapters)} adapters ({ready.num_slots} at once), up to {ready.max_num_seqs} requests at once, "
        f"{ready.max_model_len} tokens each, "
        f"{ready.max_num_batched_tokens} tokens a step"
    )


def serve(settings: ServeSettings, say: Callable[[str], None] = print, front: Front | None = None) -> int:
    """Serve until told to stop; returns the exit code. `front`: the HTTP front to start with it.

    Raises AddressError or KeyFileError for an address that may not be used.
    """
    return Supervisor(settings, say, front).run()
