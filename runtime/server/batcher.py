"""The batcher process: the loop between clients and the GPU process.

The supervisor starts it as `python -m sidestream.runtime.server.batcher FD`.

It has one thread. It handles results of the GPU process first, because the next plan waits for them, and then a limited
number of clients' messages.
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
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ... import __version__
from ..api.adapter_versions import AdapterVersion
from ..api.sampling_defaults import SamplingDefaults
from ..processes.channel import Channel, ChannelClosed
from ..processes.garbage_collection import PeriodicCollection, exclude_loaded_objects
from ..processes.logs import configure_logging
from ..processes.watchdog import HEARTBEAT_SECONDS, STALL_SECONDS, AwakeClock
from ..protocol.adapter_map import AdapterEntry
from ..protocol.addresses import make_private_directory, parse
from ..protocol.curve_keys import load_server_keys
from ..protocol.messages import INSTANCE_BYTES
from ..receipts.base_hash import start_base_hash
from ..receipts.receipt import ReceiptMaker, read_key
from ..scheduler.step_plan import StepDrafts
from ..text.chat_files import read_chat_templates
from ..text.encoder_thread import Encoder, keep_large_blocks_apart
from ..text.generation_config import AUTO, describe, sampling_defaults
from ..text.tokenizer import load_tokenizer
from .adapter_requests import AdapterRequests
from .connections import Connections
from .gpu_link import (
    BatcherLink,
    InHostMemory,
    LoadDone,
    Loading,
    LoadReply,
    PagesCopied,
    Ready,
    StepFailed,
    UpdateReply,
)
from .listener import MAX_PEERS, CurveListener, Listener, OpenListener
from .message_router import MessageRouter, PauseRequests, TokenizeRequests
from .open_requests import OpenRequests
from .server_state import RetryQueue, ServerState
from .settings import ServeSettings
from .stepper import Stepper
from .submissions import GrammarQueue, Submissions, missing_adapter
from .transfer.prefill_requests import PrefillRequests
from .updates.buffers import UpdateBuffers
from .updates.requests import UpdateRequests

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.1
BUSY_TICK_MS = 20
MAX_FRAMES_PER_TURN = 64
RESTART_RETRY = 5.0
FLUSH_SECONDS = 1.0
DESCRIPTORS = MAX_PEERS + 256
HUNG_STEP = "a step that computed this request alone did not return within {:g} s, and the engine was ended"


class Batcher:
    def __init__(self, settings: ServeSettings, channel: Channel, context: "zmq.Context[Any]") -> None:
        self._settings, self._channel, self._context = settings, channel, context
        self._state = state = ServerState()
        model = Path(settings.model)
        self._tokenizer = load_tokenizer(model)
        self._encoder = None if self._tokenizer is None else Encoder(self._tokenizer)
        self._listener = self._listen()
        self._connections = connections = Connections(self._listener, os.urandom(INSTANCE_BYTES))
        self._requests = requests = OpenRequests(connections)
        self._prefills = PrefillRequests(state, connections, requests, next(iter(settings.kv_sources), ""))
        self._grammars = GrammarQueue(self._tokenizer)
        if settings.receipt_key:
            key = read_key(settings.receipt_key)
            state.receipts = ReceiptMaker(key, __version__, lambda: connections.instance, settings.receipts)
            start_base_hash(model, partial(setattr, state.receipts, "base"))
        self._submissions = Submissions(
            state, connections, requests, self._tokenizer, self._encoder, self._grammars, settings.max_waiting
        )
        self._adapters = AdapterRequests(
            state,
            connections,
            requests,
            settings.admin,
            settings.adapter_roots,
            settings.loaded_adapters,
            lambda entry: channel.send({"event": "adapter", "entry": msgspec.to_builtins(entry)}),
        )
        self._buffers = UpdateBuffers(parse(settings.bind), settings.max_update_bytes)
        self._updates = UpdateRequests(
            state, connections, self._adapters, self._buffers, settings.admin, self._report_update
        )
        self._tokenize = TokenizeRequests(connections, self._tokenizer, self._encoder)
        self._pauses = PauseRequests(state, connections, requests, self._submissions, settings.admin)
        self._router = MessageRouter(
            settings,
            state,
            connections,
            requests,
            self._submissions,
            self._adapters,
            self._updates,
            self._tokenize,
            self._pauses,
            read_chat_templates(model, settings.chat_template),
            self._tokenizer is not None,
            self._sampling_defaults(model),
        )
        self._stop_at: float | None = None
        self._poller = zmq.Poller()
        self._link: BatcherLink | None = None
        self._clock = AwakeClock()
        self._last_gpu_message = 0.0
        self._hang_reported = self._ending = False
        self._retries = RetryQueue()
        self._finished_reported = 0
        self._open_link(settings.generation)
        for source in (self._listener.source, channel, self._grammars, *([self._encoder] if self._encoder else [])):
            self._poller.register(source, zmq.POLLIN)

    def _sampling_defaults(self, model: Path) -> SamplingDefaults:
        options = self._settings.llm
        override = options.get("override_generation_config") or {}
        found = sampling_defaults(model, options.get("generation_config", AUTO), override)
        if line := describe(found, override):
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
        """Serve until the supervisor orders the end or has ended. Returns the exit code.

        `early`: orders that arrived together with the settings.
        """
        _raise_descriptor_limit()
        exclude_loaded_objects()
        collection = PeriodicCollection()
        next_tick = next_heartbeat = 0.0
        try:
            for order in early:
                self._execute(order)
            self._channel.send({"event": "bound", "address": self._listener.address})
            while True:
                stepper = self._state.stepper
                busy = self._connections.has_output or (stepper is not None and stepper.in_flight)
                wait = 0 if self._listener.pending else BUSY_TICK_MS if busy else int(TICK_SECONDS * 1000)
                ready = dict(self._poller.poll(wait))
                self._clock.update()
                if self._link is not None and self._link.results in ready:
                    self._receive_from_gpu(self._link)
                if self._channel.fileno() in ready:
                    for order in self._channel.receive():
                        self._execute(order)
                if self._encoder is not None and self._encoder.fileno() in ready:
                    self._take_encoded(self._encoder)
                if self._grammars.fileno() in ready:
                    for key, grammar in self._grammars.take():
                        self._submissions.constraint_compiled(key, grammar)
                now = time.monotonic()
                if self._listener.pending or self._listener.source in ready or now >= next_tick:
                    self._receive_from_clients()
                if now >= next_tick:
                    next_tick = now + TICK_SECONDS
                    self._connections.send_heartbeats()
                    self._check_gpu()
                if now >= next_heartbeat:
                    next_heartbeat = now + HEARTBEAT_SECONDS
                    self._channel.send_heartbeat()
                    self._report_finished()
                self._end_turn()
                collection.collect_if_due()  # plans were sent
                if self._stop_at is not None and (not self._requests or now >= self._stop_at):
                    return self._finish()
        except ChannelClosed:
            if not self._ending:
                _log.error("the supervisor has ended")
            shutil.rmtree(self._settings.directory, ignore_errors=True)  # in place of the supervisor
            return 1

    def _receive_from_gpu(self, link: BatcherLink) -> None:
        self._last_gpu_message = self._clock.seconds
        while (message := link.receive()) is not None:
            stepper = self._state.stepper
            if isinstance(message, Loading):
                self._state.phase, self._state.progress = message.phase, message.progress
            elif isinstance(message, Ready):
                self._gpu_ready(message, link)
            elif stepper is None:
                continue
            elif isinstance(message, tuple):
                self._requests.send_progress(*stepper.receive_result(*message))
                if not self._finished_reported:  # before the client's answer: this process may die before a heartbeat
                    self._report_finished()
                self._connections.flush()
            elif isinstance(message, StepDrafts):
                stepper.receive_drafts(message)
            elif isinstance(message, StepFailed):
                stepper.fail_step(message.step)
            elif isinstance(message, LoadDone):
                stepper.finish_load(message)
            elif isinstance(message, PagesCopied):
                stepper.pages_copied(message)
            elif isinstance(message, InHostMemory):
                stepper.in_host_memory = set(message.numbers)
            elif isinstance(message, LoadReply):
                self._adapters.receive_reply(message)
            elif isinstance(message, UpdateReply):
                self._updates.receive_reply(message)

    def _take_encoded(self, encoder: Encoder) -> None:
        """Handle tokenized texts. A function of its own, so that the loop keeps no reference to the last one."""
        for key, result in encoder.take():
            if not self._tokenize.finish(key, result):
                self._submissions.prompt_encoded(key, result)

    def _receive_from_clients(self) -> None:
        self._listener.poll()
        for _ in range(MAX_FRAMES_PER_TURN):
            arrived = self._listener.receive()
            if arrived is None:
                return
            self._router.receive(*arrived)
            # dozens of requests take as long as a short step, and the next plan has priority
            if self._link is not None and self._link.has_input:
                return

    def _end_turn(self) -> None:
        """Abort requests of lost clients, send plans and chunks."""
        self._abort_lost()
        stepper = self._state.stepper
        if stepper is not None:
            stepper.link.flush()
            stepper.submit_steps()
            deltas, finished = stepper.engine.take_ended()
            if deltas or finished:
                self._requests.send_progress(deltas, finished)
        self._prefills.answer()
        self._pauses.answer()
        self._connections.flush()
        self._abort_lost()

    def _abort_lost(self) -> None:
        for identity in self._listener.take_disconnected():
            self._connections.disconnected(identity)
        for client in self._connections.take_lost():
            self._submissions.abort_all(client)
            if client.closed:
                self._buffers.close(client)

    # -- the GPU process ---------------------------------------------------------------------------------------------

    def _check_gpu(self) -> None:
        """Notice a GPU process that is stopped; report a step that does not return to the supervisor."""
        stepper = self._state.stepper
        if stepper is None:
            return
        silence = self._clock.seconds - self._last_gpu_message
        self._state.stalled = silence > STALL_SECONDS or stepper.watchdog.late
        step = stepper.watchdog.overdue
        if step is None or self._hang_reported:
            return
        self._hang_reported = True
        limit = stepper.watchdog.limit
        cause = self._retries.record_hang(stepper, step)
        request = None if cause is None else self._requests.get(cause)
        if request is not None:
            self._submissions.fail(request, HUNG_STEP.format(limit))
        self._channel.send({"event": "overdue", "generation": self._generation, "seconds": limit})

    def _report_update(self, entry: AdapterEntry | None, updates: list[AdapterVersion]) -> None:
        """Report the versions of updated adapters to the supervisor, for restarted processes."""
        fields = {"entry": msgspec.to_builtins(entry), "updates": msgspec.to_builtins(updates)}
        self._channel.send({"event": "updated", **fields})

    def _report_finished(self) -> None:
        """Report finished requests to the supervisor, which then resets its count of deaths."""
        finished = self._requests.counts["finished_total"]
        if finished > self._finished_reported:
            self._finished_reported = finished
            self._channel.send({"event": "answered"})

    def _open_link(self, generation: int) -> None:
        self._generation = generation
        self._last_gpu_message = self._clock.seconds
        self._hang_reported = False
        self._link = BatcherLink(self._context, Path(self._settings.directory), generation)
        self._poller.register(self._link.results, zmq.POLLIN)

    def _gpu_ready(self, ready: Ready, link: BatcherLink) -> None:
        self._state.stepper = stepper = Stepper(
            ready,
            link,
            self._tokenizer,
            int(self._settings.llm.get("seed", 0)),
            self._settings.step_timeout,
            self._clock,
            link.open_masks(ready.masks),
            self._state.named_sums,
        )
        stepper.paused = self._state.paused
        if self._state.receipts is not None:
            self._state.receipts.device, self._state.receipts.numerics = ready.device.partition(":")[0], ready.numerics
        self._grammars.prepare(ready)
        self._state.phase, self._state.progress = "ready", 1.0
        self._channel.send({"event": "serving"})
        still_open = {}
        for request in self._requests.all():
            missing = missing_adapter(stepper, request.adapter, request.adapter_content)
            if missing is not None and missing[0] == "adapter_changed":
                self._requests.refuse(request, *missing)
                continue
            still_open[request.key] = request
            request.scored_here = 0
        for key, problem in self._retries.resubmit(stepper, set(still_open)).items():
            text = f"the engine died, and this request cannot continue: {problem}"
            self._requests.refuse(still_open[key], "engine_dead", text)

    def _gpu_died(self, restarting: bool) -> None:
        if self._link is not None:
            self._poller.unregister(self._link.results)
            self._link.close()
            self._link = None
        retry_after = RESTART_RETRY if restarting else None
        resubmitted = self._retries.save(self._state.stepper if restarting else None)
        if self._state.stepper is not None:
            self._state.stepper.close()
        self._state.stepper, self._state.stalled = None, False
        self._submissions.engine_died(retry_after, resubmitted)
        self._adapters.engine_died(retry_after)
        self._updates.engine_died(retry_after)
        self._connections.flush()
        if not resubmitted:
            self._connections.instance = os.urandom(INSTANCE_BYTES)
        self._state.phase, self._state.progress = "restarting" if restarting else "dead", 0.0
        self._state.dead = not restarting

    # -- the supervisor's orders -----------------------------------------------------------------------------------

    def _execute(self, order: dict[str, Any]) -> None:
        what = order["order"]
        if what == "gpu_died":
            self._gpu_died(bool(order["restarting"]))
            if self._state.dead:
                self._stop_at = time.monotonic()
        elif what == "gpu_starting":
            self._open_link(int(order["generation"]))
            self._channel.send({"event": "gpu_awaited"})
        elif what == "drain":
            self._state.draining = True
            self._stop_at = time.monotonic() + float(order["seconds"])
        elif what == "end":
            self._ending = True

    def _finish(self) -> int:
        """Abort open requests, send queued messages, and return the exit code."""
        for request in self._requests.all():
            self._submissions.abort(request)
        deadline = time.monotonic() + FLUSH_SECONDS
        self._connections.flush()
        while self._connections.has_output and time.monotonic() < deadline:
            time.sleep(0.01)
            self._connections.flush()
        self._channel.send({"event": "drained"})
        self._listener.close(FLUSH_SECONDS)
        return 0

    def close(self) -> None:
        gc.unfreeze()
        if self._encoder is not None:
            self._encoder.close()
        self._grammars.close()
        self._buffers.close_all()
        if self._state.stepper is not None:
            self._state.stepper.close()
        self._listener.close(0)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit on descriptors, often 1024: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(fd: int) -> int:
    """Receive settings from the channel `fd` and serve. Returns the exit code."""
    configure_logging("batcher")
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
        context.destroy(linger=int(FLUSH_SECONDS * 1000))


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
