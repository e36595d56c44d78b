"""A client's socket on an asyncio loop: frames out, frames in, and the news that the other side is gone.

pyzmq's own asyncio sockets make a future for each frame; here one callback takes in all that has arrived, which a
client of hundreds of streams needs.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..api.errors import EngineDeadError, ServerError
from ..protocol.addresses import Address
from ..protocol.curve_keys import ClientKeys
from ..protocol.messages import MAX_FRAME_BYTES

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_FRAMES_AT_ONCE = 256
_LINGER_MS = 200
_WAITING_FRAMES = 10000


class ClientLink:
    """One DEALER, from its connection to that connection's end; never used for a second one, so nothing that is meant
    for an engine reaches its successor.

    `on_frame(bytes)` is called for each frame, `on_lost(problem)` when the connection is cut (EngineDeadError) or
    refused (another ServerError); it must close the link. Belongs to the loop that runs when it is made; not
    thread-safe.
    """

    def __init__(
        self,
        address: Address,
        keys: ClientKeys | None,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[ServerError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frame, self._on_lost = on_frame, on_lost
        self._scheduled = False
        self._closed = False
        self._connected = False
        self._socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
        settings = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.SNDHWM: _WAITING_FRAMES,
            zmq.RCVHWM: _WAITING_FRAMES,
            zmq.RECONNECT_IVL: 50,
            zmq.RECONNECT_IVL_MAX: 500,
            zmq.IPV6: int(":" in address.host),
        }
        for option, value in settings.items():
            self._socket.setsockopt(option, value)
        if keys is not None:
            keys.secure(self._socket)
        self._monitor: zmq.Socket[Any] = self._socket.get_monitor_socket(_EVENTS)
        self._loop.add_reader(self._socket.FD, self._read)
        self._news()  # its descriptor tells of nothing new until it was found empty once
        self._loop.add_reader(self._monitor.FD, self._read_monitor)
        self._socket.connect(str(address))

    def send(self, frame: bytes) -> bool:
        """Queue a frame; False when the queue is full (the other side does not read)."""
        if self._closed:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            if cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self.read_soon()  # sending swallowed the signal that something arrived
        return True

    def read_soon(self) -> None:
        """Look for frames, even without a signal."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._read)

    def close(self, linger: bool = False) -> None:
        """Cut the connection; `linger`: what is queued still goes out, for a moment."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS if linger else 0)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(_FRAMES_AT_ONCE):
            if not self._take_frame():
                return
        self.read_soon()

    def _take_frame(self) -> bool:
        """Hand the next frame on; False if there is none."""
        if self._closed:
            return False
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:  # nothing more has arrived
            return False
        if len(frames) == 1:
            self._on_frame(frames[0])
        return True

    def _read_monitor(self) -> None:
        """The connection was made, refused or cut: what arrived before its end is still read."""
        lost = None if self._closed else self._news()
        if lost is None:
            return
        while self._take_frame():
            pass
        if not self._closed:
            self._on_lost(lost)

    def _news(self) -> ServerError | None:
        lost: ServerError | None = None
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return lost
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                lost = ServerError(
                    "the engine does not admit this client's key; add it with `sidestream keys curve` on the engine's side",
                    "forbidden",
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                lost = ServerError(
                    "the other side does not speak this protocol, or needs (other) keys; give this client's folder "
                    "of `sidestream keys curve`",
                    "forbidden",
                )
            elif event == zmq.EVENT_DISCONNECTED and self._connected:
                lost = lost or EngineDeadError(
                    "the connection to the engine was cut: it died or was stopped", "engine_dead"
                )
