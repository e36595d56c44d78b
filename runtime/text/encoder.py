"""Text to token ids, and back, next to the batcher's loop: a long prompt takes milliseconds, and those belong to no
other request.
"""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache, partial
from typing import Any

from ..api.errors import RequestError
from .tokenizer import Tokenizer

INLINE_CHARACTERS = 2048
"""Texts up to this length are encoded at once."""
MAX_CHARACTERS = 64 << 20
"""What may wait, of all owners together."""
LARGE_CHARACTERS = 1 << 16
"""A text from here on takes so much memory while it is encoded (some 250 bytes a character) that it is given back."""


SETTLED_SECONDS = 1.0
"""After so long without work, the text and the outcome of a large one have been dropped by all that had them."""


LARGE_BLOCK = 128 << 10
"""Where glibc begins."""
MOST_ARENAS = 2
"""The loop's and one for the threads next to it."""
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # mallopt's names for them (malloc.h)


class Worker:
    """A thread that does work on texts. Owners take turns, one piece of work each; an owner's work keeps its order.

    `fileno` is readable when outcomes can be taken.
    """

    def __init__(self, name: str) -> None:
        self._work: dict[str, tuple[Callable[[], Any], int]] = {}
        self._lines: dict[Hashable, deque[str]] = {}
        self._characters = 0
        self._closed = False
        self._changed = threading.Condition()
        self._outcomes: deque[tuple[str, Any]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For polling."""
        return self._event

    def has_room_for(self, characters: int) -> bool:
        """Whether `put_work` may be called with so many."""
        return self._characters + characters <= MAX_CHARACTERS

    def put_work(self, key: str, work: Callable[[], Any], characters: int, owner: Hashable) -> None:
        """Have `work` done in its turn; its outcome will carry `key`, which no other waiting work has. `characters`:
        how much it holds.
        """
        with self._changed:
            self._work[key] = work, characters
            self._characters += characters
            self._lines.setdefault(owner, deque()).append(key)
            self._changed.notify()

    def discard(self, key: str) -> None:
        """Nobody wants this outcome any more."""
        with self._changed:
            self._characters -= self._work.pop(key, (None, 0))[1]

    def take(self) -> list[tuple[str, Any]]:
        """(key, what the work returned or raised) of what is done."""
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

    def _next(self, seconds: float | None) -> tuple[str, Callable[[], Any], int] | None:
        """The next work with its key and size, waited for; None at the end. Raises TimeoutError if none comes for so
        long.
        """
        with self._changed:
            while not self._closed:
                if not self._lines:
                    if not self._changed.wait(seconds):
                        raise TimeoutError
                    continue
                owner, line = next(iter(self._lines.items()))
                key = line.popleft()
                del self._lines[owner]
                if line:
                    self._lines[owner] = line
                entry = self._work.pop(key, None)
                if entry is not None:
                    self._characters -= entry[1]
                    return key, *entry
            return None

    def _run(self) -> None:
        was_large = False
        while True:
            try:
                entry = self._next(SETTLED_SECONDS if was_large else None)
            except TimeoutError:
                give_back_memory()  # once more: others have freed their part of it since
                was_large = False
                continue
            if entry is None:
                return
            characters = entry[2]
            self._do(*entry[:2])
            del entry  # while the next one is waited for, nothing of this one is kept
            if characters >= LARGE_CHARACTERS:
                give_back_memory()
                was_large = True

    def _do(self, key: str, work: Callable[[], Any]) -> None:
        try:
            outcome = work()
        except RequestError as error:
            outcome = error.with_traceback(None)  # which would keep what the work had made
        except Exception as error:  # handed to the request that it belongs to
            outcome = error
        self._outcomes.append((key, outcome))
        os.eventfd_write(self._event, 1)


class Encoder(Worker):
    """A worker that encodes texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        super().__init__("sidestream-encoder")

    def has_room(self, text: str) -> bool:
        """Whether `put` may be called with this text."""
        return self.has_room_for(len(text))

    def put(self, key: str, text: str, owner: Hashable, add_special_tokens: bool, most: int) -> None:
        """Encode `text`: the outcome are its ids, or TooManyTokens for more than `most`."""
        self.put_work(key, partial(self._tokenizer.encode, text, add_special_tokens, most), len(text), owner)


def keep_large_blocks_apart() -> None:
    """Blocks from LARGE_BLOCK on have a mapping of their own in this process from now on, and go back to the system
    when they are freed (with glibc). To be called before other threads start.

    By itself glibc raises this bound to whatever was freed last, up to 32 MiB: large prompts then come and go within
    the arenas, and the small pieces that are left between them pin more and more pages.
    """
    with suppress(AttributeError):
        _libc().mallopt(_MMAP_THRESHOLD, LARGE_BLOCK)
        _libc().mallopt(_ARENA_MAX, MOST_ARENAS)


def give_back_memory() -> None:
    """What was freed goes back to the system (with glibc).

    An arena shrinks from its end alone: one small piece that stays there would keep hundreds of MiB.
    """
    with suppress(AttributeError):
        _libc().malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    """One for all: each makes classes of its own."""
    return ctypes.CDLL(None)
