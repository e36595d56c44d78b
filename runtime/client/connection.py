"""A client's connection: greeting, heartbeats, what is open, and who is told when it breaks.

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
from .requests import OpenRequest, exception_of

_RETRY_PAUSE = 0.1

T = TypeVar("T", bound=Message)


class Connection:
    """Connects when it is asked to, and again after a loss. Belongs to one asyncio loop."""

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
        self._calls_made = itertools.count(1)
        self._link: ClientLink | None = None
        self._welcome: Welcome | None = None
        self._instance = protocol.NO_INSTANCE
        self._connecting: asyncio.Task[Welcome] | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._greeting: asyncio.Future[Welcome] | None = None
        self._open: dict[str, OpenRequest] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._sent = self._heard = 0.0
        self._closed = False
        self.on_lost: Callable[[Exception], None] | None = None
        """Called when a greeted connection breaks, before those who wait are told."""

    async def connect(self) -> Welcome:
        """What the server is; connects if that is not done.

        Raises EngineDeadError when nothing answers within connect_timeout.
        """
        self._check_open()
        if self._welcome is not None:
            return self._welcome
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            # told to the caller that waits, if one still does
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._connecting)

    def close(self) -> None:
        """Ends the connection for good; what is open is aborted and fails."""
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
    ) -> OpenRequest:
        """Send a request; see OpenRequest. Raises RequestError if its id is open or it is too long."""
        if message.request_id in self._open:
            raise RequestError(f"request_id={message.request_id!r} is in use; choose another")
        request = OpenRequest(message.request_id, message.continues, when_accepted, direct)
        self._open[message.request_id] = request
        try:
            self._send(message)
        except BaseException:
            del self._open[message.request_id]
            raise
        return request

    def abort(self, request_id: str) -> None:
        """Ask for a request's end; its last chunk still comes."""
        if request_id in self._open:
            self._send(protocol.Abort(request_ids=[request_id]))

    def leave(self, request: OpenRequest) -> None:
        """Nobody waits for the request any more: forget it, and abort it unless it has ended."""
        if self._open.get(request.request_id) is request:
            del self._open[request.request_id]
            if not request.ended and self._welcome is not None:
                with contextlib.suppress(ServerError):
                    self._send(protocol.Abort(request_ids=[request.request_id]))

    async def ask(self, make: Callable[[int], Message], kind: type[T], timeout: float) -> T:
        """Send a call and wait for its answer; opens a link, but says no hello. Raises TimeoutError."""
        self._check_open()
        if self._link is None:
            self._open_link()
        number = next(self._calls_made)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._send(make(number))
            async with asyncio.timeout(timeout):
                reply = await answer
        except TimeoutError:
            raise TimeoutError(f"the server did not answer within {timeout:g} s") from None
        finally:
            self._calls.pop(number, None)
        if not isinstance(reply, kind):
            raise ServerError(
                f"the server answered with {type(reply).__name__} where {kind.__name__} was due", "bad_frame"
            )
        return reply

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this client is closed; make a new one")

    def _open_link(self) -> ClientLink:
        check_private_directory(self.address)
        self._sent = self._heard = time.monotonic()
        self._link = ClientLink(self.address, self.keys, self._receive, self._lose)
        self._beat_later(self._link)
        return self._link

    async def _connect(self) -> Welcome:
        give_up = time.monotonic() + self.connect_timeout
        problem: Exception = EngineDeadError("there was no answer", "engine_dead")
        while (left := give_up - time.monotonic()) > 0:
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
                    raise  # the directory is unsafe, which waiting does not mend
                problem = error
            except ServerError as error:
                if not isinstance(error, EngineDeadError) and error.code != "loading":
                    raise
                problem, pause = error, max(pause, error.retry_after or 0.0)
            finally:
                self._greeting = None
            await asyncio.sleep(min(pause, max(0.0, give_up - time.monotonic())))
        self._lose(EngineDeadError("the server did not answer", "engine_dead"))
        reason = str(problem).removeprefix(f"nothing serves at {self.address}: ")
        if not isinstance(problem, AddressError):  # which says what to do itself
            reason += self._remedy()
        raise EngineDeadError(
            f"nothing serves at {self.address} (waited {self.connect_timeout:g} s): {reason}",
            "engine_dead",
        )

    def _remedy(self) -> str:
        """A server says nothing to a client with the wrong keys, so a missing answer may be their fault."""
        if self.address.scheme != "tcp":
            return "; start `sidestream serve`, or give its address"
        if self.keys is None:
            return "; start `sidestream serve` there, and if it has keys, name this client's folder with --keys"
        return (
            "; if a server runs there, its keys do not go with these: use the client's folder that `sidestream keys curve` "
            "made together with the server's"
        )

    def _send(self, message: Message) -> None:
        if self._link is None:
            raise EngineDeadError("there is no connection to the engine", "engine_dead")
        try:
            frame = framing.encode(message, self._instance)
        except (framing.FrameError, msgspec.MsgspecError, UnicodeEncodeError, OverflowError) as problem:
            raise RequestError(f"the request cannot be sent: {problem}") from None
        if not self._link.send(frame):
            raise ServerError("too much waits to be sent: the server does not read; try again later", "overloaded", 1.0)
        self._sent = time.monotonic()

    def _beat_later(self, link: ClientLink) -> None:
        """Call `_beat` after half a pause. A timer, as a loop that ends with a pending task reports it."""
        welcome = self._welcome
        pause = protocol.HEARTBEAT_SECONDS if welcome is None else min(max(welcome.heartbeat_seconds, 0.01), 60.0)
        loop = asyncio.get_running_loop()
        self._pulse = loop.call_later(pause / 2, self._beat, link, welcome, pause, time.monotonic())

    def _beat(self, link: ClientLink, welcome: Welcome | None, pause: float, slept: float) -> None:
        if self._link is not link:
            return
        now = time.monotonic()
        if now - slept > 2 * pause:
            self._heard = now  # this process slept, not the server: what it said meanwhile is still to be read
            link.read_soon()
        elif welcome is not None:
            silence = welcome.silence_seconds if self.silence_seconds is None else self.silence_seconds
            if now - self._heard > silence:
                self._lose(
                    EngineDeadError(f"the engine gave no sign of life for {now - self._heard:.1f} s", "engine_dead")
                )
                return
            if now - self._sent >= pause / 2:
                with contextlib.suppress(ServerError):
                    self._send(protocol.Beat())
        self._beat_later(link)

    def _lose(self, problem: Exception, linger: bool = False) -> None:
        """The connection is over: everybody who waits is told."""
        if self._link is not None:
            self._link.close(linger)
        greeted = self._welcome is not None
        self._link, self._welcome, self._instance = None, None, protocol.NO_INSTANCE
        if self._pulse is not None:
            self._pulse.cancel()
        self._pulse = None
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
        self._heard = time.monotonic()
        try:
            frame = framing.decode_from_server(data)
        except framing.FrameError as problem:
            self._lose(
                ServerError(f"what answers at {self.address} does not speak this protocol: {problem}", problem.code)
            )
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
            for chunk in message.chunks:  # those who wait for a first token go on before the others
                if not chunk.first and (request := self._open.get(chunk.request_id)) is not None:
                    request.wake()
            for chunk in message.chunks:
                if (request := self._open.get(chunk.request_id)) is not None:
                    request.put(chunk)
                    if request.ended:
                        del self._open[chunk.request_id]
                        if chunk.usage is None:  # it ended here only
                            self._send(protocol.Abort(request_ids=[chunk.request_id]))
        elif isinstance(message, protocol.Accepted):
            if (request := self._open.get(message.request_id)) is not None:
                request.accept(message.prompt_tokens, message.adapter_content)
        elif not isinstance(message, protocol.Beat):
            self._answer(message.call, message)

    def _receive_error(self, error: protocol.Error) -> None:
        problem = exception_of(error)
        if error.request_id is not None:
            if (request := self._open.pop(error.request_id, None)) is not None:
                request.fail(problem)
        elif error.call is not None:
            self._answer(error.call, problem)
        elif self._greeting is not None and not self._greeting.done() and error.code == "loading":
            self._greeting.set_exception(problem)
        else:
            self._lose(problem)

    def _answer(self, number: int, reply: Any) -> None:
        waiting = self._calls.get(number)
        if waiting is not None and not waiting.done():
            if isinstance(reply, Exception):
                waiting.set_exception(reply)
            else:
                waiting.set_result(reply)
