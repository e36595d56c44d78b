"""A child process that answers one line with one line: work on what somebody else wrote, with a limit on its time, away
from the memory and the interpreter of the process that asks.
"""

import os
import selectors
import subprocess
import time
from collections.abc import Sequence

START_SECONDS = 20.0


class ChildProcess:
    """Started by the first `ask`, and again after one that failed. Not thread-safe.

    command   its program, which prints a line when it is ready, and then one for every line that it reads
    most      bytes of its longest answer
    """

    def __init__(self, command: Sequence[str], most: int) -> None:
        self._command, self._most = tuple(command), most
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes, seconds: float) -> bytes:
        """The answer to a line; both end with a newline.

        Raises TimeoutError when there is none after `seconds`, OSError when the child ended or says too much. The
        child is ended then.
        """
        try:
            if self._child is None or self._child.poll() is not None:
                self.close()
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._exchange(self._child, b"", START_SECONDS)
            return self._exchange(self._child, line, seconds)
        except OSError:  # TimeoutError is one
            self.close()
            raise

    def close(self) -> None:
        """End the child, if it runs."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
            self._child = None

    def _exchange(self, child: "subprocess.Popen[bytes]", line: bytes, seconds: float) -> bytes:
        if child.stdin is None or child.stdout is None:
            raise OSError("the child process has no pipes")
        deadline = time.monotonic() + seconds
        waiting, answer = memoryview(line), bytearray()
        with selectors.DefaultSelector() as selector:
            os.set_blocking(child.stdin.fileno(), False)
            if waiting:
                selector.register(child.stdin, selectors.EVENT_WRITE)
            selector.register(child.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, _ in selector.select(left):
                    if key.fileobj is child.stdin:
                        waiting = waiting[os.write(child.stdin.fileno(), waiting) :]
                        if not waiting:
                            selector.unregister(child.stdin)
                    else:
                        part = os.read(child.stdout.fileno(), 1 << 16)
                        answer += part
                        if not part or len(answer) > self._most:
                            raise OSError("the child process ended" if not part else "its answer is too long")
        return bytes(answer)
