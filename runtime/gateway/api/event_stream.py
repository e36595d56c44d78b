"""Responses as server-sent events.

A task per stream awaits the first and the last chunks and errors. While the client reads fast enough, the chunks in
between are formatted and written as soon as they are read from the engine, without a task switch. Waking a task for
each chunk would take longer than all other work for it.

A proxy closes a response that is silent for too long, often after 60 s. So the head of a waiting stream is sent with a
comment as soon as an engine accepted the request, and a comment follows whenever nothing else was sent for an interval.
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol.messages import Chunk
from ..interfaces import GatewayError
from .body_types import StreamOptions
from .completion_session import CompletionSession, TokenCounts
from .errors import error_body
from .request_body import while_connected

DIRECT_BODY = "sidestream.direct_body"
"""Key of the connection's `DirectBody` in a request's scope. Absent without a connection."""
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
END = b"}\n\n"
HEAD_SECONDS = 0.25
"""Time for the first event. A stream that waits longer sends its head; most do not, and save the write."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_PLACEHOLDER = secrets.token_hex(16)  # random, so that no name and no id contains it
encode = msgspec.json.Encoder().encode


class DirectBody(Protocol):
    """Writes parts from the middle of a response body without a task."""

    @property
    def ready(self) -> bool:
        """Whether the head of the response is sent, and the client is connected and reads."""
        ...

    def write(self, part: bytes) -> None:
        """Write a part. Requires `ready`."""


class StreamFormatter(Protocol):
    """Formats the chunks of a request as events."""

    def format(self, prompt_index: int, chunks: Sequence[Chunk]) -> list[bytes]:
        """Return the events for chunks of one prompt's answer. May be empty."""
        ...

    def format_end(self, counts: TokenCounts) -> list[bytes]:
        """Return the events after all chunks."""
        ...

    def format_error(self, problem: GatewayError) -> bytes:
        """Return the event for an error after the first event."""
        ...


class EventStream(Response):
    """Sends the events of a session. An error before the head is sent is raised, and gets its own status.

    Closes the session at the end, also if the client disconnects before the first event.

    waiting    sent while the request waits: a comment, or an event that clients ignore
    receipts   send the receipt of each prompt's answer with its last event
    """

    media_type = "text/event-stream"

    def __init__(
        self, session: CompletionSession, formatter: StreamFormatter, waiting: bytes = WAITING, receipts: bool = False
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS | session.headers)
        self._session, self._formatter, self._waiting = session, formatter, waiting
        self._receipts = receipts
        self._body: DirectBody | None = None
        self._started = self._active = False
        self._keepalive_timer: asyncio.TimerHandle | None = None
        self._keepalive: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        self._body = scope.get(DIRECT_BODY)
        interval = self._session.keepalive_seconds
        if interval:
            self._set_timer(min(HEAD_SECONDS, interval), interval, send)
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            if not self._started:
                raise
        finally:
            if self._keepalive_timer is not None:
                self._keepalive_timer.cancel()
            self._cancel_keepalive()
            await self._session.close()

    def _set_timer(self, seconds: float, left: float, send: Send) -> None:
        """Look in `seconds` whether to send a comment. `left`: seconds until one is due."""
        loop = asyncio.get_running_loop()
        self._keepalive_timer = loop.call_later(seconds, self._keep_alive, left - seconds, send)

    def _keep_alive(self, left: float, send: Send) -> None:
        interval = self._session.keepalive_seconds
        if not self._started and not self._session.accepted and left > 0:
            self._set_timer(min(HEAD_SECONDS, left), left, send)  # the request may still be refused
            return
        if not self._active and (self._keepalive is None or self._keepalive.done()):
            self._keepalive = asyncio.create_task(self._send(send, self._waiting, False))
        self._active = False
        self._set_timer(interval, interval, send)

    def _cancel_keepalive(self) -> None:
        """Cancel a comment that waits for the client to read. A part of it is never sent: uvicorn writes at once."""
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None

    async def _send_all(self, send: Send) -> None:
        session, formatter = self._session, self._formatter
        try:
            async for prompt_index, chunks in session.stream(None if self._body is None else self._write_directly):
                events = formatter.format(prompt_index, chunks)
                receipt = chunks[-1].receipt if self._receipts and events else None
                if receipt is not None:
                    events[-1] = events[-1].removesuffix(END) + b',"sidestream_receipt":' + encode(receipt) + END
                last = session.complete
                if last:
                    events += formatter.format_end(session.counts)
                if events:
                    self._cancel_keepalive()
                    self._active = True
                    await self._send(send, b"".join(events), last)
                if last:  # no await between the end of the answer and the end of `while_connected`
                    return
        except GatewayError as problem:
            self._cancel_keepalive()
            if not self._started:
                raise
            await self._send(send, formatter.format_error(problem), True)

    async def _send(self, send: Send, data: bytes, last: bool) -> None:
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._started = True
        await send({"type": "http.response.body", "body": data, "more_body": not last})

    def _write_directly(self, chunk: Chunk) -> bool:
        """Write a chunk from the middle of the answer. Returns False if the client must be awaited."""
        body = self._body
        if body is None or not body.ready:
            return False
        events = self._formatter.format(0, (chunk,))
        if events:
            self._active = True
            body.write(b"".join(events))
        return True


class ChunkEncoder:
    """Encodes the events of one stream of completions. The fields around the choices are encoded once.

    force_usage   each event has the usage, whatever the options are
    """

    def __init__(
        self,
        kind: str,
        answer_id: str,
        created: int,
        model: str,
        options: StreamOptions | None,
        force_usage: bool = False,
    ) -> None:
        fields = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + encode(fields)[:-1] + b',"choices":'
        self._include_usage = force_usage or (options is not None and bool(options.include_usage))
        self._continuous = force_usage or (options is not None and bool(options.continuous_usage_stats))
        self._tail = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"

    def event(self, choice: object, prompt_token_ids: list[int] | None = None) -> bytes:
        """Return the event of one choice, with the prompt's tokens next to it if they are given."""
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + encode(prompt_token_ids)
        return self._head + b"[" + encode(choice) + b"]" + ids + self._tail

    def format_end(self, counts: TokenCounts) -> list[bytes]:
        """Return the last events: the usage if it was requested, with the metrics, and [DONE]."""
        if not self._include_usage:
            return [DONE]
        end = {"usage": counts.usage()} | ({"metrics": counts.metrics} if counts.reports_metrics else {})
        return [self._head + b"[]," + encode(end)[1:] + b"\n\n", DONE]

    def format_error(self, problem: GatewayError) -> bytes:
        """Return the event that ends a stream after an error."""
        return b"data: " + error_body(problem) + b"\n\n"

    def with_usage(self, formatter: StreamFormatter, counts: TokenCounts) -> StreamFormatter:
        """Return a formatter of this encoder's events that adds the usage to each, if the client requests that."""
        return _UsageFormatter(formatter, self._tail, counts) if self._continuous else formatter


class _UsageFormatter:
    """Adds to each event the tokens of its prompt, and those of its completion so far.

    tail   end of the events of `formatter`, after which the usage is written
    """

    def __init__(self, formatter: StreamFormatter, tail: bytes, counts: TokenCounts) -> None:
        self.format_end, self.format_error = formatter.format_end, formatter.format_error
        self._formatter, self._tail, self._counts = formatter, tail, counts
        self._completion_tokens: defaultdict[tuple[int, int], int] = defaultdict(int)

    def format(self, prompt_index: int, chunks: Sequence[Chunk]) -> list[bytes]:
        events = []
        for chunk in chunks:
            self._completion_tokens[prompt_index, chunk.index] += len(chunk.token_ids)
            so_far = TokenCounts(
                {prompt_index: self._counts.by_prompt.get(prompt_index, 0)},
                self._completion_tokens[prompt_index, chunk.index],
                self._counts.cached_tokens,
            )
            tail = b',"usage":' + encode(so_far.usage()) + b"}\n\n"
            for event in self._formatter.format(prompt_index, (chunk,)):
                events.append(event.removesuffix(self._tail) + tail)
        return events


class TextChunkEncoder:
    """Encodes events of one choice that differ only in text. All other fields are encoded once.

    choice   returns the choice with a given text
    """

    def __init__(self, encoder: ChunkEncoder, choice: Callable[[str], object]) -> None:
        self._before, self._after = encoder.event(choice(_PLACEHOLDER)).split(encode(_PLACEHOLDER))

    def event(self, text: str) -> bytes:
        """Return the event with this text."""
        return self._before + encode(text) + self._after


def named_event(name: str, body: object) -> bytes:
    """Return an event with an `event:` line."""
    return b"event: " + name.encode() + b"\ndata: " + encode(body) + b"\n\n"
