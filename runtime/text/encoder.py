"""Text to token ids next to the batcher's loop: a long prompt takes milliseconds, and those belong to no other
request.
"""

import os
import threading
from collections import deque
from collections.abc import Hashable

from .tokenizer import Tokenizer

INLINE_CHARACTERS = 2048
"""Texts up to this length are encoded at once."""
MAX_CHARACTERS = 64 << 20
"""What may wait, of all owners together."""


class Encoder:
    """A thread that encodes texts. Owners take turns, one text each; an owner's texts keep their order.

    `fileno` is readable when outcomes can be taken.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, str] = {}
        self._lines: dict[Hashable, deque[str]] = {}
        self._characters = 0
        self._closed = False
        self._changed = threading.Condition()
        self._outcomes: deque[tuple[str, list[int] | Exception]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="sidestream-encoder", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For polling."""
        return self._event

    def has_room(self, text: str) -> bool:
        """Whether `put` may be called with this text."""
        return self._characters + len(text) <= MAX_CHARACTERS

    def put(self, key: str, text: str, owner: Hashable) -> None:
        """Encode `text`; its outcome will carry `key`, which no other waiting text has."""
        with self._changed:
            self._texts[key] = text
            self._characters += len(text)
            self._lines.setdefault(owner, deque()).append(key)
            self._changed.notify()

    def discard(self, key: str) -> None:
        """Nobody wants this text's ids any more."""
        with self._changed:
            self._characters -= len(self._texts.pop(key, ""))

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
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5)
        os.close(self._event)

    def _next(self) -> tuple[str, str] | None:
        """The next text, waited for; None at the end."""
        with self._changed:
            while not self._closed:
                if not self._lines:
                    self._changed.wait()
                    continue
                owner, line = next(iter(self._lines.items()))
                key = line.popleft()
                del self._lines[owner]
                if line:
                    self._lines[owner] = line
                text = self._texts.pop(key, None)
                if text is not None:
                    self._characters -= len(text)
                    return key, text
            return None

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            key, text = entry
            try:
                outcome: list[int] | Exception = self._tokenizer.encode(text)
            except Exception as error:  # handed to the request that it belongs to
                outcome = error
            self._outcomes.append((key, outcome))
            os.eventfd_write(self._event, 1)
