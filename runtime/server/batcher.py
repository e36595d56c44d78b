"""The batcher process: clients on one side, the GPU process on the other, and the loop between them.

`python -m sidestream.runtime.server.batcher FD` starts it.

One thread. Results of the GPU process come first, because the next plan waits for them; then clients' messages, a
limited number at a time.
"""

import contextlib
import gc
import logging
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..api.sampling_defaults import SamplingDefaults
from ..processes.channel import Channel, ChannelClosed
from ..processes.garbage import GarbageLook, collect_seldom
from ..processes.watch import HEARTBEAT_SECONDS, STALL_SECONDS, AwakeClock
from ..protocol.addresses import make_private_directory, parse
from ..protocol.curve_keys import load_server_keys
from ..protocol.messages import INSTANCE_BYTES
from ..scheduler.step_plan import StepDrafts
from ..text.chat_files import read_chat_templates
from ..text.encoder_thread import Encoder, keep_large_blocks_apart
from ..text.generation_config import AUTO, describe, sampling_defaults
from ..text.tokenizer import load_tokenizer
from .adapter_requests import AdapterDesk
from .connections import Connections
from .gpu_link import Answer, BatcherEnd, InHostMemory, LoadDone, Loading, Ready, StepFailed
from .grammar_requests import GrammarDesk
from .listener import MAX_PEERS, CurveListener, Listener, OpenListener
from .message_router import FrontDesk
from .open_requests import OpenRequests
from .retries import Retries
from .settings import ServeSettings
from .state import ServerState
from .stepper import Stepper
from .submissions import Submissions, missing_adapter
from .tokenize_requests import TokenDesk

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.1
BUSY_TICK_MS = 20
FRAMES_AT_ONCE = 64
RESTART_RETRY = 5.0
FAREWELL_SECONDS = 1.0
DESCRIPTORS = MAX_PEERS + 256
HUNG_STEP = "a step that computed this request alone did not return within {:g} s, and the engine was ended"


class Batcher:
    """The process's state and its loop; `run` returns the exit code."""

    def __init__(self, settings: ServeSettings, channel: Channel, context: "zmq.Context[Any]") -> None:
        self._settings, self._channel, self._context = settings, channel, context
        self._state = ServerState()
        model = Path(settings.model)
        self._tokenizer = load_tokenizer(model)
        self._encoder = None if self._tokenizer is None else Encoder(self._tokenizer)
        self._listener = self._listen()
        self._connections = Connections(self._listener, os.urandom(INSTANCE_BYTES))
        self._requests = OpenRequests(self._connections)
        self._grammars = GrammarDesk(self._tokenizer)
        self._submissions = Submissions(
            self._state,
            self._connections,
            self._requests,
            self._tokenizer,
            self._encoder,
            self._grammars,
            settings.max_waiting,
        )
        self._adapters = AdapterDesk(
            self._state,
            self._connections,
            self._requests,
            settings.admin,
            settings.adapter_roots,
            lambda name, path: channel.send({"event": "adapter", "name": name, "path": path}),
        )
        self._tokens = TokenDesk(self._connections, self._tokenizer, self._encoder)
        self._desk = FrontDesk(
            settings,
            self._state,
            self._connections,
            self._requests,
            self._submissions,
            self._adapters,
            self._tokens,
            read_chat_templates(model, settings.chat_template),
            self._tokenizer is not None,
            self._sampling_defaults(model),
        )
        self._stop_at: float | None = None
        self._poller = zmq.Poller()
        self._link: BatcherEnd | None = None
        self._clock = AwakeClock()
        self._gpu_heard = 0.0
        self._gave_up = self._told_to_end = False
        self._retries = Retries()
        self._answers_told = 0
        self._expect_gpu(settings.generation)
        for source in (self._listener.source, channel, self._grammars, *([self._encoder] if self._encoder else [])):
            self._poller.register(source, zmq.POLLIN)

    def _sampling_defaults(self, model: Path) -> SamplingDefaults:
        found = sampling_defaults(model, self._settings.llm.get("generation_config", AUTO))
        if line := describe(found):
            _log.info("%s", line)
        return found

    def _listen(self) -> Listener:
        address = parse(self._settings.bind)
        make_private_directory(address)
        if self._settings.keys is None:
            return OpenListener(address)
        return CurveListener(self._context, address, load_server_keys(self._settings.keys))

    # -- loop ------------------------------------------------------------------------------------------------------

    def run(self, early: Iterable[dict[str, Any]] = ()) -> int:
        """Serve until the supervisor says stop or is gone. `early`: orders that came with the settings."""
        _allow_descriptors()
        _tame_garbage_collector()
        garbage = GarbageLook()
        next_tick = next_beat = 0.0
        try:
            for order in early:
                self._obey(order)
            self._channel.send({"event": "bound", "address": self._listener.address})
            while True:
                stepper = self._state.stepper
                busy = self._connections.waiting or (stepper is not None and stepper.in_flight)
                wait = 0 if self._listener.pending else BUSY_TICK_MS if busy else int(TICK_SECONDS * 1000)
                ready = dict(self._poller.poll(wait))
                self._clock.look()
                if self._link is not None and self._link.results in ready:
                    self._hear_gpu(self._link)
                if self._channel.fileno() in ready:
                    for order in self._channel.receive():
                        self._obey(order)
                if self._encoder is not None and self._encoder.fileno() in ready:
                    self._take_encoded(self._encoder)
                if self._grammars.fileno() in ready:
                    for key, grammar in self._grammars.take():
                        self._submissions.compiled(key, grammar)
                now = time.monotonic()
                if self._listener.pending or self._listener.source in ready or now >= next_tick:
                    self._hear_clients()
                if now >= next_tick:
                    next_tick = now + TICK_SECONDS
                    self._connections.beat()
                    self._watch_gpu()
                if now >= next_beat:
                    next_beat = now + HEARTBEAT_SECONDS
                    self._channel.beat()
                    self._tell_answers()
                self._settle()
                garbage.look()  # plans are out
                if self._stop_at is not None and (not self._requests or now >= self._stop_at):
                    return self._farewell()
        except ChannelClosed:
            if not self._told_to_end:
                _log.error("the supervisor is gone")
            shutil.rmtree(self._settings.directory, ignore_errors=True)  # which it would have done
            return 1

    def _hear_gpu(self, link: BatcherEnd) -> None:
        """Results and messages of the GPU process."""
        self._gpu_heard = self._clock.seconds
        while (message := link.receive()) is not None:
            stepper = self._state.stepper
            if isinstance(message, Loading):
                self._state.phase, self._state.progress = message.phase, message.progress
            elif isinstance(message, Ready):
                self._gpu_ready(message, link)
            elif stepper is None:
                continue
            elif isinstance(message, tuple):
                self._requests.progress(*stepper.take(*message))
                if not self._answers_told:  # before its client hears: this process may be dead at the next beat
                    self._tell_answers()
                self._connections.flush()
            elif isinstance(message, StepDrafts):
                stepper.take_drafts(message)
            elif isinstance(message, StepFailed):
                stepper.fail(message.step)
            elif isinstance(message, LoadDone):
                stepper.load_done(message)
            elif isinstance(message, InHostMemory):
                stepper.in_host_memory = set(message.numbers)
            elif isinstance(message, Answer):
                self._adapters.answered(message)

    def _take_encoded(self, encoder: Encoder) -> None:
        """Texts that are tokenized. In a function of its own: the loop must not keep the last one."""
        for key, outcome in encoder.take():
            if not self._tokens.answered(key, outcome):
                self._submissions.encoded(key, outcome)

    def _hear_clients(self) -> None:
        self._listener.look()
        for _ in range(FRAMES_AT_ONCE):
            arrived = self._listener.receive()
            if arrived is None:
                return
            self._desk.receive(*arrived)
            # dozens of requests at once take as long as a short step: the next plan goes first
            if self._link is not None and self._link.has_news:
                return

    def _settle(self) -> None:
        """What every turn of the loop ends with: lost clients' requests end, plans go out, chunks go out."""
        self._forget_lost()
        stepper = self._state.stepper
        if stepper is not None:
            stepper.link.flush()
            stepper.pump()
            ended = stepper.take_ended()
            if ended[0] or ended[1]:
                self._requests.progress(*ended)
        self._connections.flush()
        self._forget_lost()

    def _forget_lost(self) -> None:
        for identity in self._listener.take_gone():
            self._connections.hung_up(identity)
        for client in self._connections.take_lost():
            self._submissions.lose(client)

    # -- the GPU process's lives -----------------------------------------------------------------------------------

    def _watch_gpu(self) -> None:
        """Notice a GPU process that is stopped, and have one ended whose step does not return."""
        stepper = self._state.stepper
        if stepper is None:
            return
        self._state.stalled = self._clock.seconds - self._gpu_heard > STALL_SECONDS or stepper.watch.late
        step = stepper.watch.overdue
        if step is None or self._gave_up:
            return
        self._gave_up = True
        limit = stepper.watch.limit
        guilty = self._retries.accuse(stepper, step)
        request = None if guilty is None else self._requests.get(guilty)
        if request is not None:
            self._submissions.fail(request, HUNG_STEP.format(limit))
        self._channel.send({"event": "overdue", "generation": self._generation, "seconds": limit})

    def _tell_answers(self) -> None:
        """Let the supervisor know that requests were answered: what dies later did not die at its start."""
        answered = self._requests.counts["finished_total"]
        if answered > self._answers_told:
            self._answers_told = answered
            self._channel.send({"event": "answered"})

    def _expect_gpu(self, generation: int) -> None:
        """Be ready for a new GPU process."""
        self._generation = generation
        self._gpu_heard = self._clock.seconds
        self._gave_up = False
        self._link = BatcherEnd(self._context, Path(self._settings.directory), generation)
        self._poller.register(self._link.results, zmq.POLLIN)

    def _gpu_ready(self, ready: Ready, link: BatcherEnd) -> None:
        self._state.stepper = Stepper(
            ready,
            link,
            self._tokenizer,
            int(self._settings.llm.get("seed", 0)),
            self._settings.step_timeout,
            self._clock,
            link.open_masks(ready.masks),
        )
        self._grammars.ready(ready)
        self._state.phase, self._state.progress = "ready", 1.0
        self._channel.send({"event": "serving"})
        still_open = {}
        for request in self._requests.all():
            missing = missing_adapter(self._state.stepper, request.adapter, request.adapter_content)
            if missing is not None and missing[0] == "adapter_changed":
                self._requests.refuse(request, *missing)
                continue
            still_open[request.key] = request
            request.scored_here = 0
        refused = self._retries.resubmit(self._state.stepper, set(still_open))
        for key, problem in refused.items():
            self._requests.refuse(still_open[key], "engine_dead", f"the engine died, and this cannot go on: {problem}")

    def _gpu_died(self, restarting: bool) -> None:
        if self._link is not None:
            self._poller.unregister(self._link.results)
            self._link.close()
            self._link = None
        retry_after = RESTART_RETRY if restarting else None
        going_on = self._retries.take(self._state.stepper if restarting else None)
        if self._state.stepper is not None:
            self._state.stepper.close()
        self._state.stepper, self._state.stalled = None, False
        self._submissions.engine_died(retry_after, going_on)
        self._adapters.engine_died(retry_after)
        self._connections.flush()
        if not going_on:
            self._connections.instance = os.urandom(INSTANCE_BYTES)
        self._state.phase, self._state.progress = "restarting" if restarting else "dead", 0.0
        self._state.dead = not restarting

    # -- the supervisor's orders -----------------------------------------------------------------------------------

    def _obey(self, order: dict[str, Any]) -> None:
        what = order["order"]
        if what == "gpu_died":
            self._gpu_died(bool(order["restarting"]))
        elif what == "gpu_starting":
            self._expect_gpu(int(order["generation"]))
        elif what == "drain":
            self._state.draining = True
            self._stop_at = time.monotonic() + float(order["seconds"])
        elif what == "end":
            self._told_to_end = True
        if what == "gpu_died" and self._state.dead:
            self._stop_at = time.monotonic()

    def _farewell(self) -> int:
        """End what is still open, and give the last words a moment to go out."""
        for request in self._requests.all():
            self._submissions.abort(request)
        until = time.monotonic() + FAREWELL_SECONDS
        self._connections.flush()
        while self._connections.waiting and time.monotonic() < until:
            time.sleep(0.01)
            self._connections.flush()
        self._channel.send({"event": "drained"})
        self._listener.close(FAREWELL_SECONDS)
        return 0

    def close(self) -> None:
        """Threads and sockets."""
        gc.unfreeze()
        if self._encoder is not None:
            self._encoder.close()
        self._grammars.close()
        if self._state.stepper is not None:
            self._state.stepper.close()
        self._listener.close(0)


def _allow_descriptors() -> None:
    """Each connection takes one; many systems allow a process 1024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _tame_garbage_collector() -> None:
    """What is loaded stays: looking through it again and again would cost milliseconds in the middle of a step."""
    gc.collect()
    gc.freeze()
    collect_seldom()


def run(fd: int) -> int:
    """The process: settings from the channel, then serve. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s batcher %(message)s")
    keep_large_blocks_apart()
    channel = Channel.from_fd(fd)
    try:
        first, *early = channel.receive(block=True)
    except ChannelClosed:
        return 1
    settings = msgspec.convert(first["settings"], ServeSettings)
    context = zmq.Context()
    try:
        batcher = Batcher(settings, channel, context)
    except (ValueError, OSError, zmq.ZMQError) as error:
        with contextlib.suppress(ChannelClosed):
            channel.send({"event": "failed", "message": " ".join(str(error).split())})
        context.destroy(linger=0)
        return 2
    try:
        return batcher.run(early)
    finally:
        batcher.close()
        context.destroy(linger=int(FAREWELL_SECONDS * 1000))


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
