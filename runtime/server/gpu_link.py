"""Plans, masks, results and messages between the batcher and the GPU process, over two private ipc sockets.

A message is a pair of frames (kind, body). Plans, drafts, masks and results are flat arrays (`scheduler.step_codec`),
all else is msgpack. Masks in shared memory are sent as their position. Each thread of the GPU process that sends has
its own socket; the batcher receives from all of them on one.
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

from ..api.sampling_params import DEFAULT_MAX_LOGPROBS, RAW_LOGPROBS
from ..protocol.messages import ErrorCode
from ..scheduler import step_codec as codec
from ..scheduler.limits import KvRole
from ..scheduler.step_plan import PageCopies, StepDrafts, StepMasks, StepPlan, StepResult
from ..text.chat_files import NO_CHAT, AdapterChat
from .shared_masks import SharedMasks

_log = logging.getLogger(__name__)
PLAN, DRAFTS, MASKS, MASK_POSITION, RESULT, MESSAGE = b"P", b"D", b"K", b"S", b"R", b"M"


class Notice(Struct, frozen=True, tag_field="type"):
    """Base of the msgpack messages."""


class LoadedAdapter(Struct, frozen=True):
    """An adapter that the GPU process can serve: its number in plans, content hash and chat templates.

    invocation   token ids from whose last occurrence in a prompt on it is active (aLoRA); (): always
    obstacle     why it cannot be part of a sum, "" if it can
    """

    name: str
    number: int
    rank: int
    content: str
    chat: AdapterChat = NO_CHAT
    invocation: tuple[int, ...] = ()
    obstacle: str = ""


LOST_UPDATE = "its last update was in the memory of a server that has ended; update it again"


def changed_files(name: str) -> str:
    """Return the error for an adapter whose files are not the expected version."""
    return f"adapter {name!r}: its files have changed since it was loaded; load it again"


class Loading(Notice, frozen=True, tag="loading"):
    """GPU -> batcher: progress of the start, 0 to 1."""

    phase: str
    progress: float = 0.0


class Ready(Notice, frozen=True, tag="ready"):
    """GPU -> batcher: plans are accepted; the engine's sizes.

    masks                     path of its `SharedMasks`; "" if there are none
    lora_rank, expert_rank, lora_targets, lora_parts
                              limits for adapters that are loaded later
    host_pages                KV pages in host memory
    disk_pages, disk_prefix   see `SchedulerLimits`
    exact, cascade_tile, cascade_pages, kv_role
                              see `SchedulerLimits`
    left_out                  adapters that could not be read at a restart: name -> error for clients
    numerics                  see `Receipt`
    dtype                     of hidden states, such as `torch.bfloat16`
    logprobs_mode             of sampled tokens: raw_logprobs or processed_logprobs
    max_logprobs              likeliest tokens that a request may ask for at each position
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
    longest_step: float = 0.0
    masks: str = ""
    lora_rank: int = 0
    expert_rank: int = 0
    lora_targets: list[str] = []
    lora_parts: list[str] = []
    max_adapter_sums: int = 64
    left_out: dict[str, str] = {}
    host_pages: int = 0
    disk_pages: int = 0
    disk_prefix: str = ""
    exact: bool = False
    cascade_tile: int = 0
    cascade_pages: int = 0
    kv_role: KvRole = ""
    numerics: str = ""
    dtype: str = ""
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    logprobs_mode: str = RAW_LOGPROBS


class Alive(Notice, frozen=True, tag="alive"):
    """GPU -> batcher: heartbeat."""


class StepFailed(Notice, frozen=True, tag="step_failed"):
    """GPU -> batcher: a step raised and has no tokens."""

    step: int
    message: str


class StartLoad(Notice, frozen=True, tag="start_load"):
    """Batcher -> GPU: copy an adapter into a slot while steps run (-1: into host memory only)."""

    slot: int
    number: int


class LoadDone(Notice, frozen=True, tag="load_done"):
    """GPU -> batcher: a StartLoad has ended."""

    slot: int
    number: int
    problem: str | None = None


class InHostMemory(Notice, frozen=True, tag="in_host_memory"):
    """GPU -> batcher: numbers of the adapters in host memory, sent on changes."""

    numbers: list[int]


class Compose(Notice, frozen=True, tag="compose"):
    """Batcher -> GPU: register a sum of adapters (numbers and weights) under a number, before it is loaded."""

    number: int
    parts: list[tuple[int, float]]


class Retire(Notice, frozen=True, tag="retire"):
    """Batcher -> GPU: an adapter's number is unused from now on."""

    number: int


class CopyPages(Notice, frozen=True, tag="copy_pages"):
    """Batcher -> GPU: start copies of KV pages, after the plans sent before."""

    copies: PageCopies


class PagesCopied(Notice, frozen=True, tag="pages_copied"):
    """GPU -> batcher: the copies of a CopyPages have ended."""

    ticket: int
    problem: str | None = None


class Load(Notice, frozen=True, tag="load"):
    """Batcher -> GPU: read an adapter."""

    ticket: int
    name: str
    path: str
    replace: bool = False


class Unload(Notice, frozen=True, tag="unload"):
    """Batcher -> GPU: remove an adapter's name. No reply to ticket 0 is expected."""

    ticket: int
    name: str


class Update(Notice, frozen=True, tag="update"):
    """Batcher -> GPU: copy, check and pack the first bytes of a file, as the newest version of an adapter."""

    ticket: int
    name: str
    path: str
    nbytes: int
    version: int | None
    switch: bool


class UpdateReply(Notice, frozen=True, tag="update_reply"):
    """GPU -> batcher: the version that an Update has made, and names that are gone; or an error for the client."""

    ticket: int
    adapter: LoadedAdapter | None = None
    removed: list[str] = []
    problem: str = ""
    code: ErrorCode = "adapter_error"


class LoadReply(Notice, frozen=True, tag="load_reply"):
    """GPU -> batcher: result of a Load or Unload; `problem` is an error for the client."""

    ticket: int
    adapter: LoadedAdapter | None = None
    problem: str | None = None


_decode = msgspec.msgpack.Decoder(
    Loading
    | Ready
    | Alive
    | StepFailed
    | StartLoad
    | LoadDone
    | InHostMemory
    | Compose
    | Retire
    | CopyPages
    | PagesCopied
    | Load
    | Unload
    | LoadReply
    | Update
    | UpdateReply
).decode
_encode = msgspec.msgpack.Encoder().encode


class Timing(Struct, frozen=True):
    """Times at which the GPU process received a step's plan, had launched it, and had its tokens (monotonic_ns)."""

    received: int
    launched: int
    done: int


Received = tuple[StepResult, Timing] | StepDrafts | Notice


def _addresses(directory: Path, generation: int) -> tuple[str, str]:
    return f"ipc://{directory}/plans-{generation}.sock", f"ipc://{directory}/results-{generation}.sock"


class BatcherLink:
    """The batcher's end for one GPU process, bound before that process starts."""

    def __init__(self, context: "zmq.Context[Any]", directory: Path, generation: int) -> None:
        self._plans, self.results = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, address in zip((self._plans, self.results), _addresses(directory, generation), strict=True):
            socket.linger = 0
            socket.set_hwm(0)  # only a few steps are in flight
            socket.bind(address)
        self._backlog: deque[tuple[bytes, bytes]] = deque()
        self._received: deque[Received] = deque()
        self._masks: SharedMasks | None = None

    def open_masks(self, path: str) -> SharedMasks | None:
        """Map the GPU process's memory for masks. Returns None if that fails: masks are then sent as messages."""
        try:
            self._masks = SharedMasks.open(path) if path else None
        except (OSError, ValueError) as problem:
            _log.warning("masks are sent as messages: %s", problem)
        return self._masks

    def submit(self, plan: StepPlan) -> None:
        self._send((PLAN, codec.pack_plan(plan)))

    def constrain(self, masks: StepMasks) -> None:
        place = None if self._masks is None else self._masks.find(masks.words)
        self._send(
            (MASKS, codec.pack_masks(masks)) if place is None else (MASK_POSITION, codec.pack_placed(masks, *place))
        )

    def send(self, notice: Notice) -> None:
        self._send((MESSAGE, _encode(notice)))

    def _send(self, frames: tuple[bytes, bytes]) -> None:
        self._backlog.append(frames)
        self.flush()

    def flush(self) -> None:
        """Send the backlog. Nothing can be sent to a GPU process that has not connected yet or has just died."""
        try:
            while self._backlog:
                self._plans.send_multipart(self._backlog[0], zmq.NOBLOCK, copy=False)
                self._backlog.popleft()
        except zmq.Again:
            return

    @property
    def has_input(self) -> bool:
        return bool(self._received) or bool(self.results.get(zmq.EVENTS) & zmq.POLLIN)

    def receive(self) -> "Received | None":
        return self._received.popleft() if self._received else self._read_socket()

    def receive_drafts(self) -> StepDrafts | None:
        """Return the next message if it is drafts; another one is kept for `receive`.

        Drafts mostly arrive with the result of the step before, and the device waits for their masks.
        """
        if not self._received:
            message = self._read_socket()
            if message is None:
                return None
            self._received.append(message)
        return self._received.popleft() if isinstance(self._received[0], StepDrafts) else None  # type: ignore[return-value]

    def _read_socket(self) -> "Received | None":
        try:
            kind, *bodies = self.results.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if kind == RESULT:
            return codec.unpack_result(bodies[0]), Timing(*np.frombuffer(bodies[1], np.int64).tolist())
        if kind == DRAFTS:
            return codec.unpack_drafts(bodies[0])
        return _decode(bodies[0])

    def close(self) -> None:
        self._plans.close(0)
        self.results.close(0)
        if self._masks is not None:
            self._masks.close()


class GpuLink:
    """The GPU process's end. Its main thread receives; each thread that sends makes a `ResultSender`."""

    def __init__(self, context: "zmq.Context[Any]", directory: Path, generation: int) -> None:
        self._context = context
        plans, self._results = _addresses(directory, generation)
        self.plans = context.socket(zmq.PULL)
        self.plans.linger = 0
        self.plans.set_hwm(0)
        self.disconnected = self.plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """Readable when the batcher has ended."""
        self.plans.connect(plans)
        self._masks: SharedMasks | None = None

    def share_masks(self, rows: int, words: int) -> str:
        """Create memory for masks of a step, int32 [rows, words], and return its path. Returns "" if that fails: masks
        are then received as messages.
        """
        try:
            self._masks = SharedMasks.create(rows, words)
        except (OSError, ValueError) as problem:
            _log.warning("masks are received as messages: %s", problem)
            return ""
        return self._masks.path

    def receive(self) -> tuple[StepPlan, int] | StepMasks | Notice | None:
        """Return (plan, time of arrival in ns), masks, a message, or None."""
        try:
            frames = self.plans.recv_multipart(zmq.NOBLOCK, copy=False)  # masks may have megabytes
        except zmq.Again:
            return None
        kind, body = frames[0].bytes, frames[1].buffer
        if kind == PLAN:
            # a copy: torch warns about read-only arrays
            return codec.unpack_plan(bytearray(body)), time.monotonic_ns()
        if kind == MASKS:
            return codec.unpack_masks(body)
        if kind == MASK_POSITION and self._masks is not None:
            step, place, rows, places = codec.unpack_placed(body)
            return StepMasks(step, rows, places, self._masks.masks(*place))
        return _decode(body)

    def sender(self) -> "ResultSender":
        return ResultSender(self._context, self._results)


class ResultSender:
    """Sends one thread's results to the batcher."""

    def __init__(self, context: "zmq.Context[Any]", address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 200
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send_result(self, result: StepResult, received: int, launched: int) -> None:
        """Send a step's tokens, with the times at which its plan was received and launched (monotonic_ns)."""
        times = np.asarray([received, launched, time.monotonic_ns()], np.int64)
        self._socket.send_multipart((RESULT, codec.pack_result(result), times.tobytes()))

    def send_drafts(self, drafts: StepDrafts) -> None:
        self._socket.send_multipart((DRAFTS, codec.pack_drafts(drafts)))

    def send(self, notice: Notice) -> None:
        self._socket.send_multipart((MESSAGE, _encode(notice)))

    def close(self) -> None:
        """Close the socket; queued messages are still sent."""
        self._socket.close()
