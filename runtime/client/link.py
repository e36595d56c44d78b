"""A client's socket on an asyncio loop.

pyzmq's asyncio sockets create a future for each frame, which is too slow for hundreds of streams. Here one callback
reads all frames that have arrived.
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
_MAX_FRAMES_PER_CALLBACK = 256
_LINGER_MS = 200
_QUEUED_FRAMES = 10000


class ClientLink:
    """A DEALER socket for one connection only, so that no message for an engine reaches its successor.

    on_frame  called with each frame
    on_lost   called when the connection breaks (EngineDeadError) or is refused (another ServerError); must call `close`

    Belongs to the running loop; not thread-safe.
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
            zmq.SNDHWM: _QUEUED_FRAMES,
            zmq.RCVHWM: _QUEUED_FRAMES,
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
        self._read_events()  # its descriptor signals nothing until it was read empty once
        self._loop.add_reader(self._monitor.FD, self._read_monitor)
        self._socket.connect(str(address))

    def send(self, frame: bytes) -> bool:
        """Queue a frame; returns False when the queue is full. Raises what `on_lost` will get if the connection has
        broken or was refused: there is no queue then.
        """
        if self._closed:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            lost = self._read_events()
            if lost is None:
                return False
            self._loop.call_soon(self._end, lost)
            raise lost from None
        finally:
            if cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self.read_soon()  # sending cleared the signal that something arrived
        return True

    def read_soon(self) -> None:
        """Read frames soon, without waiting for a signal."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._read)

    def close(self, linger: bool = False) -> None:
        """Close the connection; `linger`: send queued frames for a moment."""
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
        for _ in range(_MAX_FRAMES_PER_CALLBACK):
            if not self._read_frame():
                return
        self.read_soon()

    def _read_frame(self) -> bool:
        """Read one frame and call `on_frame`; returns False if none has arrived."""
        if self._closed:
            return False
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:  # no frame has arrived
            return False
        if len(frames) == 1:
            self._on_frame(frames[0])
        return True

    def _read_monitor(self) -> None:
        lost = None if self._closed else self._read_events()
        if lost is not None:
            self._end(lost)

    def _end(self, lost: ServerError) -> None:
        """Call `on_lost`. Frames that arrived before the end are read first."""
        while self._read_frame():
            pass
        if not self._closed:
            self._on_lost(lost)

    def _read_events(self) -> ServerError | None:
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
                    "the engine does not admit this client's key; add it with `sidestream keys curve` on its machine",
                    "forbidden",
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                lost = ServerError(
                    "the other side does not use this protocol, or needs (other) keys; give this client's folder of "
                    "`sidestream keys curve`",
                    "forbidden",
                )
            elif event == zmq.EVENT_DISCONNECTED and self._connected:
                lost = lost or EngineDeadError(
                    "the connection to the engine was cut: it died or was stopped", "engine_dead"
                )
