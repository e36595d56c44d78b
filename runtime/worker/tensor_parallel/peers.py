"""Start, command and watch the other tensor-parallel ranks from rank 0. If one rank dies, hangs or fails, the whole
group is ended.
"""

import os
import queue
import selectors
import sys
import threading
from collections.abc import Callable
from typing import Any

from msgspec import structs

from ...processes.channel import ChannelClosed
from ...processes.child import Child, status_text
from ...processes.watchdog import (
    POLL_SECONDS,
    SILENCE_SECONDS,
    START_SILENCE_SECONDS,
    STOPPED_POLL_SECONDS,
    AwakeClock,
    StoppedProcesses,
)
from .peer_messages import Order, PeerSettings, encode_order
from .plan_ring import PlanRing
from .process_group import create_store_file

PLAN, MASKS, ORDER = b"P", b"K", b"O"
PAGES = -2
"""In place of an adapter slot in the report of copied KV pages; the number is their ticket."""
COMMAND = "sidestream.runtime.worker.tensor_parallel.rank_process"


class RankError(RuntimeError):
    """A rank of a tensor-parallel group has ended, and the group with it."""


class Peers:
    """Ranks 1 .. tp_size - 1.

    on_lost  callback with the reason, called by the watching thread when the group has ended before `close`
    """

    def __init__(self, settings: PeerSettings) -> None:
        self.store_fd = create_store_file()
        self.tp_size = settings.tp_size
        self.on_lost: Callable[[str], None] | None = None
        self._owner = os.getpid()
        self._clock, self._lock = AwakeClock(), threading.Lock()
        self._ring = PlanRing.create(settings.tp_size - 1)
        self._closing = threading.Event()
        self._failure: str | None = None
        self._events: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._children = {
            tp_rank: Child.start(
                f"rank {tp_rank}",
                [sys.executable, "-m", COMMAND],
                structs.replace(settings, tp_rank=tp_rank),
                self._clock.seconds,
                [self._ring.fd, self.store_fd],
                own_session=False,
                keep_stderr=True,
            )
            for tp_rank in range(1, settings.tp_size)
        }
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def check(self) -> None:
        """Raise RankError if the group has ended."""
        if self._failure is not None:
            raise RankError(self._failure)

    def end_after(self, error: Exception) -> RankError:
        """End the group after an error of rank 0, and return the error with its cause: no rank can continue alone."""
        self._watcher.join(POLL_SECONDS)  # if a peer has died, the watcher reports it as the cause
        self._end(f"rank 0 of {self.tp_size}: {type(error).__name__}: {error}")
        return RankError(self._failure)

    def send(self, kind: bytes, body: bytes) -> None:
        """Send a frame to all peers. Raises RankError."""
        with self._lock:
            self.check()
            self._ring.write(kind + body, self.check)
            for child in self._children.values():
                try:
                    child.channel.send({"length": 1 + len(body)})
                except ChannelClosed:
                    continue  # the watcher reports the cause

    def send_order(self, order: Order) -> None:
        """Send an order to all peers. Raises RankError."""
        self.send(ORDER, encode_order(order))

    def wait_for(self, event: str) -> list[dict[str, Any]]:
        """Return the next message `event` of every peer. Raises RankError if the group ends meanwhile."""
        messages: dict[int, dict[str, Any]] = {}
        while len(messages) < self.tp_size - 1:
            received = self._events.get()
            self.check()
            if received is not None and received[1]["event"] == event:
                messages[received[0]] = received[1]
        return [messages[tp_rank] for tp_rank in sorted(messages)]

    def finished_loads(self) -> list[dict[str, Any]]:
        """Return the messages of loads and copies that ended on a peer since the last call. Raises RankError."""
        self.check()
        messages = []
        while not self._loads.empty():
            messages.append(self._loads.get())
        return messages

    def wait_for_exit(self) -> None:
        """Wait until all peers have ended."""
        for child in self._children.values():
            child.process.wait()

    def close(self) -> None:
        """End the peers; do nothing in a forked child, whose exit calls this too."""
        if self._closing.is_set() or os.getpid() != self._owner:
            return
        self._closing.set()
        self._kill()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        for child in self._children.values():
            child.stop()
        self._ring.close()

    def _watch(self) -> None:
        stops = StoppedProcesses()
        while not self._closing.is_set():
            with selectors.DefaultSelector() as selector:
                for tp_rank, child in self._children.items():
                    selector.register(child.channel, selectors.EVENT_READ, tp_rank)
                ready = [key.data for key, _ in selector.select(STOPPED_POLL_SECONDS)]
            self._clock.update()
            for tp_rank in ready:
                try:
                    for message in self._children[tp_rank].channel.receive():
                        self._handle(tp_rank, message)
                except ChannelClosed:
                    self._children[tp_rank].process.wait()
                    self._end(f"rank {tp_rank} of {self.tp_size} died")
            stopped = stops.find(child.process.pid for child in self._children.values())
            for child in self._children.values():
                if child.process.pid in stopped:
                    self._end(f"{child.name} of {self.tp_size} is stopped by a signal (SIGSTOP)")
                limit = SILENCE_SECONDS if child.started else START_SILENCE_SECONDS
                if self._clock.seconds - child.last_message > limit:
                    self._end(f"{child.name} of {self.tp_size} sent no heartbeat for {limit:g} s")
            if self._failure is not None:
                return

    def _handle(self, tp_rank: int, message: dict[str, Any]) -> None:
        child = self._children[tp_rank]
        child.last_message = self._clock.seconds
        event = message["event"]
        if event == "failed":
            self._end(f"rank {tp_rank} of {self.tp_size}: {message['message']}", tp_rank)
        elif event == "loaded":
            self._loads.put(message)
        elif event != "beat":
            child.started |= event == "ready"
            self._events.put((tp_rank, message))

    def _end(self, failure: str, reporter: int = 0) -> None:
        """End the group. The death of another rank may have caused what a rank reports, and replaces it."""
        if self._failure is not None or self._closing.is_set():
            return
        for tp_rank, child in self._children.items():
            status = child.process.poll()
            if status is not None and tp_rank != reporter:
                failure = f"rank {tp_rank} of {self.tp_size} died ({status_text(status)}), and the group with it"
                tail = None if child.started else child.stderr_tail
                if tail is not None and (line := tail.last_line(POLL_SECONDS)):
                    failure += f"; its last output: {line}"
                break
        self._failure = failure
        self._kill()
        self._events.put(None)
        if self.on_lost is not None:
            self.on_lost(self._failure)

    def _kill(self) -> None:
        for child in self._children.values():
            child.process.kill()
