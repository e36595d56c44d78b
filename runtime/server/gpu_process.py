"""The GPU process: builds the runner, then takes plans in and hands tokens back.

`python -m sidestream.runtime.server.gpu_process FD` is how the supervisor starts it.

Its main thread only receives plans and launches them; a second one waits for results and sends them; a third reads
adapters from disk; a fourth says that the process is alive (`watch`). So a plan that arrives while the device is busy
is launched at once, after the step that runs. A step that needs masks computes its logits meanwhile; it is sampled when
they have come, and plans after it wait until then. If they are also for drafts, these are told first.
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

from ..engine.flag_spelling import with_server_flags
from ..processes.channel import Channel, ChannelClosed
from ..processes.garbage import collect_seldom
from ..processes.memory import out_of_memory
from ..processes.watch import Pulse
from ..scheduler.step_plan import StepDrafts, StepMasks, StepPlan, no_rows
from .gpu_link import (
    Alive,
    Answer,
    GpuEnd,
    InHostMemory,
    Load,
    LoadDone,
    Loading,
    Notice,
    Ready,
    Reporter,
    Retire,
    StartLoad,
    StepFailed,
    Unload,
)
from .served import LOST, Served, ServedModel, for_caller, is_fatal, with_loaded, without_directories
from .settings import ServeSettings

_log = logging.getLogger(__name__)
POLL_LOADS_MS = 1
HOST_MEMORY_SECONDS = 0.1
END_SECONDS = 1.5
MORE_WORDS = 32
"""A tokenizer may know more tokens than have logits, and masks are as wide as it needs."""
STEP_FAULT = "a step failed on the device"


class _Step(NamedTuple):
    step: int
    handle: Any
    received: int
    launched: int
    problem: str | None = None
    drafts: bool = False  # only these are to be told


class _Loop:
    """Runs until the batcher or the supervisor is gone."""

    def __init__(self, link: GpuEnd, channel: Channel, served: Served, ready: Ready) -> None:
        self._link, self._channel, self._served, self._ready = link, channel, served, ready
        self._runner = served.runner
        self._reporter = link.reporter()
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._plans: deque[tuple[StepPlan, int]] = deque()
        self._unsampled: _Step | None = None  # launched, and waiting for masks
        self._errands: queue.SimpleQueue[Load | Unload | None] = queue.SimpleQueue()
        self._loads = 0
        self._in_host_memory: set[int] = set()
        self._look_again = 0.0
        self._broken, self._ending = threading.Event(), threading.Event()

    def run(self) -> int:
        """Serve. Returns the exit code: 70 when the device's context is lost."""
        threads = [
            threading.Thread(target=target, args=(self._link.reporter(),), daemon=True)
            for target in (self._collect, self._read_adapters)
        ]
        for thread in threads:
            thread.start()
        ready = self._ready
        masks = self._link.share_masks(ready.max_num_seqs, -(-ready.vocabulary // 32) + MORE_WORDS)
        self._reporter.tell(msgspec.structs.replace(ready, masks=masks))
        poller = zmq.Poller()
        for source in (self._link.plans, self._link.lost, self._channel):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._broken.is_set():
                arrived = dict(poller.poll(POLL_LOADS_MS if self._loads else 500))
                while (message := self._link.receive()) is not None:
                    self._take(message)
                if self._loads:
                    self._report_loads()
                if time.monotonic() >= self._look_again:
                    self._report_host_memory()
                if self._link.lost in arrived:
                    self._supervisor_gone()
                    _log.error("the batcher is gone")
                    return 0
                if self._channel.fileno() in arrived:
                    self._channel.receive()
        except ChannelClosed:
            return 0
        finally:
            self._ending.set()
            self._steps.put(None)
            self._errands.put(None)
            # the interpreter must not end in the middle of their tensor operations: C++ would abort the process
            for thread in threads:
                thread.join(END_SECONDS)
        return LOST

    def _supervisor_gone(self) -> None:
        """Raises ChannelClosed if the supervisor is stopping both processes: the batcher went first."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while selector.select(1.0):
                self._channel.receive()

    def _take(self, message: Any) -> None:
        if isinstance(message, StartLoad):
            self._loads += 1
            self._runner.start_load(message.slot, message.number)
        elif isinstance(message, Retire):
            self._runner.forget_adapter(message.number)
        elif isinstance(message, Notice):
            self._errands.put(message)  # type: ignore[arg-type]
        elif isinstance(message, StepMasks):
            self._sample(message)
        else:
            self._plans.append(message)
        while self._plans and self._unsampled is None:
            plan, received = self._plans.popleft()
            step = self._launch(plan.step, received, partial(self._runner.submit, plan))
            if step.problem is None and len(plan.masked_rows):
                self._unsampled = step
                if plan.masks_drafts:
                    self._steps.put(step._replace(drafts=True))
            else:
                self._steps.put(step)

    def _sample(self, masks: StepMasks) -> None:
        """The step that waits for these masks goes on; those of one that has failed come too late."""
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
            _log.exception("step %d failed", number)
            if is_fatal(error):
                self._broken.set()
            return _Step(number, None, received, received, STEP_FAULT)
        return _Step(number, handle, received, time.monotonic_ns())

    def _report_loads(self) -> None:
        for slot, number, problem in self._runner.loaded():
            self._loads -= 1
            self._reporter.tell(LoadDone(slot, number, None if problem is None else without_directories(problem)))

    def _report_host_memory(self) -> None:
        self._look_again = time.monotonic() + HOST_MEMORY_SECONDS
        numbers = set(self._served.in_host_memory())
        if numbers != self._in_host_memory:
            self._in_host_memory = numbers
            self._reporter.tell(InHostMemory(sorted(numbers)))

    def _collect(self, reporter: Reporter) -> None:
        """The thread that waits for the device."""
        while (step := self._steps.get()) is not None:
            if step.problem is not None:
                reporter.tell(StepFailed(step.step, step.problem))
                continue
            if step.drafts:
                reporter.drafts(self._drafts(step))
                continue
            try:
                result = self._runner.collect(step.handle)
            except Exception as error:
                _log.exception("step %d failed", step.step)
                reporter.tell(StepFailed(step.step, STEP_FAULT))
                if is_fatal(error):
                    self._broken.set()
                continue
            reporter.result(result, step.received, step.launched)
        reporter.close()

    def _drafts(self, step: _Step) -> StepDrafts:
        """A step's drafts; none where they cannot be read, and what is wrong with the device shows at the step's
        end.
        """
        try:
            return self._runner.drafts(step.handle)
        except Exception as error:
            _log.exception("the drafts of step %d", step.step)
            if is_fatal(error):
                self._broken.set()
            return StepDrafts(step.step, no_rows().reshape(0, 0))

    def _read_adapters(self, reporter: Reporter) -> None:
        """The thread that reads adapters from disk."""
        while (errand := self._errands.get()) is not None and not self._ending.is_set():
            try:
                if isinstance(errand, Load):
                    answer = Answer(errand.ticket, self._served.add_adapter(errand.name, errand.path, errand.replace))
                else:
                    self._served.remove_adapter(errand.name)
                    answer = Answer(errand.ticket)
            except Exception as error:
                answer = Answer(errand.ticket, problem=for_caller(error, errand.name))
            reporter.tell(answer)


def run(fd: int, build: Callable[[ServeSettings], Served] = ServedModel) -> int:
    """The process: settings from the channel, then serve. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s gpu %(message)s")
    try:
        return _serve(Channel.from_fd(fd), build)
    except ChannelClosed:
        return 1  # the supervisor has said why


def _serve(channel: Channel, build: Callable[[ServeSettings], Served]) -> int:
    (first, *_) = channel.receive(block=True)
    settings = msgspec.convert(first["settings"], ServeSettings)
    with zmq.Context() as context:
        link = GpuEnd(context, Path(settings.directory), settings.generation)
        linger = 0
        try:
            with _pulse(channel, link.reporter()):
                link.reporter().tell(Loading("loading"))
                try:
                    served = build(settings)
                    ready = with_loaded(served, settings.loaded_adapters)
                except Exception as error:
                    memory = out_of_memory(error)
                    clear = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("sidestream.")
                    if not (memory or clear):
                        _log.exception("the model could not be loaded")
                    text = memory or with_server_flags(" ".join(str(error).split()) or type(error).__name__)
                    channel.send({"event": "failed", "message": text})
                    return 2
                channel.send({"event": "ready", "ready": msgspec.to_builtins(ready)})
                linger = 200
                return _Loop(link, channel, served, ready).run()
        finally:
            context.destroy(linger=linger)


def _pulse(channel: Channel, reporter: Reporter) -> Pulse:
    """Beats for the supervisor and for the batcher."""

    def beat() -> None:
        channel.beat()
        reporter.tell(Alive())

    return Pulse(beat, reporter.close)


def main() -> NoReturn:
    """Ends without the interpreter's clean-up: a thread may be in the middle of an import or of a tensor operation, and
    the clean-up would take away what it uses.
    """
    collect_seldom()
    code = run(int(sys.argv[1]))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
