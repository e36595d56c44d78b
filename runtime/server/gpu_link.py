"""Between the batcher and the GPU process: plans one way, results the other, over two private ipc sockets.

A frame pair (kind, body): plans, drafts, masks and results are flat arrays (`steps/wire.py`), all else small messages.
Masks lie in memory that both share, and the frame says where, unless there is none or they are too many.
Each thread of the GPU process has a socket of its own for results; the batcher hears them all on one.
"""

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from ..scheduler.step_codec import (
    pack_drafts,
    pack_masks,
    pack_placed,
    pack_plan,
    pack_result,
    unpack_drafts,
    unpack_masks,
    unpack_placed,
    unpack_plan,
    unpack_result,
)
from ..scheduler.step_plan import StepDrafts, StepMasks, StepPlan, StepResult
from ..text.chat_files import NO_CHAT, AdapterChat
from .shared_masks import SharedMasks

_log = logging.getLogger(__name__)
PLAN, DRAFTS, MASKS, PLACED, RESULT, MESSAGE = b"P", b"D", b"K", b"S", b"R", b"M"


class Notice(Struct, frozen=True, tag_field="type"):
    """A small message."""


class LoadedAdapter(Struct, frozen=True):
    """An adapter that the GPU process can serve: its number in plans, what lists say about it, and its own chat
    templates.
    """

    name: str
    number: int
    rank: int
    content: str
    chat: AdapterChat = NO_CHAT


class Loading(Notice, frozen=True, tag="loading"):
    """GPU -> batcher: how far the start-up has come."""

    phase: str
    progress: float = 0.0


class Ready(Notice, frozen=True, tag="ready"):
    """GPU -> batcher: plans may come; the engine's sizes.

    masks                     the path of its `SharedMasks`
    lora_rank, lora_targets   what adapters that come later may have
    left_out                  adapters that could not be read when the process was started again, and why, for clients
    """

    vocabulary: int
    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_slots: int
    eos_ids: list[int]
    adapters: list[LoadedAdapter]
    device: str = "cpu"
    prefix_caching: bool = True
    speculation: str | int = "off"
    step_times: list[tuple[int, int, float]] = []
    speculation_history: int = 0
    seconds: dict[str, float] = {}
    longest_step: float = 0.0
    masks: str = ""
    lora_rank: int = 0
    lora_targets: list[str] = []
    left_out: dict[str, str] = {}


class Alive(Notice, frozen=True, tag="alive"):
    """GPU -> batcher: the process runs, whatever its other threads do."""


class StepFailed(Notice, frozen=True, tag="step_failed"):
    """GPU -> batcher: a step raised; its tokens do not exist."""

    step: int
    message: str


class StartLoad(Notice, frozen=True, tag="start_load"):
    """Batcher -> GPU: bring an adapter into a slot while steps run (-1: into host memory only)."""

    slot: int
    number: int


class LoadDone(Notice, frozen=True, tag="load_done"):
    """GPU -> batcher: a StartLoad is over."""

    slot: int
    number: int
    problem: str | None = None


class InHostMemory(Notice, frozen=True, tag="in_host_memory"):
    """GPU -> batcher: the adapters that are ready in host memory; sent when that has changed."""

    numbers: list[int]


class Retire(Notice, frozen=True, tag="retire"):
    """Batcher -> GPU: nobody uses an adapter's number any more."""

    number: int


class Load(Notice, frozen=True, tag="load"):
    """Batcher -> GPU: read an adapter."""

    ticket: int
    name: str
    path: str
    replace: bool = False


class Unload(Notice, frozen=True, tag="unload"):
    """Batcher -> GPU: forget an adapter's number."""

    ticket: int
    name: str


class Answer(Notice, frozen=True, tag="answer"):
    """GPU -> batcher: what became of a Load or Unload; `problem` is a text for the caller."""

    ticket: int
    adapter: LoadedAdapter | None = None
    problem: str | None = None


_decode = msgspec.msgpack.Decoder(
    Loading | Ready | Alive | StepFailed | StartLoad | LoadDone | InHostMemory | Retire | Load | Unload | Answer
).decode
_encode = msgspec.msgpack.Encoder().encode


class Timing(Struct, frozen=True):
    """When the GPU process received a step's plan, had launched it, and had its tokens (time.monotonic_ns of this
    machine).
    """

    received: int
    launched: int
    done: int


Heard = tuple[StepResult, Timing] | StepDrafts | Notice


def _addresses(directory: Path, generation: int) -> tuple[str, str]:
    return f"ipc://{directory}/plans-{generation}.sock", f"ipc://{directory}/results-{generation}.sock"


class BatcherEnd:
    """The batcher's end, bound before the GPU process starts; one for each life of the GPU process."""

    def __init__(self, context: "zmq.Context[Any]", directory: Path, generation: int) -> None:
        self._plans, self.results = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, address in zip((self._plans, self.results), _addresses(directory, generation), strict=True):
            socket.linger = 0
            socket.set_hwm(0)  # at most a few steps are on their way
            socket.bind(address)
        self._backlog: deque[tuple[bytes, bytes]] = deque()
        self._heard: deque[Heard] = deque()
        self._masks: SharedMasks | None = None

    def open_masks(self, path: str) -> SharedMasks | None:
        """The memory for masks that a GPU process has told of; where it cannot be shared, masks go by message."""
        try:
            self._masks = SharedMasks.open(path) if path else None
        except (OSError, ValueError) as problem:
            _log.warning("masks go by message: %s", problem)
        return self._masks

    def submit(self, plan: StepPlan) -> None:
        """Ship a plan."""
        self._send((PLAN, pack_plan(plan)))

    def constrain(self, masks: StepMasks) -> None:
        """Ship the masks of a step whose plan was shipped."""
        place = None if self._masks is None else self._masks.find(masks.words)
        self._send((MASKS, pack_masks(masks)) if place is None else (PLACED, pack_placed(masks, *place)))

    def tell(self, notice: Notice) -> None:
        """Ship a message."""
        self._send((MESSAGE, _encode(notice)))

    def _send(self, parts: tuple[bytes, bytes]) -> None:
        self._backlog.append(parts)
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent yet: there is no way to a GPU process whose socket is not connected yet, or
        that has just died.
        """
        try:
            while self._backlog:
                self._plans.send_multipart(self._backlog[0], zmq.NOBLOCK, copy=False)
                self._backlog.popleft()
        except zmq.Again:
            return

    @property
    def has_news(self) -> bool:
        """Whether something has arrived."""
        return bool(self._heard) or bool(self.results.get(zmq.EVENTS) & zmq.POLLIN)

    def receive(self) -> "Heard | None":
        """What has arrived next, or None."""
        return self._heard.popleft() if self._heard else self._receive()

    def drafts(self) -> StepDrafts | None:
        """Drafts, if they are what has arrived next: they mostly come with the result of the step before, and their
        masks are waited for. What else has arrived is for `receive`, which is to be called then.
        """
        if not self._heard:
            message = self._receive()
            if message is None:
                return None
            self._heard.append(message)
        return self._heard.popleft() if isinstance(self._heard[0], StepDrafts) else None  # type: ignore[return-value]

    def _receive(self) -> "Heard | None":
        try:
            kind, *parts = self.results.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if kind == RESULT:
            return unpack_result(parts[0]), Timing(*np.frombuffer(parts[1], np.int64).tolist())
        if kind == DRAFTS:
            return unpack_drafts(parts[0])
        return _decode(parts[0])

    def close(self) -> None:
        """Unbind."""
        self._plans.close(0)
        self.results.close(0)
        if self._masks is not None:
            self._masks.close()


class GpuEnd:
    """The GPU process's end: its main thread receives; each thread that reports makes a `Reporter`."""

    def __init__(self, context: "zmq.Context[Any]", directory: Path, generation: int) -> None:
        self._context = context
        plans, self._results = _addresses(directory, generation)
        self.plans = context.socket(zmq.PULL)
        self.plans.linger = 0
        self.plans.set_hwm(0)
        self.lost = self.plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """Readable once the batcher is gone."""
        self.plans.connect(plans)
        self._masks: SharedMasks | None = None

    def share_masks(self, rows: int, words: int) -> str:
        """Make memory for so many masks a step, of so many words; returns where the batcher finds it, or nothing
        where it cannot be had: then masks come by message.
        """
        try:
            self._masks = SharedMasks.create(rows, words)
        except (OSError, ValueError) as problem:
            _log.warning("masks come by message: %s", problem)
            return ""
        return self._masks.path

    def receive(self) -> tuple[StepPlan, int] | StepMasks | Notice | None:
        """(plan, when it came), masks, a message, or None."""
        try:
            parts = self.plans.recv_multipart(zmq.NOBLOCK, copy=False)  # masks may have megabytes
        except zmq.Again:
            return None
        kind, body = parts[0].bytes, parts[1].buffer
        if kind == PLAN:
            # a copy, so that torch takes the arrays without a warning
            return unpack_plan(bytearray(body)), time.monotonic_ns()
        if kind == MASKS:
            return unpack_masks(body)
        if kind == PLACED and self._masks is not None:
            step, place, rows, places = unpack_placed(body)
            return StepMasks(step, rows, places, self._masks.masks(*place))
        return _decode(body)

    def reporter(self) -> "Reporter":
        """For one thread."""
        return Reporter(self._context, self._results)


class Reporter:
    """One thread's way to the batcher."""

    def __init__(self, context: "zmq.Context[Any]", address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 200
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def result(self, result: StepResult, received: int, launched: int) -> None:
        """Hand a step's tokens over."""
        times = np.asarray([received, launched, time.monotonic_ns()], np.int64)
        self._socket.send_multipart((RESULT, pack_result(result), times.tobytes()))

    def drafts(self, drafts: StepDrafts) -> None:
        """Tell what a step has for drafts."""
        self._socket.send_multipart((DRAFTS, pack_drafts(drafts)))

    def tell(self, notice: Notice) -> None:
        """Ship a message."""
        self._socket.send_multipart((MESSAGE, _encode(notice)))

    def close(self) -> None:
        """Send what is left and close."""
        self._socket.close()
