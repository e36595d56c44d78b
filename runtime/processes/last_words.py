"""What a process says before it ends."""

import contextlib
import os
import threading
from typing import IO

KEPT_BYTES = 4096


class LastWords:
    """Copies what a process writes to its stderr onto this process's, and keeps the end of it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._copy, args=(pipe,), name="last words", daemon=True)
        self._thread.start()

    def line(self, seconds: float) -> str:
        """The last line that is not empty; waits up to `seconds` for a process that has ended."""
        self._thread.join(seconds)
        lines = self._kept.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while piece := os.read(pipe.fileno(), KEPT_BYTES):
                self._kept = (self._kept + piece)[-KEPT_BYTES:]
                with contextlib.suppress(OSError):  # nobody reads ours: the process must be able to write still
                    while piece:
                        piece = piece[os.write(2, piece) :]
