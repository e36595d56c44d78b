"""The process of another tensor-parallel rank: loads its part of the model, receives step plans and executes them.

Rank 0 starts it by `python -m sidestream.runtime.worker.tensor_parallel.rank_process FD PLANS_FD STORE_FD`. Its main
thread executes plans, one thread receives from rank 0 and ends the process after rank 0, and one reads adapters.
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

from .... import graphs
from ....graphs.files.update_file import UpdateFile
from ...adapters.registry import RegisteredAdapter
from ...processes.channel import Channel, ChannelClosed
from ...processes.garbage_collection import raise_gc_thresholds
from ...processes.logs import configure_logging
from ...processes.watchdog import HeartbeatThread
from ...scheduler.step_codec import unpack_masks, unpack_plan
from ...scheduler.step_plan import AHEAD, SLOT_DAMAGED
from .peer_messages import (
    AddAdapter,
    AddSum,
    CopyPages,
    EndUpdate,
    ForgetAdapter,
    PeerSettings,
    RestrictAdapters,
    Sleep,
    StageUpdate,
    StartLoad,
    WakeUp,
    decode_order,
)
from .peers import MASKS, PAGES, PLAN
from .plan_ring import PlanRing

_log = logging.getLogger(__name__)
POLL_LOADS_SECONDS = 0.001
IN_ORDER = (AddSum, StartLoad, CopyPages, ForgetAdapter, Sleep, WakeUp)
"""Orders that are executed after the plans before them."""
Work = tuple[bytes, bytearray] | AddSum | StartLoad | CopyPages | ForgetAdapter | Sleep | WakeUp


class _RankProcess:
    """Executes rank 0's plans and orders."""

    def __init__(self, channel: Channel, settings: PeerSettings, ring: PlanRing, store_fd: int) -> None:
        self._channel, self._settings, self._ring, self._store_fd = channel, settings, ring, store_fd
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._adapter_orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._staged: RegisteredAdapter | None = None  # an update without a name yet
        self._handles: deque[Any] = deque()
        self._num_loads = 0
        threading.Thread(target=self._receive, name="rank 0", daemon=True).start()

    def run(self) -> NoReturn:
        """Load the model and execute work; never return."""
        self._load_model()
        threading.Thread(target=self._read_adapters, name="adapters", daemon=True).start()
        self._channel.send({"event": "ready"})
        while True:
            try:
                work = self._work.get(timeout=POLL_LOADS_SECONDS if self._num_loads else None)
            except queue.Empty:
                self._report_loads()
                continue
            self._execute(work)
            self._report_loads()

    def _load_model(self) -> None:
        import torch

        from ...adapters.describer import AdapterDescriber
        from ..model_loader import find_model, load_model
        from .process_group import join_group

        settings = self._settings
        device = torch.device(settings.device)
        if device.type == "cuda":
            device = torch.device("cuda", device.index + settings.tp_rank)
        source, options = find_model(settings.model, **settings.llm, device=device)
        options = replace(options, compiler=replace(options.compiler, tensor_parallel_rank=settings.tp_rank))
        self._channel.send({"event": "started"})
        join_group(settings.tp_rank, settings.tp_size, self._store_fd, device)
        self._model = load_model(source, settings.adapters, options, AdapterDescriber())

    def _receive(self) -> None:
        try:
            while True:
                for message in self._channel.receive(block=True):
                    frame = self._ring.read(self._settings.tp_rank - 1, message["length"])
                    kind, body = bytes(frame[:1]), frame[1:]
                    if kind in (PLAN, MASKS):
                        self._work.put((kind, body))
                        continue
                    order = decode_order(body)
                    (self._work if isinstance(order, IN_ORDER) else self._adapter_orders).put(order)
        except ChannelClosed:
            os._exit(0)  # rank 0 has ended, or has ended the group

    def _execute(self, work: Work) -> None:
        runner = self._model.runner
        if isinstance(work, StartLoad):
            self._num_loads += 1
            runner.start_load(work.slot, work.number)
        elif isinstance(work, CopyPages):
            self._num_loads += 1
            runner.copy_pages(work.copies)
        elif isinstance(work, AddSum):
            self._model.add_sum(work.number, work.parts)
        elif isinstance(work, ForgetAdapter):
            runner.forget_adapter(work.number)
        elif isinstance(work, (Sleep, WakeUp)):
            self._sleep_or_wake(work)
        elif work[0] == PLAN:
            self._handles.append(runner.submit(unpack_plan(work[1])))
            while len(self._handles) > AHEAD:  # rank 0 never has more steps in flight
                runner.collect(self._handles.popleft())
        else:
            runner.constrain(self._handles[-1], unpack_masks(work[1]))

    def _sleep_or_wake(self, work: Sleep | WakeUp) -> None:
        from .parallel_model import SLEEP_ERRORS

        sleeper = self._model.sleeper
        if sleeper is None:
            raise RuntimeError("an order to sleep arrived, but the engine was started without enable_sleep_mode")
        kind = text = ""
        try:
            sleeper.sleep(work.level) if isinstance(work, Sleep) else sleeper.wake_up(work.tags)
        except tuple(SLEEP_ERRORS.values()) as error:
            kind = next(name for name, error_type in SLEEP_ERRORS.items() if isinstance(error, error_type))
            text = " ".join(str(error).split())
        self._channel.send({"event": "slept", "kind": kind, "error": text, "asleep": sorted(sleeper.asleep)})

    def _report_loads(self) -> None:
        for slot, number, error in self._model.runner.loaded():
            self._num_loads -= error != SLOT_DAMAGED
            self._channel.send({"event": "loaded", "slot": slot, "number": number, "error": error})
        for ticket, error in self._model.runner.copied():
            self._num_loads -= 1
            self._channel.send({"event": "loaded", "slot": PAGES, "number": ticket, "error": error})

    def _read_adapters(self) -> None:
        """The thread that reads adapters from disk."""
        while True:
            order = self._adapter_orders.get()
            if isinstance(order, (AddAdapter, StageUpdate)):
                self._channel.send({"event": "added", "error": self._add(order)})
            elif isinstance(order, EndUpdate):
                self._end_update(order)
            elif isinstance(order, RestrictAdapters):
                self._model.restrict_adapters(order.roots)
            elif order.name in self._model.registry.numbers:
                self._model.remove_adapter(order.name)

    def _add(self, order: AddAdapter | StageUpdate) -> str | None:
        """Add an adapter, or stage an update; return the error, if any."""
        self._model.registry.set_next_number(order.number)
        try:
            if isinstance(order, AddAdapter):
                adapter = self._model.add_adapter(order.name, order.path, order.replace)
            else:
                with open(order.path, "rb") as opened:
                    file = UpdateFile(opened.fileno())
                    adapter = self._model.stage_update(order.name, file, order.version, switch=False)
                self._staged = adapter
        except (ValueError, OSError) as error:
            return f"adapter {order.name!r}: {error}"
        except Exception:
            _log.exception("adapter %r", order.name)
            return f"adapter {order.name!r}: a fault in rank {self._settings.tp_rank}; see its log"
        if adapter.content_hash != order.content_hash:
            return f"adapter {order.name!r}: its files have changed while the ranks read them; load it again"
        return None

    def _end_update(self, order: EndUpdate) -> None:
        staged, self._staged = self._staged, None
        if staged is None or staged.number != order.number:
            return
        if order.publish:
            self._model.publish_update(staged)
        else:
            self._model.drop_update(staged.number)


def main() -> NoReturn:
    """Run the process; end it without the interpreter's clean-up, as other threads may be running tensor operations."""
    raise_gc_thresholds()
    channel_fd, plans_fd, store_fd = map(int, sys.argv[1:4])
    channel = Channel.from_fd(channel_fd)
    try:
        (first, *_) = channel.receive(block=True)
        settings = msgspec.convert(first["settings"], PeerSettings)
        configure_logging(f"rank {settings.tp_rank}")
        # rank 0 reads the same checkpoint and adapters, and has warned of what is odd about them
        logging.getLogger(graphs.__name__).setLevel(logging.ERROR)
        with HeartbeatThread(channel.send_heartbeat, lambda: None):
            try:
                _RankProcess(channel, settings, PlanRing(plans_fd, settings.tp_size - 1), store_fd).run()
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
