"""The GPU process: builds the runner, then receives plans and sends tokens.

The supervisor starts it as `python -m sidestream.runtime.server.gpu_process FD`.

The main thread receives and launches plans; a second thread waits for results and sends them; a third reads adapters
from disk; a fourth sends heartbeats. So a plan that arrives while the device is busy is launched at once. A step that
needs masks computes its logits first and is sampled when the masks arrive; later plans wait until then. If the masks
also cover drafts, the drafts are sent first.
"""

import logging
import os
import queue
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
import zmq

from ..api.adapter_versions import VersionConflictError
from ..engine.flag_spelling import with_server_flags
from ..processes.channel import Channel, ChannelClosed
from ..processes.garbage_collection import raise_gc_thresholds
from ..processes.logs import configure_logging
from ..processes.out_of_memory import out_of_memory
from ..processes.threads import switch_threads_often
from ..processes.watchdog import HeartbeatThread
from ..protocol.messages import ErrorCode
from ..scheduler.step_plan import SLOT_DAMAGED, StepDrafts, StepMasks, StepPlan, no_rows
from .gpu_link import (
    Alive,
    Compose,
    CopyPages,
    GpuLink,
    InHostMemory,
    Load,
    LoadDone,
    Loading,
    LoadReply,
    Notice,
    PagesCopied,
    Ready,
    ResultSender,
    Retire,
    StartLoad,
    StepFailed,
    Unload,
    Update,
    UpdateReply,
)
from .served_model import (
    EXIT_DEVICE_LOST,
    Servable,
    ServedModel,
    is_fatal,
    load_again,
    text_for_client,
    without_directories,
)
from .settings import ServeSettings

_log = logging.getLogger(__name__)
MESSAGES_PER_TURN = 8
"""Messages between two looks for ended loads: on a CPU the next plan is there as soon as a step has ended."""
POLL_LOADS_MS = 1
HOST_MEMORY_SECONDS = 0.1
END_SECONDS = 1.5
EXTRA_MASK_WORDS = 32
"""A tokenizer may have more tokens than the model has logits, and masks are as wide as the tokenizer needs."""
STEP_FAILED = "a step failed on the device"


class _Step(NamedTuple):
    step: int
    handle: Any
    received: int
    launched: int
    problem: str | None = None
    drafts_only: bool = False  # send its drafts, not its result


class _Loop:
    """Runs until the batcher or the supervisor has ended."""

    def __init__(self, link: GpuLink, channel: Channel, served: Servable, ready: Ready) -> None:
        self._link, self._channel, self._served, self._ready = link, channel, served, ready
        self._runner = served.runner
        self._sender = link.sender()
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._plans: deque[tuple[StepPlan, int] | CopyPages] = deque()  # in the order of their execution
        self._unsampled: _Step | None = None  # launched, waits for masks
        self._retired: deque[int] = deque()
        self._adapter_work: queue.SimpleQueue[Load | Unload | Update | None] = queue.SimpleQueue()
        self._loads = self._copies = 0
        self._in_host_memory: set[int] = set()
        self._next_host_memory_report = 0.0
        self._device_lost, self._ending = threading.Event(), threading.Event()

    def run(self) -> int:
        threads = [
            threading.Thread(target=target, args=(self._link.sender(),), daemon=True)
            for target in (self._send_results, self._read_adapters)
        ]
        for thread in threads:
            thread.start()
        ready = self._ready
        masks = self._link.share_masks(ready.max_num_seqs, -(-ready.vocabulary // 32) + EXTRA_MASK_WORDS)
        self._sender.send(msgspec.structs.replace(ready, masks=masks))
        poller = zmq.Poller()
        for source in (self._link.plans, self._link.disconnected, self._channel):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._device_lost.is_set():
                arrived = dict(poller.poll(POLL_LOADS_MS if self._loads or self._copies else 500))
                for _ in range(MESSAGES_PER_TURN):
                    if (message := self._link.receive()) is None:
                        break
                    self._receive(message)
                self._report_loads()
                if self._copies:
                    self._report_copies()
                if time.monotonic() >= self._next_host_memory_report:
                    self._report_host_memory()
                if self._link.disconnected in arrived:
                    self._check_supervisor()
                    _log.error("the batcher has ended")
                    return 0
                if self._channel.fileno() in arrived:
                    self._channel.receive()
        except ChannelClosed:
            return 0
        finally:
            self._ending.set()
            self._steps.put(None)
            self._adapter_work.put(None)
            # if the interpreter ended in the middle of their tensor operations, C++ would abort the process
            for thread in threads:
                thread.join(END_SECONDS)
        return EXIT_DEVICE_LOST

    def _check_supervisor(self) -> None:
        """Raise ChannelClosed if the supervisor is stopping both processes and the batcher ended first."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while selector.select(1.0):
                self._channel.receive()

    def _receive(self, message: Any) -> None:
        if isinstance(message, StartLoad):
            self._loads += 1
            self._runner.start_load(message.slot, message.number)
        elif isinstance(message, Compose):
            self._served.add_sum(message.number, message.parts)
        elif isinstance(message, Retire):
            self._retired.append(message.number)
        elif isinstance(message, CopyPages):
            self._plans.append(message)
        elif isinstance(message, Notice):
            self._adapter_work.put(message)  # type: ignore[arg-type]
        elif isinstance(message, StepMasks):
            self._sample(message)
        else:
            self._plans.append(message)
        while self._plans and self._unsampled is None:
            work = self._plans.popleft()
            if isinstance(work, CopyPages):
                self._copies += 1
                self._runner.copy_pages(work.copies)
                continue
            plan, received = work
            step = self._launch(plan.step, received, partial(self._runner.submit, plan))
            if step.problem is None and len(plan.masked_rows):
                self._unsampled = step
                if plan.masks_drafts:
                    self._steps.put(step._replace(drafts_only=True))
            else:
                self._steps.put(step)
        while self._retired and not self._plans:  # an earlier plan that waits for masks may name them
            self._runner.forget_adapter(self._retired.popleft())

    def _sample(self, masks: StepMasks) -> None:
        """Sample the step that waits for these masks. Masks of a step that has failed are ignored."""
        step = self._unsampled
        if step is None or step.step != masks.step:
            return
        self._unsampled = None
        self._steps.put(self._launch(step.step, step.received, partial(self._constrain, step.handle, masks)))

    def _constrain(self, handle: Any, masks: StepMasks) -> Any:
        self._runner.constrain(handle, masks)
        return handle

    def _launch(self, number: int, received: int, launch: Callable[[], Any]) -> _Step:
        try:
            handle = launch()
        except Exception as error:
            self._log_failure(number, error)
            return _Step(number, None, received, received, STEP_FAILED)
        return _Step(number, handle, received, time.monotonic_ns())

    def _log_failure(self, step: int, error: Exception) -> None:
        _log.exception("step %d failed", step)
        if is_fatal(error):
            self._device_lost.set()

    def _report_loads(self) -> None:
        for slot, number, problem in self._runner.loaded():
            self._loads -= problem != SLOT_DAMAGED
            self._sender.send(LoadDone(slot, number, None if problem is None else without_directories(problem)))

    def _report_copies(self) -> None:
        for ticket, problem in self._runner.copied():
            self._copies -= 1
            self._sender.send(PagesCopied(ticket, problem))

    def _report_host_memory(self) -> None:
        self._next_host_memory_report = time.monotonic() + HOST_MEMORY_SECONDS
        numbers = set(self._served.in_host_memory())
        if numbers != self._in_host_memory:
            self._in_host_memory = numbers
            self._sender.send(InHostMemory(sorted(numbers)))

    def _send_results(self, sender: ResultSender) -> None:
        """Run the thread that waits for the device."""
        while (step := self._steps.get()) is not None:
            if step.problem is not None:
                sender.send(StepFailed(step.step, step.problem))
                continue
            if step.drafts_only:
                sender.send_drafts(self._drafts(step))
                continue
            try:
                result = self._runner.collect(step.handle)
            except Exception as error:
                sender.send(StepFailed(step.step, STEP_FAILED))
                self._log_failure(step.step, error)
                continue
            sender.send_result(result, step.received, step.launched)
        sender.close()

    def _drafts(self, step: _Step) -> StepDrafts:
        """Return a step's drafts, none if they cannot be read. The step's result then reports the device's error."""
        try:
            return self._runner.drafts(step.handle)
        except Exception as error:
            self._log_failure(step.step, error)
            return StepDrafts(step.step, no_rows().reshape(0, 0))

    def _read_adapters(self, sender: ResultSender) -> None:
        """Run the thread that reads adapters from disk."""
        while (work := self._adapter_work.get()) is not None and not self._ending.is_set():
            if isinstance(work, Update):
                sender.send(self._update(work))
                continue
            try:
                if isinstance(work, Load):
                    reply = LoadReply(work.ticket, self._served.add_adapter(work.name, work.path, work.replace))
                else:
                    self._served.remove_adapter(work.name)
                    reply = LoadReply(work.ticket)
            except Exception as error:
                reply = LoadReply(work.ticket, problem=text_for_client(error, work.name))
            sender.send(reply)

    def _update(self, work: Update) -> UpdateReply:
        try:
            return UpdateReply(work.ticket, *self._served.update_adapter(work))
        except Exception as error:
            code: ErrorCode = "version_conflict" if isinstance(error, VersionConflictError) else "adapter_error"
            return UpdateReply(work.ticket, problem=text_for_client(error, work.name), code=code)


def run(fd: int, build: Callable[[ServeSettings], Servable] = ServedModel) -> int:
    """Receive settings from the channel `fd` and serve. Returns the exit code."""
    configure_logging("gpu")
    try:
        return _serve(Channel.from_fd(fd), build)
    except ChannelClosed:
        return 1  # the supervisor has reported the reason


def _serve(channel: Channel, build: Callable[[ServeSettings], Servable]) -> int:
    (first, *_) = channel.receive(block=True)
    settings = msgspec.convert(first["settings"], ServeSettings)
    with zmq.Context() as context:
        link = GpuLink(context, Path(settings.directory), settings.generation)
        linger = 0
        try:
            with _heartbeats(channel, link.sender()):
                link.sender().send(Loading("loading"))
                try:
                    served = build(settings)
                    ready = load_again(served, settings.loaded_adapters, settings.updates)
                except Exception as error:
                    memory = out_of_memory(error)
                    ours = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("sidestream.")
                    if not (memory or ours):
                        _log.exception("the model could not be loaded")
                    text = memory or with_server_flags(" ".join(str(error).split()) or type(error).__name__)
                    channel.send({"event": "failed", "message": text})
                    return 2
                channel.send({"event": "ready", "ready": msgspec.to_builtins(ready)})
                linger = 200
                return _Loop(link, channel, served, ready).run()
        finally:
            context.destroy(linger=linger)


def _heartbeats(channel: Channel, sender: ResultSender) -> HeartbeatThread:
    """Return a thread that sends heartbeats to the supervisor and the batcher."""

    def beat() -> None:
        channel.send_heartbeat()
        sender.send(Alive())

    return HeartbeatThread(beat, sender.close)


def main() -> NoReturn:
    """Run and end without the interpreter's clean-up, which would break threads inside imports or tensor operations."""
    raise_gc_thresholds()
    switch_threads_often()
    code = run(int(sys.argv[1]))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
