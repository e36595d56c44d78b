"""Start and stop a child process, and keep the end of its stderr.

The channel closes when either process ends, so a child notices `kill -9` of its parent.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import msgspec
from msgspec import Struct

from .channel import Channel

STOP_SECONDS = 5.0
_TAIL_BYTES = 4096


class StderrTail:
    """Copies a child's stderr to this process's stderr and keeps its last `_TAIL_BYTES` bytes."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._copy, args=(pipe,), name="stderr", daemon=True)
        self._thread.start()

    def last_line(self, seconds: float) -> str:
        """Return the last non-empty line; waits up to `seconds` for the child to end."""
        self._thread.join(seconds)
        lines = self._tail.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _TAIL_BYTES):
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                with contextlib.suppress(OSError):  # our stderr may be closed: the child must still be able to write
                    while data:
                        data = data[os.write(2, data) :]


@dataclass(eq=False)
class Child:
    """A child process and the channel to it.

    last_message time of its last message, by the parent's `AwakeClock`
    started      its start-up is complete
    stderr_tail  the end of its stderr, if `start` was asked to keep it
    """

    name: str
    process: "subprocess.Popen[bytes]"
    channel: Channel
    last_message: float = 0.0
    started: bool = False
    stderr_tail: StderrTail | None = None

    @classmethod
    def start(
        cls,
        name: str,
        command: list[str],
        settings: Struct,
        now: float,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        own_session: bool = True,
        keep_stderr: bool = False,
    ) -> "Child":
        """Run `command CHANNEL_FD DESCRIPTOR ...` and send it its settings.

        descriptors   further descriptors that it inherits
        environment   variables added to this process's environment
        own_session   start it in a session of its own, so that a terminal's Ctrl-C reaches the parent only. False: in
                      a process group of its own, so that the kernel ends it with this process even while it is stopped
                      (SIGHUP to a stopped, orphaned process group).
        keep_stderr   copy its stderr through this process and keep the end
        """
        channel, theirs = Channel.pair()
        with theirs:
            inherited = [theirs.fileno(), *descriptors]
            process = subprocess.Popen(
                [*command, *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if keep_stderr else None,
                start_new_session=own_session,
                process_group=None if own_session else 0,
                env={**os.environ, **(environment or {})},
            )
        channel.send({"settings": msgspec.to_builtins(settings)})
        return cls(name, process, channel, now, stderr_tail=StderrTail(process.stderr) if process.stderr else None)

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Close the channel, wait up to `seconds`, then kill. Returns the exit status."""
        self.channel.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def status_text(status: int) -> str:
    return f"signal {-status}, {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
