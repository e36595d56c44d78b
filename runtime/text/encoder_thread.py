"""A thread that encodes and decodes texts, because long prompts take milliseconds and would delay other requests."""

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

INLINE_CHARACTERS = 2048  # texts up to this length are encoded inline
MAX_CHARACTERS = 64 << 20  # limit on the pending work of all owners together
# Encoding takes some 250 bytes per character. Memory is returned to the system after texts of this length, and again
# after SETTLED_SECONDS without work, when the text and its outcome are no longer referenced.
LARGE_CHARACTERS = 1 << 16
SETTLED_SECONDS = 1.0

LARGE_BLOCK = 128 << 10  # glibc's initial value
MAX_ARENAS = 2  # one for the loop, one for all other threads
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # mallopt's names for them (malloc.h)


class TextThread:
    """A thread that processes texts. Owners alternate, one item each; an owner's items are processed in order.

    `fileno` is readable when results are ready.
    """

    def __init__(self, name: str) -> None:
        self._work: dict[str, tuple[Callable[[], Any], int]] = {}
        self._queues: dict[Hashable, deque[str]] = {}
        self._characters = 0
        self._closed = False
        self._changed = threading.Condition()
        self._outcomes: deque[tuple[str, Any]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the file descriptor for polling."""
        return self._event

    def has_room_for(self, characters: int) -> bool:
        """Return whether `put_work` may be called with this many characters."""
        return self._characters + characters <= MAX_CHARACTERS

    def put_work(self, key: str, work: Callable[[], Any], characters: int, owner: Hashable) -> None:
        """Enqueue `work`. Its result has this `key`, which must be unique among pending work.

        characters  size of the item
        """
        with self._changed:
            self._work[key] = work, characters
            self._characters += characters
            self._queues.setdefault(owner, deque()).append(key)
            self._changed.notify()

    def discard(self, key: str) -> None:
        """Drop pending work."""
        with self._changed:
            self._characters -= self._work.pop(key, (None, 0))[1]

    def take(self) -> list[tuple[str, Any]]:
        """Return (key, result or exception) of finished work."""
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
        """Wait for the next work with its key and size; None at the end. Raises TimeoutError after `seconds`."""
        with self._changed:
            while not self._closed:
                if not self._queues:
                    if not self._changed.wait(seconds):
                        raise TimeoutError
                    continue
                owner, line = next(iter(self._queues.items()))
                key = line.popleft()
                del self._queues[owner]
                if line:
                    self._queues[owner] = line
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
                release_free_memory()  # again: other threads have freed memory since
                was_large = False
                continue
            if entry is None:
                return
            characters = entry[2]
            self._do(*entry[:2])
            del entry  # keep no reference during the wait for the next item
            if characters >= LARGE_CHARACTERS:
                release_free_memory()
                was_large = True

    def _do(self, key: str, work: Callable[[], Any]) -> None:
        try:
            outcome = work()
        except RequestError as error:
            outcome = error.with_traceback(None)  # which would keep references to the work's objects
        except Exception as error:  # passed to its request
            outcome = error
        self._outcomes.append((key, outcome))
        os.eventfd_write(self._event, 1)


class Encoder(TextThread):
    """A thread that encodes texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        super().__init__("sidestream-encoder")

    def has_room(self, text: str) -> bool:
        """Return whether `put` may be called with this text."""
        return self.has_room_for(len(text))

    def put(self, key: str, text: str, owner: Hashable, add_special_tokens: bool, most: int) -> None:
        """Enqueue `text`. Its result is a list of ids, or TooManyTokens for more than `most`."""
        self.put_work(key, partial(self._tokenizer.encode, text, add_special_tokens, most), len(text), owner)


def keep_large_blocks_apart() -> None:
    """Make glibc map blocks from LARGE_BLOCK on separately, so that freeing returns them to the system.

    Call it before other threads start. By default glibc raises this threshold to the size of the largest freed block,
    at most 32 MiB. Large prompts are then allocated in the arenas, where small blocks between them keep pages in use.
    """
    with suppress(AttributeError):
        _libc().mallopt(_MMAP_THRESHOLD, LARGE_BLOCK)
        _libc().mallopt(_ARENA_MAX, MAX_ARENAS)


def release_free_memory() -> None:
    """Return freed memory to the system (glibc).

    An arena shrinks only at its end, where one small block would keep hundreds of MiB.
    """
    with suppress(AttributeError):
        _libc().malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, cached because each instance creates classes."""
    return ctypes.CDLL(None)
