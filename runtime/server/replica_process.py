"""One engine of several on a host: a supervisor in its own process, which sends its lines to its parent.

`replica_supervisor` starts it as `python -m sidestream.runtime.server.replica_process FD`. It ends with its parent.
"""

import contextlib
import os
import signal
import sys
import threading
from typing import Any

import msgspec

from ..processes.channel import Channel, ChannelClosed
from .settings import ServeSettings
from .supervisor import Supervisor
from .supervisor_loop import EXIT_SETTINGS


def run(fd: int) -> int:
    """Receive settings from the channel `fd` and serve. Returns the supervisor's exit code."""
    channel = Channel.from_fd(fd)
    first: dict[str, Any]
    (first, *_) = channel.receive(block=True)
    settings = msgspec.convert(first["settings"], ServeSettings)

    def send_line(line: str) -> None:
        with contextlib.suppress(ChannelClosed):  # `end_with_parent` ends this process
            channel.send({"event": "line", "line": line})

    def end_with_parent() -> None:
        try:
            while True:
                channel.receive(block=True)
        except ChannelClosed:
            for _ in range(2):  # the second signal stops without waiting for open requests
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="sidestream-parent", daemon=True).start()
    try:
        return Supervisor(settings, send_line).run()
    except ValueError as error:
        send_line(f"error: {error}")
        return EXIT_SETTINGS


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
