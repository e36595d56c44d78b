"""The process of another rank: builds its part of the model, then does what rank 0 does.

Rank 0 starts it by `python -m sidestream.runtime.worker.tensor_parallel.rank_process FD PLANS_FD MEETING_FD`. Its main
thread executes plans, one thread receives from rank 0 and ends the process when rank 0 is gone, and one reads adapters.
"""

import logging
import os
import queue
import sys
import threading
from collections import deque
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from ...processes.channel import Channel, ChannelClosed
from ...processes.garbage import collect_seldom
from ...processes.watch import Pulse
from ...scheduler.step_codec import unpack_masks, unpack_plan
from ...scheduler.step_plan import AHEAD
from .peers import MASKS, PLAN
from .plan_ring import PlanRing
from .settings import (
    AddAdapter,
    ForgetAdapter,
    PeerSettings,
    RestrictAdapters,
    Sleep,
    StartLoad,
    WakeUp,
    decode_order,
)

_log = logging.getLogger(__name__)
POLL_LOADS_SECONDS = 0.001
IN_ORDER = (StartLoad, ForgetAdapter, Sleep, WakeUp)
"""Orders that wait for the plans before them."""
Work = tuple[bytes, bytearray] | StartLoad | ForgetAdapter | Sleep | WakeUp


class _Peer:
    """A rank's work: `run` ends with the process only."""

    def __init__(self, channel: Channel, settings: PeerSettings, ring: PlanRing, meeting: int) -> None:
        self._channel, self._settings, self._ring, self._meeting = channel, settings, ring, meeting
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._errands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._handles: deque[Any] = deque()
        self._loads = 0
        threading.Thread(target=self._listen, name="rank 0", daemon=True).start()

    def run(self) -> NoReturn:
        """Build the model, and execute what comes."""
        self._build()
        threading.Thread(target=self._read_adapters, name="adapters", daemon=True).start()
        self._channel.send({"event": "ready"})
        while True:
            try:
                work = self._work.get(timeout=POLL_LOADS_SECONDS if self._loads else None)
            except queue.Empty:
                self._report_loads()
                continue
            self._do(work)
            self._report_loads()

    def _build(self) -> None:
        import torch

        from ...adapters.describing import AdapterDescriber
        from ..model import find_model, load_model
        from .joining import join_group

        settings = self._settings
        device = torch.device(settings.device)
        if device.type == "cuda":
            device = torch.device("cuda", device.index + settings.rank)
        source, options = find_model(settings.model, **settings.llm, device=device)
        options = replace(options, compiler=replace(options.compiler, tensor_parallel_rank=settings.rank))
        self._channel.send({"event": "started"})
        join_group(settings.rank, settings.world, self._meeting, device)
        self._model = load_model(source, settings.adapters, options, AdapterDescriber())

    def _listen(self) -> None:
        try:
            while True:
                for message in self._channel.receive(block=True):
                    frame = self._ring.read(self._settings.rank - 1, message["length"])
                    kind, body = bytes(frame[:1]), frame[1:]
                    if kind in (PLAN, MASKS):
                        self._work.put((kind, body))
                        continue
                    order = decode_order(body)
                    (self._work if isinstance(order, IN_ORDER) else self._errands).put(order)
        except ChannelClosed:
            os._exit(0)  # rank 0 is gone, or has ended the group

    def _do(self, work: Work) -> None:
        runner = self._model.runner
        if isinstance(work, StartLoad):
            self._loads += 1
            runner.start_load(work.slot, work.number)
        elif isinstance(work, ForgetAdapter):
            runner.forget_adapter(work.number)
        elif isinstance(work, (Sleep, WakeUp)):
            self._sleep_or_wake(work)
        elif work[0] == PLAN:
            self._handles.append(runner.submit(unpack_plan(work[1])))
            while len(self._handles) > AHEAD:  # rank 0 is never further ahead
                runner.collect(self._handles.popleft())
        else:
            runner.constrain(self._handles[-1], unpack_masks(work[1]))

    def _sleep_or_wake(self, work: Sleep | WakeUp) -> None:
        from .shared_sleep import FAILURES

        sleeper = self._model.sleeper
        if sleeper is None:
            raise RuntimeError("an order to sleep came, but the engine was started without enable_sleep_mode")
        kind = problem = ""
        try:
            sleeper.sleep(work.level) if isinstance(work, Sleep) else sleeper.wake_up(work.tags)
        except tuple(FAILURES.values()) as error:
            kind = next(name for name, known in FAILURES.items() if isinstance(error, known))
            problem = " ".join(str(error).split())
        self._channel.send({"event": "slept", "kind": kind, "problem": problem, "asleep": sorted(sleeper.asleep)})

    def _report_loads(self) -> None:
        for slot, number, problem in self._model.runner.loaded():
            self._loads -= 1
            self._channel.send({"event": "loaded", "slot": slot, "number": number, "problem": problem})

    def _read_adapters(self) -> None:
        """The thread that reads adapters from disk."""
        while True:
            order = self._errands.get()
            if isinstance(order, AddAdapter):
                self._channel.send({"event": "added", "problem": self._add(order)})
            elif isinstance(order, RestrictAdapters):
                self._model.restrict_adapters(order.roots)
            elif order.name in self._model.registry.numbers:
                self._model.remove_adapter(order.name)

    def _add(self, order: AddAdapter) -> str | None:
        """What went wrong."""
        self._model.registry.continue_at(order.number)
        try:
            known = self._model.add_adapter(order.name, order.path, order.replace)
        except (ValueError, OSError) as error:
            return f"adapter {order.name!r}: {error}"
        except Exception:
            _log.exception("adapter %r", order.name)
            return f"adapter {order.name!r}: a fault in rank {self._settings.rank}; see its log"
        if known.content_hash != order.content:
            return f"adapter {order.name!r}: its files have changed while the ranks read them; load it again"
        return None


def main() -> NoReturn:
    """Ends without the interpreter's clean-up, as other threads may be in the middle of tensor operations."""
    collect_seldom()
    line, plans, meeting = map(int, sys.argv[1:4])
    channel = Channel.from_fd(line)
    try:
        (first, *_) = channel.receive(block=True)
        settings = msgspec.convert(first["settings"], PeerSettings)
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {settings.rank} %(message)s")
        with Pulse(channel.beat, lambda: None):
            try:
                _Peer(channel, settings, PlanRing(plans, settings.world - 1), meeting).run()
            except ChannelClosed:
                raise
            except Exception as error:
                _log.exception("the rank ends")
                channel.send({"event": "failed", "message": " ".join(str(error).split()) or type(error).__name__})
    except ChannelClosed:
        os._exit(0)
    os._exit(1)


if __name__ == "__main__":
    main()
