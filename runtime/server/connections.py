"""Connected clients, their heartbeats, and the messages queued for them. A slow client does not delay the others."""

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
    MAX_ERROR_CHARACTERS,
    MAX_FRAME_CHUNKS,
    SILENCE_SECONDS,
    Beat,
    Chunk,
    Chunks,
    Error,
    ErrorCode,
    Message,
)
from .listener import Listener

_log = logging.getLogger(__name__)
MAX_CLIENTS = 1024
PAUSE_SECONDS = 5 * HEARTBEAT_SECONDS
"""After such a gap between heartbeats this process was stopped: clients' messages of that time are still unread."""
FULL = "the server has as many connections as it accepts; try again later"
FULL_RETRY = 1.0
MAX_BAD_FRAMES = 64
MAX_PENDING_CHUNKS = 4096
MAX_PENDING_BYTES = 8 << 20
MAX_PENDING_FRAMES = 1024
FRAME_BYTES = 256 << 10
"""Approximate size of a frame of chunks."""
LOGPROB_BYTES = 160
SLOW = (
    "chunks were not read fast enough, so all requests of this connection were ended; read faster, or have fewer "
    "requests open"
)


@dataclass(eq=False)
class ClientConnection:
    """One connection.

    last_received, last_sent  times in seconds
    open                      request id -> key in the engine
    blocked                   the socket accepts nothing at the moment
    latest                    while blocked: (request, completion) -> index of its last chunk in `chunks`
    """

    identity: bytes
    number: int
    last_received: float
    last_sent: float
    greeted: bool = False
    closed: bool = False
    slow: bool = False
    bad_frames: int = 0
    open: dict[str, str] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_bytes: int = 0
    frames: deque[bytes] = field(default_factory=deque)
    frame_bytes: int = 0
    blocked: bool = False
    latest: dict[tuple[str, int], int] = field(default_factory=dict)

    def drop_chunks(self) -> list[Chunk]:
        """Empty the queue of chunks and return it."""
        chunks, self.chunks, self.chunk_bytes, self.latest = self.chunks, [], 0, {}
        return chunks


class Connections:
    """Clients by connection id. `instance`: the engine-instance id in each frame."""

    def __init__(self, listener: Listener, instance: bytes) -> None:
        self._listener = listener
        self.instance = instance
        self.clients: dict[bytes, ClientConnection] = {}
        self._pending: dict[bytes, ClientConnection] = {}
        self._lost: list[ClientConnection] = []
        self._num_accepted = 0
        self._last_heartbeat = time.monotonic()
        self.slow_total = 0
        self.refused_total = 0

    def client_of(self, identity: bytes) -> ClientConnection | None:
        """Return the client that sent a frame.

        At MAX_CLIENTS a new client replaces the oldest one without a hello. If all have sent one, the new client gets
        an error and this returns None.
        """
        now = time.monotonic()
        client = self.clients.get(identity)
        if client is None:
            if len(self.clients) >= MAX_CLIENTS and not self._remove_ungreeted():
                self.refused_total += 1
                with contextlib.suppress(OSError):
                    error = Error("overloaded", FULL, retry_after=FULL_RETRY)
                    self._listener.send(identity, encode(error, self.instance))
                return None
            self._num_accepted += 1
            client = self.clients[identity] = ClientConnection(identity, self._num_accepted, now, now)
        client.last_received = now
        return client

    def send(self, client: ClientConnection, message: Message) -> None:
        """Send a message, or queue it while the socket is full. Chunks of `add_chunk` go first."""
        if client.closed:
            return
        if isinstance(message, Error):
            message = structs.replace(message, message=with_server_flags(message.message))
        if client.chunks:
            self._encode_chunks(client)
        self._append(client, message)
        if client.closed:
            return
        self._pending[client.identity] = client
        self._send_frames(client)

    def send_error(
        self,
        client: ClientConnection,
        code: ErrorCode,
        text: str,
        request_id: str | None = None,
        call: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Send an error; its text is cut to the limit."""
        self.send(client, Error(code, text[:MAX_ERROR_CHARACTERS], request_id, call, retry_after))

    def add_chunk(self, client: ClientConnection, chunk: Chunk) -> None:
        """Queue a chunk for the next `flush`."""
        if client.closed or client.slow:
            return
        client.chunk_bytes += 64 + len(chunk.text) + 4 * len(chunk.token_ids) + _logprob_bytes(chunk)
        self._pending[client.identity] = client
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
                and _logprob_bytes(before) + _logprob_bytes(chunk) <= FRAME_BYTES
            ):
                client.chunks[place] = _joined(before, chunk)
                return
            client.latest[key] = len(client.chunks)
        client.chunks.append(chunk)

    def flush(self) -> None:
        """Send queued messages as far as sockets accept them; end the requests of clients that are too slow."""
        if not self._pending:
            return
        for client in list(self._pending.values()):
            if client.chunks and not client.frames:
                self._encode_chunks(client)
            self._send_frames(client)
            if client.frames and (
                len(client.chunks) > MAX_PENDING_CHUNKS
                or client.chunk_bytes + client.frame_bytes > MAX_PENDING_BYTES
                or len(client.frames) > MAX_PENDING_FRAMES
            ):
                self._end_slow(client)
            if not client.frames and not client.chunks:
                self._pending.pop(client.identity, None)

    def send_heartbeats(self) -> None:
        """Send heartbeats to clients that were sent nothing else; remove silent clients."""
        now = time.monotonic()
        pause, self._last_heartbeat = now - self._last_heartbeat, now
        for client in list(self.clients.values()):
            if pause > PAUSE_SECONDS:
                client.last_received += pause
            if now - client.last_received > SILENCE_SECONDS:
                self.remove(client)
            elif client.greeted and now - client.last_sent >= HEARTBEAT_SECONDS and not client.frames:
                self.send(client, Beat())

    def disconnected(self, identity: bytes) -> None:
        """Remove the client of a connection that has ended."""
        client = self.clients.get(identity)
        if client is not None:
            self.remove(client)

    def remove(self, client: ClientConnection) -> None:
        """Remove a client and report it by `take_lost`."""
        if not client.closed:
            client.closed = True
            client.chunks, client.frames = [], deque()
            self.clients.pop(client.identity, None)
            self._pending.pop(client.identity, None)
            self._lost.append(client)

    def take_lost(self) -> list[ClientConnection]:
        """Return clients that were removed or too slow since the last call. Their requests must be aborted."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def has_output(self) -> bool:
        return bool(self._pending)

    def _remove_ungreeted(self) -> bool:
        client = next((each for each in self.clients.values() if not each.greeted), None)
        if client is None:
            return False
        self.refused_total += 1
        self.remove(client)
        self._listener.drop(client.identity)
        return True

    def _encode_chunks(self, client: ClientConnection) -> None:
        """Move the client's chunks into frames."""
        estimate = client.chunk_bytes
        chunks = client.drop_chunks()
        # the estimate has one byte per character, which may take four
        if 4 * estimate < FRAME_BYTES and len(chunks) <= MAX_FRAME_CHUNKS:
            self._append(client, Chunks(chunks))
            return
        first = size = 0
        for index, chunk in enumerate(chunks):
            if client.closed:
                return
            chunk_bytes = 64 + 4 * len(chunk.text) + 5 * len(chunk.token_ids) + _logprob_bytes(chunk)
            if index > first and (size + chunk_bytes > FRAME_BYTES or index - first >= MAX_FRAME_CHUNKS):
                self._append(client, Chunks(chunks[first:index]))
                first, size = index, 0
            size += chunk_bytes
        if not client.closed:
            self._append(client, Chunks(chunks[first:]))

    def _append(self, client: ClientConnection, message: Message) -> None:
        try:
            frame = encode(message, self.instance)
        except FrameError:
            _log.exception("a frame for client %d cannot be sent; closing its connection", client.number)
            self.remove(client)
            return
        client.frames.append(frame)
        client.frame_bytes += len(frame)

    def _send_frames(self, client: ClientConnection) -> None:
        frames = client.frames
        try:
            while frames:
                self._listener.send(client.identity, frames[0])
                client.frame_bytes -= len(frames.popleft())
                client.last_sent = time.monotonic()
        except BlockingIOError:
            client.blocked = True
            return
        except ConnectionError:
            self.remove(client)
            return
        client.blocked = client.slow = False

    def _end_slow(self, client: ClientConnection) -> None:
        """Replace what a slow client did not read by an error."""
        if client.slow:  # it did not read that error either
            self.remove(client)
            return
        self.slow_total += 1
        client.slow = True
        client.drop_chunks()
        client.frames = deque([encode(Error("slow_reader", SLOW), self.instance)])
        client.frame_bytes = len(client.frames[0])
        self._lost.append(client)


def _logprob_bytes(chunk: Chunk) -> int:
    """Return the approximate size of a chunk's log-probabilities."""
    if chunk.logprobs is None and chunk.prompt_logprobs is None:
        return 0
    return LOGPROB_BYTES * sum(map(len, (*(chunk.logprobs or ()), *(chunk.prompt_logprobs or ()))))


def _joined(first: Chunk, second: Chunk) -> Chunk:
    scored = first.logprobs is not None or second.logprobs is not None
    return Chunk(
        first.request_id,
        first.index,
        first.first,
        first.text + second.text,
        [*first.token_ids, *second.token_ids],
        second.finish_reason,
        second.stop_reason,
        [*(first.logprobs or []), *(second.logprobs or [])] if scored else None,
        second.usage,
        text_offsets=[*(first.text_offsets or []), *(second.text_offsets or [])] if scored else None,
        versions=second.versions,
    )
