"""A child process that answers each line with one line: untrusted work with a time limit, outside this process."""

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence

START_SECONDS = 20.0


class HelperProcess:
    """A process that the first `ask` starts, and the next `ask` after a failure or `close` starts again. Thread-safe.

    command           its program, which prints a line when it is ready, and then one for each line that it reads
    max_answer_bytes  limit on an answer
    """

    def __init__(self, command: Sequence[str], max_answer_bytes: int) -> None:
        self._command, self._max_answer_bytes = tuple(command), max_answer_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # held by the thread that uses the pipes
        self._closes = 0

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a line and return the answer; both end with a newline. Calls of several threads take turns.

        Raises TimeoutError after `seconds`, OSError when the child ended or its answer is too long. The child is then
        killed.
        """
        closes = self._closes  # read before its turn, so that no child outlives a `close` that this call was there for
        with self._lock:
            try:
                if self._child is None or self._child.poll() is not None:
                    self._end()
                    self._child = subprocess.Popen(
                        self._command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                    if closes != self._closes:
                        raise OSError("the process was closed")
                    self._exchange(self._child, b"", START_SECONDS)
                return self._exchange(self._child, line, seconds)
            except OSError:  # TimeoutError is one
                self._end()
                raise

    def close(self) -> None:
        """Kill the child if it runs.

        An `ask` that another thread has begun raises OSError; a later one starts a child.
        """
        # before the child is read: an `ask` that starts one sees the count, or this call sees the child
        self._closes += 1
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
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
                        data = os.read(child.stdout.fileno(), 1 << 16)
                        answer += data
                        if not data or len(answer) > self._max_answer_bytes:
                            raise OSError("the child process ended" if not data else "its answer is too long")
        return bytes(answer)
