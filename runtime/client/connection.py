"""A client's connection: greeting, heartbeats, open requests and calls, and their errors when it breaks.

`docs/protocol.md` is the specification.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..api.errors import EngineDeadError, RequestError, ServerError
from ..protocol import framing
from ..protocol import messages as protocol
from ..protocol.addresses import Address, AddressError, check_private_directory
from ..protocol.curve_keys import ClientKeys
from ..protocol.messages import Message, Welcome
from .link import ClientLink
from .requests import PendingRequest, exception_of

_RETRY_PAUSE = 0.1

T = TypeVar("T", bound=Message)


class Connection:
    """A connection that `connect` opens, and opens again after a loss. Belongs to one asyncio loop."""

    def __init__(
        self,
        address: Address,
        keys: ClientKeys | None,
        connect_timeout: float,
        silence_seconds: float | None,
        name: str,
    ) -> None:
        self.address, self.keys = address, keys
        self.connect_timeout, self.silence_seconds = connect_timeout, silence_seconds
        self._name = (name or f"python-{os.getpid()}")[:256]
        self._call_numbers = itertools.count(1)
        self._link: ClientLink | None = None
        self._welcome: Welcome | None = None
        self._instance = protocol.NO_INSTANCE
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[Welcome] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._greeting: asyncio.Future[Welcome] | None = None
        self._open: dict[str, PendingRequest] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_sent = self._last_received = 0.0
        self._closed = False
        self.on_lost: Callable[[Exception], None] | None = None
        """Called when an established connection breaks, before open requests fail."""

    async def connect(self) -> Welcome:
        """Connect if not connected; see `AsyncClient.connect`."""
        self._check_open()
        if self._welcome is not None:
            return self._welcome
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            # marks an exception as retrieved, as no caller may be left
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._connecting)

    def close(self) -> None:
        """End the connection for good; open requests are aborted and fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._open and self._welcome is not None:
            with contextlib.suppress(ServerError):
                self._send(protocol.Abort(request_ids=list(self._open)[: protocol.MAX_OPEN_REQUESTS]))
        self._lose(EngineDeadError("the client was closed", "engine_dead"), linger=True)

    def submit(
        self,
        message: protocol.Submit,
        when_accepted: Callable[[int, str], None] | None = None,
        direct: Callable[[protocol.Chunk], bool] | None = None,
    ) -> PendingRequest:
        """Send a request; see PendingRequest. Raises RequestError if its id is open or it is too long."""
        if message.request_id in self._open:
            raise RequestError(f"request_id={message.request_id!r} is in use; choose another")
        request = PendingRequest(message.request_id, message.continues, when_accepted, direct)
        self._open[message.request_id] = request
        try:
            self._send(message)
        except BaseException:
            del self._open[message.request_id]
            raise
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request; its last chunk still arrives."""
        if request_id in self._open:
            self._send(protocol.Abort(request_ids=[request_id]))

    def remove(self, request: PendingRequest) -> None:
        """Remove a request, and abort it unless it has ended."""
        if self._open.get(request.request_id) is request:
            del self._open[request.request_id]
            if not request.ended and self._welcome is not None:
                with contextlib.suppress(ServerError):
                    self._send(protocol.Abort(request_ids=[request.request_id]))

    async def call(self, message: type[Message], reply: type[T], timeout: float, **fields: Any) -> T:
        """Send a call with these fields and return its reply. Opens a link, but sends no hello. Raises TimeoutError."""
        self._check_open()
        if self._link is None:
            self._open_link()
        number = next(self._call_numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send(message(call=number, **fields))
            async with asyncio.timeout(timeout):
                received = await future
        except TimeoutError:
            raise TimeoutError(f"the server did not answer within {timeout:g} s") from None
        finally:
            self._calls.pop(number, None)
        if not isinstance(received, reply):
            text = f"the server answered with {type(received).__name__} in place of {reply.__name__}"
            raise ServerError(text, "bad_frame")
        return received

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this client is closed; make a new one")
        if self._link is not None and self._loop is not asyncio.get_running_loop():
            raise RequestError("this client belongs to another event loop; make one in each asyncio.run")

    def _open_link(self) -> ClientLink:
        check_private_directory(self.address)
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._last_received = time.monotonic()
        self._link = ClientLink(self.address, self.keys, self._receive, self._lose)
        self._schedule_heartbeat(self._link)
        return self._link

    async def _connect(self) -> Welcome:
        deadline = time.monotonic() + self.connect_timeout
        problem: Exception = EngineDeadError("there was no answer", "engine_dead")
        while (left := deadline - time.monotonic()) > 0:
            pause = _RETRY_PAUSE
            try:
                if self._link is None:
                    self._open_link()
                self._greeting = asyncio.get_running_loop().create_future()
                self._send(protocol.Hello(client=self._name))
                async with asyncio.timeout(left):
                    return await self._greeting
            except TimeoutError:
                break
            except AddressError as error:
                if self.address.path is not None and self.address.path.parent.exists():
                    raise  # the directory is unsafe, and waiting does not help
                problem = error
            except ServerError as error:
                if not isinstance(error, EngineDeadError) and error.code != "loading":
                    raise
                problem, pause = error, max(pause, error.retry_after or 0.0)
            finally:
                self._greeting = None
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        self._lose(EngineDeadError("the server did not answer", "engine_dead"))
        reason = str(problem).removeprefix(f"nothing serves at {self.address}: ")
        if not isinstance(problem, AddressError):  # has a remedy in its text
            reason += self._remedy()
        text = f"nothing serves at {self.address} (waited {self.connect_timeout:g} s): {reason}"
        raise EngineDeadError(text, "engine_dead")

    def _remedy(self) -> str:
        """Return the remedy for the user. A server does not answer a client with wrong keys."""
        if self.address.scheme != "tcp":
            return "; start `sidestream serve`, or give its address"
        if self.keys is None:
            return "; start `sidestream serve` there, and if it has keys, give this client's folder with --keys"
        return (
            "; if a server runs there, its keys do not match these: use the client's folder that "
            "`sidestream keys curve` made together with the server's"
        )

    def _send(self, message: Message) -> None:
        if self._link is None:
            raise EngineDeadError("there is no connection to the engine", "engine_dead")
        try:
            frame = framing.encode(message, self._instance)
        except (framing.FrameError, msgspec.MsgspecError, UnicodeEncodeError, OverflowError) as problem:
            raise RequestError(f"the request cannot be sent: {problem}") from None
        if not self._link.send(frame):
            raise ServerError("the send queue is full: the server does not read; try again later", "overloaded", 1.0)
        self._last_sent = time.monotonic()

    def _schedule_heartbeat(self, link: ClientLink) -> None:
        """Call `_heartbeat` after half an interval. Uses a timer, since a loop that ends reports pending tasks."""
        welcome = self._welcome
        interval = protocol.HEARTBEAT_SECONDS if welcome is None else min(max(welcome.heartbeat_seconds, 0.01), 60.0)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(interval / 2, self._heartbeat, link, welcome, interval, time.monotonic())

    def _heartbeat(self, link: ClientLink, welcome: Welcome | None, interval: float, scheduled: float) -> None:
        """Send a heartbeat if nothing else was sent; fail if the server is silent for too long."""
        if self._link is not link:
            return
        now = time.monotonic()
        if now - scheduled > 2 * interval:
            self._last_received = now  # this process was stopped, and the server's messages are unread
            link.read_soon()
        elif welcome is not None:
            limit = welcome.silence_seconds if self.silence_seconds is None else self.silence_seconds
            silence = now - self._last_received
            if silence > limit:
                self._lose(EngineDeadError(f"the engine sent nothing for {silence:.1f} s", "engine_dead"))
                return
            if now - self._last_sent >= interval / 2:
                with contextlib.suppress(ServerError):
                    self._send(protocol.Beat())
        self._schedule_heartbeat(link)

    def _lose(self, problem: Exception, linger: bool = False) -> None:
        """Close the connection and fail everything that is open."""
        if self._link is not None:
            self._link.close(linger)
        greeted = self._welcome is not None
        self._link, self._welcome, self._instance = None, None, protocol.NO_INSTANCE
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if greeted and self.on_lost is not None and not self._closed:
            self.on_lost(problem)
        opened, calls = list(self._open.values()), list(self._calls.values())
        self._open.clear()
        for request in opened:
            request.fail(problem)
        for waiting in (*calls, *([self._greeting] if self._greeting is not None else [])):
            if not waiting.done():
                waiting.set_exception(problem)

    def _receive(self, data: bytes) -> None:
        self._last_received = time.monotonic()
        try:
            frame = framing.decode_from_server(data)
        except framing.FrameError as problem:
            text = f"the program at {self.address} does not use this protocol: {problem}"
            self._lose(ServerError(text, problem.code))
            return
        message = frame.message
        if isinstance(message, protocol.Error):
            self._receive_error(message)
        elif isinstance(message, Welcome):
            self._instance, self._welcome = frame.instance, message
            if self._greeting is not None and not self._greeting.done():
                self._greeting.set_result(message)
        elif self._welcome is not None and frame.instance != self._instance:
            self._lose(EngineDeadError("the engine was restarted", "wrong_instance"))
        elif isinstance(message, protocol.Chunks):
            for chunk in message.chunks:  # wake tasks that wait for a first token before the others
                if not chunk.first and (request := self._open.get(chunk.request_id)) is not None:
                    request.wake()
            for chunk in message.chunks:
                if (request := self._open.get(chunk.request_id)) is not None:
                    request.put(chunk)
                    if request.ended:
                        del self._open[chunk.request_id]
                        if chunk.usage is None:  # it failed here and still runs on the server
                            self._send(protocol.Abort(request_ids=[chunk.request_id]))
        elif isinstance(message, protocol.Accepted):
            if (request := self._open.get(message.request_id)) is not None:
                request.accept(message.prompt_tokens, message.adapter_content)
        elif not isinstance(message, protocol.Beat):
            self._set_reply(message.call, message)

    def _receive_error(self, error: protocol.Error) -> None:
        problem = exception_of(error)
        if error.request_id is not None:
            if (request := self._open.pop(error.request_id, None)) is not None:
                request.fail(problem)
        elif error.call is not None:
            self._set_reply(error.call, problem)
        elif self._greeting is not None and not self._greeting.done() and error.code == "loading":
            self._greeting.set_exception(problem)
        else:
            self._lose(problem)

    def _set_reply(self, number: int, reply: Any) -> None:
        future = self._calls.get(number)
        if future is not None and not future.done():
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)
