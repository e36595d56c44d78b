"""One engine of several on a host: a supervisor in a process of its own, which says its lines to whom it belongs.

`python -m sidestream.runtime.server.replicas.engine FD` is how `host` starts it. It ends when that line does.
"""

import os
import signal
import sys
import threading
from typing import Any

import msgspec

from ...processes.channel import Channel, ChannelClosed
from ..settings import ServeSettings
from ..supervisor import EXIT_SETTINGS, serve


def run(fd: int) -> int:
    """Returns the supervisor's exit code."""
    channel = Channel.from_fd(fd)
    first: dict[str, Any]
    (first, *_) = channel.receive(block=True)
    settings = msgspec.convert(first["settings"], ServeSettings)

    def say(line: str) -> None:
        try:
            channel.send({"event": "said", "line": line})
        except ChannelClosed:
            return  # nobody listens, and `hang_on` ends this process

    def hang_on() -> None:
        try:
            while True:
                channel.receive(block=True)
        except ChannelClosed:
            for _ in range(2):  # the second one does not wait for open requests
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=hang_on, name="sidestream-line", daemon=True).start()
    try:
        return serve(settings, say)
    except ValueError as error:
        say(f"error: {error}")
        return EXIT_SETTINGS


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
