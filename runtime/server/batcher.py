"""The batcher process: clients on one side, the GPU process on the other, and the loop between them.

`python -m sidestream.runtime.server.batcher FD` starts it.

One thread. Results of the GPU process come first, because the next plan waits for them; then clients' messages, a
limited number at a time.
"""

import gc
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ... import __version__
from ..text.encoder import Encoder
from ..text.tokenizer import load_tokenizer
from ..wire.addresses import make_private_directory, parse
from ..wire.keys import Gate, load_server_keys
from ..wire.protocol import INSTANCE_BYTES, MAX_FRAME_BYTES, Health, Welcome
from .channel import Channel, ChannelClosed
from .connections import SEND_HWM, Connections
from .front_desk import FrontDesk
from .gpu_link import Answer, BatcherEnd, InHostMemory, LoadDone, Loading, Ready, StepFailed
from .open_requests import OpenRequests
from .settings import ServeSettings
from .stepper import Stepper

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.1
BUSY_TICK_MS = 20
FRAMES_AT_ONCE = 64
RESTART_RETRY = 5.0
FAREWELL_SECONDS = 1.0


class Batcher:
    """The process's state and its loop; `run` returns the exit code."""

    def __init__(self, settings: ServeSettings, channel: Channel, context: "zmq.Context[Any]") -> None:
        self.settings = settings
        self.channel = channel
        self._context = context
        self._directory = Path(settings.directory)
        model = Path(settings.model)
        self.tokenizer = load_tokenizer(model)
        self._encoder = None if self.tokenizer is None else Encoder(self.tokenizer)
        self._words = _chat_words(model)
        self._gate: Gate | None = None
        self.router = self._bind()
        self.connections = Connections(self.router, os.urandom(INSTANCE_BYTES))
        self.requests = OpenRequests(self.connections)
        self.desk = FrontDesk(
            settings,
            self.connections,
            self.requests,
            self.tokenizer,
            self._encoder,
            self._greet,
            self._health,
            self._stats,
        )
        self._started = time.monotonic()
        self._phase, self._progress = "starting", 0.0
        self._dead = False
        self._stop_at: float | None = None
        self._poller = zmq.Poller()
        self._link: BatcherEnd | None = None
        self._gpu_generation(settings.generation)
        for source in (self.router, channel, *([self._encoder] if self._encoder else [])):
            self._poller.register(source, zmq.POLLIN)

    def _bind(self) -> "zmq.Socket[Any]":
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.router_mandatory = True
        router.sndhwm = router.rcvhwm = SEND_HWM
        router.maxmsgsize = MAX_FRAME_BYTES
        router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        router.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        if self.settings.keys is not None:
            keys = load_server_keys(self.settings.keys)
            self._gate = Gate(self._context, keys)
            keys.secure(router)
        make_private_directory(parse(self.settings.bind))
        router.bind(self.settings.bind)
        return router

    def _endpoint(self) -> str:
        """The address that was bound, a port that the system chose filled in."""
        endpoint = self.router.getsockopt(zmq.LAST_ENDPOINT)
        return endpoint.decode().rstrip("\x00") if isinstance(endpoint, bytes) else self.settings.bind

    # -- loop ------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the supervisor says stop or is gone."""
        self.channel.send({"event": "bound", "address": self._endpoint()})
        _tame_garbage_collector()
        next_tick = 0.0
        try:
            while True:
                stepper = self.desk.stepper
                busy = self.connections.waiting or (stepper is not None and stepper.in_flight)
                ready = dict(self._poller.poll(BUSY_TICK_MS if busy else int(TICK_SECONDS * 1000)))
                if self._link is not None and self._link.results in ready:
                    self._hear_gpu(self._link)
                if self.channel.fileno() in ready:
                    for order in self.channel.receive():
                        self._obey(order)
                if self._encoder is not None and self._encoder.fileno() in ready:
                    self.desk.encoded()
                if self.router in ready:
                    self._hear_clients()
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_SECONDS
                    self.connections.beat()
                self._settle()
                if self._stop_at is not None and (not self.requests or now >= self._stop_at):
                    return self._farewell()
        except ChannelClosed:
            _log.error("the supervisor is gone")
            return 1

    def _hear_gpu(self, link: BatcherEnd) -> None:
        """Results and messages of the GPU process."""
        while (message := link.receive()) is not None:
            stepper = self.desk.stepper
            if isinstance(message, Loading):
                self._phase, self._progress = message.phase, message.progress
            elif isinstance(message, Ready):
                self._gpu_ready(message, link)
            elif stepper is None:
                continue
            elif isinstance(message, tuple):
                self.requests.progress(*stepper.take(*message))
                self.connections.flush()
            elif isinstance(message, StepFailed):
                stepper.fail(message.step)
            elif isinstance(message, LoadDone):
                stepper.load_done(message)
            elif isinstance(message, InHostMemory):
                stepper.in_host_memory = set(message.numbers)
            elif isinstance(message, Answer):
                self.desk.answered(message)

    def _hear_clients(self) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                parts = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.desk.receive(parts)
            # dozens of requests at once take as long as a short step: the next plan goes first
            if self._link is not None and self._link.has_news:
                return

    def _settle(self) -> None:
        """What every turn of the loop ends with: lost clients' requests end, plans go out, chunks go out."""
        self._forget_lost()
        stepper = self.desk.stepper
        if stepper is not None:
            stepper.link.flush()
            stepper.pump()
            ended = stepper.take_ended()
            if ended[0] or ended[1]:
                self.requests.progress(*ended)
        self.connections.flush()
        self._forget_lost()

    def _forget_lost(self) -> None:
        for client in self.connections.take_lost():
            self.desk.lose(client)

    # -- the GPU process's lives -----------------------------------------------------------------------------------

    def _gpu_generation(self, generation: int) -> None:
        """Be ready for a new GPU process."""
        self._link = BatcherEnd(self._context, self._directory, generation)
        self._poller.register(self._link.results, zmq.POLLIN)

    def _gpu_ready(self, ready: Ready, link: BatcherEnd) -> None:
        self.desk.stepper = Stepper(ready, link, self.tokenizer, int(self.settings.llm.get("seed", 0)))
        self._phase, self._progress = "ready", 1.0
        self.channel.send({"event": "serving"})

    def _gpu_died(self, restarting: bool) -> None:
        if self._link is not None:
            self._poller.unregister(self._link.results)
            self._link.close()
            self._link = None
        self.desk.engine_died(RESTART_RETRY if restarting else None)
        self.connections.flush()
        self.connections.instance = os.urandom(INSTANCE_BYTES)
        self._phase, self._progress = "restarting" if restarting else "dead", 0.0
        self._dead = not restarting

    # -- the supervisor's orders -----------------------------------------------------------------------------------

    def _obey(self, order: dict[str, Any]) -> None:
        what = order["order"]
        if what == "gpu_died":
            self._gpu_died(bool(order["restarting"]))
        elif what == "gpu_starting":
            self._gpu_generation(int(order["generation"]))
        elif what == "drain":
            self.desk.draining = True
            self._stop_at = time.monotonic() + float(order["seconds"])
        if what == "gpu_died" and self._dead:
            self._stop_at = time.monotonic()

    def _farewell(self) -> int:
        """End what is still open, and give the last words a moment to go out."""
        for request in self.requests.all():
            self.desk.abort(request)
        until = time.monotonic() + FAREWELL_SECONDS
        self.connections.flush()
        while self.connections.waiting and time.monotonic() < until:
            time.sleep(0.01)
            self.connections.flush()
        self.channel.send({"event": "drained"})
        self.router.close(int(FAREWELL_SECONDS * 1000))
        return 0

    # -- answers ---------------------------------------------------------------------------------------------------

    def _greet(self, stepper: Stepper) -> Welcome:
        ready, words = stepper.ready, self._words
        return Welcome(
            server_version=__version__,
            model=self.settings.served_model_name[:256],
            vocabulary=ready.vocabulary,
            max_model_len=ready.max_model_len,
            max_num_seqs=ready.max_num_seqs,
            max_adapter_slots=ready.num_slots,
            has_tokenizer=self.tokenizer is not None,
            admin=self.settings.admin,
            chat_template=words.get("chat_template"),
            bos_token=words.get("bos_token", ""),
            eos_token=words.get("eos_token", ""),
        )

    def _health(self, call: int) -> Health:
        stepper = self.desk.stepper
        status: Any = (
            "dead" if self._dead else "draining" if self.desk.draining else "loading" if stepper is None else "ok"
        )
        step = 0.0 if stepper is None else stepper.last_step_seconds
        return Health(call, status, self._phase, self._progress, time.monotonic() - self._started, step)

    def _stats(self) -> dict[str, int | float]:
        values: dict[str, int | float] = {
            "uptime_seconds": time.monotonic() - self._started,
            "cpu_seconds_total": time.process_time(),
            "connections": len(self.connections.clients),
            "requests_open": len(self.requests),
            "slow_readers_total": self.connections.slow_total,
            "refused_connections_total": self.connections.refused_total,
            "bad_frames_total": self.desk.bad_frames,
        }
        values |= self.requests.counts
        return values if self.desk.stepper is None else values | self.desk.stepper.stats()

    def close(self) -> None:
        """Threads and sockets."""
        gc.unfreeze()
        if self._encoder is not None:
            self._encoder.close()
        if self._gate is not None:
            self._gate.close()


def _chat_words(model: Path) -> dict[str, str]:
    """The model's chat template and its first and last token, as far as its directory has them."""
    words: dict[str, str] = {}
    path = model / "tokenizer_config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        for name in ("bos_token", "eos_token"):
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and len(token) <= 256:
                words[name] = token
        if isinstance(config.get("chat_template"), str):
            words["chat_template"] = config["chat_template"]
    if (model / "chat_template.jinja").is_file():
        words["chat_template"] = (model / "chat_template.jinja").read_text(encoding="utf-8")
    if len(words.get("chat_template", "")) > 1 << 18:
        del words["chat_template"]
    return words


def _tame_garbage_collector() -> None:
    """What is loaded stays: looking through it again and again would cost milliseconds in the middle of a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def run(fd: int) -> int:
    """The process: settings from the channel, then serve. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s batcher %(message)s")
    channel = Channel.from_fd(fd)
    (first, *_) = channel.receive(block=True)
    settings = msgspec.convert(first["settings"], ServeSettings)
    context = zmq.Context()
    try:
        batcher = Batcher(settings, channel, context)
    except (ValueError, OSError, zmq.ZMQError) as error:
        channel.send({"event": "failed", "message": " ".join(str(error).split())})
        context.destroy(linger=0)
        return 2
    try:
        return batcher.run()
    finally:
        batcher.close()
        context.destroy(linger=int(FAREWELL_SECONDS * 1000))


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
