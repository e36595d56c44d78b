"""One engine as a child of a process with an asyncio loop: `sidestream serve` without HTTP, at a private address."""

import asyncio
import signal
import sys
from collections.abc import Callable

from ..processes.channel import ChannelClosed
from ..processes.child import Child, status_text
from ..server.settings import ServeSettings

_SERVING = "serving at "
_COMMAND = ("-m", "sidestream.runtime.server.replica_process")


class EngineProcess:
    """A supervisor with its batcher and GPU process. Whatever kills this process ends them too.

    `say` gets the lines that `sidestream serve` would print. Belongs to the loop that runs when it is made.
    """

    def __init__(self, settings: ServeSettings, say: Callable[[str], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._address: asyncio.Future[str] = self._loop.create_future()
        self._last_error = ""
        self.ended = asyncio.Event()
        self._child = Child.start("engine", [sys.executable, *_COMMAND], settings, 0.0)
        self._loop.add_reader(self._child.channel.fileno(), self._hear)

    async def address(self) -> str:
        """Where it serves, once it does: its programs are captured then. Raises RuntimeError when it ended instead."""
        return await asyncio.shield(self._address)

    async def drain(self, seconds: float) -> None:
        """SIGTERM: open requests may go on for as long as the settings say; killed `seconds` after it."""
        if not self.ended.is_set():
            self._child.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(seconds):
                    await self.ended.wait()
            except TimeoutError:
                self._child.process.kill()
        await asyncio.to_thread(self._child.stop)

    def _hear(self) -> None:
        try:
            messages = self._child.channel.receive()
        except ChannelClosed:
            self._loop.remove_reader(self._child.channel.fileno())
            self._loop.create_task(self._end())
            return
        for message in messages:
            line = str(message["line"])
            self._say(line)
            if line.startswith("error: "):
                self._last_error = line.removeprefix("error: ")
            if line.startswith(_SERVING) and not self._address.done():
                self._address.set_result(line.removeprefix(_SERVING))

    async def _end(self) -> None:
        status = await asyncio.to_thread(self._child.stop)
        self.ended.set()
        if not self._address.done():
            self._address.set_exception(RuntimeError(self._last_error or f"the engine ended ({status_text(status)})"))
            self._address.exception()  # nobody may be waiting
