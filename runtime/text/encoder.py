"""Text to token ids beside the batcher's loop: a long prompt takes milliseconds, and those belong to no other
request.
"""

import os
import queue
import threading
from collections import deque

from .tokenizer import Tokenizer

INLINE_CHARACTERS = 2048
"""Texts up to this length are encoded at once."""


class Encoder:
    """A thread that encodes texts in the order in which they come. `fileno` is readable when outcomes can be taken."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._outcomes: deque[tuple[str, list[int] | Exception]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="sidestream-encoder", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For polling."""
        return self._event

    def put(self, key: str, text: str) -> None:
        """Encode `text`; its outcome will carry `key`."""
        self._texts.put((key, text))

    def take(self) -> list[tuple[str, list[int] | Exception]]:
        """(key, ids or what went wrong) of the texts that are done."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self) -> None:
        """End the thread."""
        self._texts.put(None)
        self._thread.join(5)
        os.close(self._event)

    def _run(self) -> None:
        while (entry := self._texts.get()) is not None:
            key, text = entry
            try:
                outcome: list[int] | Exception = self._tokenizer.encode(text)
            except Exception as error:  # handed to the request that it belongs to
                outcome = error
            self._outcomes.append((key, outcome))
            os.eventfd_write(self._event, 1)
