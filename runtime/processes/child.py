"""A process of the server, and the supervisor's line to it.

The line closes with either process, so nothing outlives `kill -9` of any of them.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from .channel import Channel
from .last_words import LastWords

STOP_SECONDS = 5.0


@dataclass
class Child:
    """A process and the line to it.

    heard    when it last said anything, on the supervisor's `AwakeClock`
    started  whether its start is over
    words    what it has said last, where that was asked for
    """

    name: str
    process: "subprocess.Popen[bytes]"
    channel: Channel
    heard: float = 0.0
    started: bool = False
    inbox: list[dict[str, Any]] = field(default_factory=list)
    words: LastWords | None = None

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
        keep_words: bool = False,
    ) -> "Child":
        """Run `command FD DESCRIPTOR ...` in a session of its own (a terminal's Ctrl-C is the supervisor's business);
        it inherits the descriptors, and its settings come over the line. `environment`: what it has besides ours.
        Without `own_session` in a process group of its own in this session: then the kernel ends it with this process
        even while a signal has stopped it (SIGHUP to a stopped group that nobody is left to continue).
        `keep_words`: its stderr comes to ours through this process, which keeps the end of it.
        """
        channel, theirs = Channel.pair()
        with theirs:
            passed = [theirs.fileno(), *descriptors]
            process = subprocess.Popen(
                [*command, *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if keep_words else None,
                start_new_session=own_session,
                process_group=None if own_session else 0,
                env={**os.environ, **(environment or {})},
            )
        channel.send({"settings": msgspec.to_builtins(settings)})
        return cls(name, process, channel, now, words=LastWords(process.stderr) if process.stderr else None)

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Hang up, wait, kill if need be; returns the exit status."""
        self.channel.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def status_text(status: int) -> str:
    """An exit status for a person."""
    return f"signal {-status}, {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
