"""The clients of a server: who is there, what they have open, and what still has to go out to them.

A client that does not read holds nobody else up.
"""

import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass, field

from msgspec import structs

from ..engine.flag_spelling import with_server_flags
from ..protocol.framing import FrameError, encode
from ..protocol.messages import (
    HEARTBEAT_SECONDS,
    MAX_CHUNK_TOKENS,
    MAX_FRAME_CHUNKS,
    SILENCE_SECONDS,
    Beat,
    Chunk,
    Chunks,
    Error,
    Message,
)
from .listener import Listener

_log = logging.getLogger(__name__)
MAX_CLIENTS = 1024
PAUSE_SECONDS = 5 * HEARTBEAT_SECONDS
"""So long between two beats this process did not run: what clients said meanwhile is still to be read."""
FULL = "the server has as many connections as it takes; try again later"
FULL_RETRY = 1.0
MAX_FAULTS = 64
MAX_PENDING_CHUNKS = 4096
MAX_PENDING_BYTES = 8 << 20
MAX_WAITING_FRAMES = 1024
FRAME_BYTES = 256 << 10
"""Chunks are gathered into frames of about this size."""
LOGPROB_BYTES = 160
SLOW = (
    "chunks were not read fast enough, so all requests of this connection were ended; read faster, or ask for "
    "fewer at once"
)


@dataclass(eq=False)
class Client:
    """One connection. `open`: its request ids -> the engine's ids."""

    identity: bytes
    number: int
    heard: float
    sent: float
    greeted: bool = False
    gone: bool = False
    slow: bool = False
    faults: int = 0
    open: dict[str, str] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_bytes: int = 0
    frames: deque[bytes] = field(default_factory=deque)
    frame_bytes: int = 0
    blocked: bool = False
    # place in `chunks` of a completion's last chunk, while blocked
    latest: dict[tuple[str, int], int] = field(default_factory=dict)


class Connections:
    """Clients by the ids of their connections.

    `lost` and `slow` clients are reported by `take_lost` (whose requests are to be aborted). `instance` goes into every
    frame.
    """

    def __init__(self, listener: Listener, instance: bytes) -> None:
        self._listener = listener
        self.instance = instance
        self.clients: dict[bytes, Client] = {}
        self._dirty: dict[bytes, Client] = {}
        self._lost: list[Client] = []
        self._arrivals = 0
        self._beaten = time.monotonic()
        self.slow_total = 0
        self.refused_total = 0

    def heard(self, identity: bytes) -> Client | None:
        """The client that sent a frame. When there are too many, the one that has been here longest without a hello
        gives way; None when all have said hello, and the newcomer is told.
        """
        now = time.monotonic()
        client = self.clients.get(identity)
        if client is None:
            if len(self.clients) >= MAX_CLIENTS and not self._make_room():
                self.refused_total += 1
                with contextlib.suppress(OSError):
                    error = Error("overloaded", FULL, retry_after=FULL_RETRY)
                    self._listener.send(identity, encode(error, self.instance))
                return None
            self._arrivals += 1
            client = self.clients[identity] = Client(identity, self._arrivals, now, now)
        client.heard = now
        return client

    def say(self, client: Client, message: Message) -> None:
        """Send a message, or keep it until the client takes it. What was added before by `add` goes first."""
        if client.gone:
            return
        if isinstance(message, Error):
            message = structs.replace(message, message=with_server_flags(message.message))
        if client.chunks:
            self._pack(client)
        self._append(client, message)
        if client.gone:
            return
        self._dirty[client.identity] = client
        self._drain(client)

    def add(self, client: Client, chunk: Chunk) -> None:
        """A chunk to go out at the next `flush`."""
        if client.gone or client.slow:
            return
        client.chunk_bytes += 64 + len(chunk.text) + 4 * len(chunk.token_ids)
        for places in (chunk.logprobs, chunk.prompt_logprobs):
            if places is not None:
                client.chunk_bytes += LOGPROB_BYTES * sum(map(len, places))
        self._dirty[client.identity] = client
        if client.blocked:
            key = chunk.request_id, chunk.index
            place = client.latest.get(key)
            before = None if place is None else client.chunks[place]
            if (
                place is not None
                and before is not None
                and before.prompt_logprobs is None
                and chunk.prompt_logprobs is None
                and len(before.token_ids) + len(chunk.token_ids) <= MAX_CHUNK_TOKENS
            ):
                client.chunks[place] = _joined(before, chunk)
                return
            client.latest[key] = len(client.chunks)
        client.chunks.append(chunk)

    def flush(self) -> None:
        """Send what waits, as far as the clients take it; cuts off those that are too slow."""
        if not self._dirty:
            return
        for client in list(self._dirty.values()):
            if client.chunks and not client.frames:
                self._pack(client)
            self._drain(client)
            if client.frames and (
                len(client.chunks) > MAX_PENDING_CHUNKS
                or client.chunk_bytes + client.frame_bytes > MAX_PENDING_BYTES
                or len(client.frames) > MAX_WAITING_FRAMES
            ):
                self._cut(client)
            if not client.frames and not client.chunks:
                self._dirty.pop(client.identity, None)

    def beat(self) -> None:
        """Heartbeats to the clients that heard nothing else; forgets those that are gone or silent."""
        now = time.monotonic()
        pause, self._beaten = now - self._beaten, now
        for client in list(self.clients.values()):
            if pause > PAUSE_SECONDS:
                client.heard += pause
            if now - client.heard > SILENCE_SECONDS:
                self.forget(client)
            elif client.greeted and now - client.sent >= HEARTBEAT_SECONDS and not client.frames:
                self.say(client, Beat())

    def hung_up(self, identity: bytes) -> None:
        """A connection has ended."""
        client = self.clients.get(identity)
        if client is not None:
            self.forget(client)

    def forget(self, client: Client) -> None:
        """The client is gone, or as good as gone."""
        if not client.gone:
            client.gone = True
            client.chunks, client.frames = [], deque()
            self.clients.pop(client.identity, None)
            self._dirty.pop(client.identity, None)
            self._lost.append(client)

    def take_lost(self) -> list[Client]:
        """Clients that are gone or were too slow since the last call: their requests are to be ended."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def waiting(self) -> bool:
        """Whether anything waits to go out."""
        return bool(self._dirty)

    def _make_room(self) -> bool:
        stranger = next((client for client in self.clients.values() if not client.greeted), None)
        if stranger is None:
            return False
        self.refused_total += 1
        self.forget(stranger)
        self._listener.drop(stranger.identity)
        return True

    def _pack(self, client: Client) -> None:
        """Make frames of the client's chunks."""
        chunks, counted = client.chunks, client.chunk_bytes
        client.chunks, client.chunk_bytes, client.latest = [], 0, {}
        # `counted` has one byte for a character, which takes up to four
        if 4 * counted < FRAME_BYTES and len(chunks) <= MAX_FRAME_CHUNKS:
            self._append(client, Chunks(chunks))
            return
        first = size = 0
        for index, chunk in enumerate(chunks):
            if client.gone:
                return
            cost = (
                64
                + 4 * len(chunk.text)
                + 5 * len(chunk.token_ids)
                + LOGPROB_BYTES * sum(map(len, (*(chunk.logprobs or ()), *(chunk.prompt_logprobs or ()))))
            )
            if index > first and (size + cost > FRAME_BYTES or index - first >= MAX_FRAME_CHUNKS):
                self._append(client, Chunks(chunks[first:index]))
                first, size = index, 0
            size += cost
        if not client.gone:
            self._append(client, Chunks(chunks[first:]))

    def _append(self, client: Client, message: Message) -> None:
        try:
            frame = encode(message, self.instance)
        except FrameError:
            _log.exception("a frame for client %d cannot be sent; it is given up", client.number)
            self.forget(client)
            return
        client.frames.append(frame)
        client.frame_bytes += len(frame)

    def _drain(self, client: Client) -> None:
        frames = client.frames
        try:
            while frames:
                self._listener.send(client.identity, frames[0])
                client.frame_bytes -= len(frames.popleft())
                client.sent = time.monotonic()
        except BlockingIOError:
            client.blocked = True
            return
        except ConnectionError:
            self.forget(client)
            return
        client.blocked = client.slow = False

    def _cut(self, client: Client) -> None:
        """Drop what a slow client did not read; it is told when it reads again."""
        if client.slow:  # it did not even read that
            self.forget(client)
            return
        self.slow_total += 1
        client.slow = True
        client.chunks, client.chunk_bytes, client.latest = [], 0, {}
        client.frames = deque([encode(Error("slow_reader", SLOW), self.instance)])
        client.frame_bytes = len(client.frames[0])
        self._lost.append(client)


def _joined(first: Chunk, second: Chunk) -> Chunk:
    logprobs = (
        None
        if first.logprobs is None and second.logprobs is None
        else [*(first.logprobs or []), *(second.logprobs or [])]
    )
    return Chunk(
        first.request_id,
        first.index,
        first.first,
        first.text + second.text,
        [*first.token_ids, *second.token_ids],
        second.finish_reason,
        second.stop_reason,
        logprobs,
        second.usage,
        text_offsets=None if logprobs is None else [*(first.text_offsets or []), *(second.text_offsets or [])],
    )
