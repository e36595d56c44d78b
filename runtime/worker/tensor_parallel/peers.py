"""The other ranks, as rank 0 sees them: started, told what to do, watched.

A group lives and dies as a whole: when one rank dies, hangs or fails, all others are ended, and those who wait for them
are told why.
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
from ...processes.watch import (
    LOOK_AT_STOPPED_SECONDS,
    LOOK_SECONDS,
    SILENCE_SECONDS,
    START_SILENCE_SECONDS,
    AwakeClock,
    StopWatch,
)
from .joining import create_meeting
from .plan_ring import PlanRing
from .settings import Order, PeerSettings, encode_order

PLAN, MASKS, ORDER = b"P", b"K", b"O"
COMMAND = "sidestream.runtime.worker.tensor_parallel.rank_process"


class RankError(RuntimeError):
    """A rank of a tensor-parallel group is gone, and the group with it."""


class Peers:
    """Ranks 1 .. world - 1.

    broken   called by the thread that watches when the group has ended without being told to
    """

    def __init__(self, settings: PeerSettings) -> None:
        self.meeting = create_meeting()
        self.world = settings.world
        self._owner = os.getpid()
        self.broken: Callable[[str], None] | None = None
        self._clock, self._lock = AwakeClock(), threading.Lock()
        self._ring = PlanRing.create(settings.world - 1)
        self._closing = threading.Event()
        self._problem: str | None = None
        self._events: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._children = {
            rank: Child.start(
                f"rank {rank}",
                [sys.executable, "-m", COMMAND],
                structs.replace(settings, rank=rank),
                self._clock.seconds,
                [self._ring.fd, self.meeting],
                own_session=False,
                keep_words=True,
            )
            for rank in range(1, settings.world)
        }
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def check(self) -> None:
        """Raises RankError when the group has ended."""
        if self._problem is not None:
            raise RankError(self._problem)

    def explain(self, error: Exception) -> RankError:
        """What became of the group, after a step that raised here: no rank can go on alone."""
        self._watcher.join(LOOK_SECONDS)  # a peer that has died is noticed at once, and is the cause
        self._end(f"rank 0 of {self.world}: {type(error).__name__}: {error}")
        return RankError(self._problem)

    def write(self, kind: bytes, body: bytes) -> None:
        """Give all peers a frame. Raises RankError."""
        with self._lock:
            self.check()
            self._ring.write(kind + body, self.check)
            for child in self._children.values():
                try:
                    child.channel.send({"length": 1 + len(body)})
                except ChannelClosed:
                    continue  # the watcher says why

    def tell(self, order: Order) -> None:
        """Give all peers an order. Raises RankError."""
        self.write(ORDER, encode_order(order))

    def wait_for(self, event: str) -> list[dict[str, Any]]:
        """The next message `event` of every peer. Raises RankError when the group ends meanwhile."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < self.world - 1:
            heard = self._events.get()
            self.check()
            if heard is not None and heard[1]["event"] == event:
                found[heard[0]] = heard[1]
        return [found[rank] for rank in sorted(found)]

    def take_loads(self) -> list[tuple[int, dict[str, Any]]]:
        """(rank, message) of each load that has ended on a peer since the last call. Raises RankError."""
        self.check()
        found = []
        while not self._loads.empty():
            found.append(self._loads.get())
        return found

    def close(self) -> None:
        """End the peers. A forked child, in which an exit calls this too, leaves them to its parent."""
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
        stops = StopWatch()
        while not self._closing.is_set():
            with selectors.DefaultSelector() as selector:
                for rank, child in self._children.items():
                    selector.register(child.channel, selectors.EVENT_READ, rank)
                ready = [key.data for key, _ in selector.select(LOOK_AT_STOPPED_SECONDS)]
            self._clock.look()
            for rank in ready:
                try:
                    for message in self._children[rank].channel.receive():
                        self._hear(rank, message)
                except ChannelClosed:
                    self._children[rank].process.wait()
                    self._end(f"rank {rank} of {self.world} died")
            stopped = stops.look(child.process.pid for child in self._children.values())
            for child in self._children.values():
                if child.process.pid in stopped:
                    self._end(f"{child.name} of {self.world} is stopped by a signal (SIGSTOP)")
                limit = SILENCE_SECONDS if child.started else START_SILENCE_SECONDS
                if self._clock.seconds - child.heard > limit:
                    self._end(f"{child.name} of {self.world} gave no sign of life for {limit:g} s")
            if self._problem is not None:
                return

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        child = self._children[rank]
        child.heard = self._clock.seconds
        event = message["event"]
        if event == "failed":
            self._end(f"rank {rank} of {self.world}: {message['message']}", rank)
        elif event == "loaded":
            self._loads.put((rank, message))
        elif event != "beat":
            child.started |= event == "ready"
            self._events.put((rank, message))

    def _end(self, problem: str, reporter: int = 0) -> None:
        """The group is over. What a rank reports may follow from another's death; the first reason counts."""
        if self._problem is not None or self._closing.is_set():
            return
        for rank, child in self._children.items():
            status = child.process.poll()
            if status is not None and rank != reporter:
                problem = f"rank {rank} of {self.world} died ({status_text(status)}), and the group with it"
                if not child.started and child.words is not None and (words := child.words.line(LOOK_SECONDS)):
                    problem += f"; it said last: {words}"
                break
        self._problem = problem
        self._kill()
        self._events.put(None)
        if self.broken is not None:
            self.broken(self._problem)

    def _kill(self) -> None:
        for child in self._children.values():
            child.process.kill()
