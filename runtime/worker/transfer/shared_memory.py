"""Memory for KV pages that one engine writes and others read, without locks.

It has a fingerprint of the model and its format, an entry for each place, and the pages. An entry is the page's key and
a generation, which is odd while the page is being written and grows with each page. A reader compares the entry before
and after it reads the page (a seqlock): an equal entry with the expected key means that it has read this page.
"""

import mmap
import os
import warnings
from collections.abc import Iterable

import numpy as np
import torch

from ...adapters.host_memory import ALIGNMENT
from ...scheduler.kv_cache import KEY_BYTES

FINGERPRINT_BYTES = 32
ENTRY_BYTES = 64
_KEY = slice(8, 8 + KEY_BYTES)


class SharedMemory:
    """One process's view of the memory at `path`, for pages of `page_bytes`.

    num_pages   number of places
    pages       uint8 [num_pages * page_bytes]

    Raises OSError if it cannot be mapped.
    """

    def __init__(self, path: str, page_bytes: int, writable: bool) -> None:
        handle = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            memory = mmap.mmap(handle, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        finally:
            os.close(handle)
        self.num_pages = max(0, size - 2 * ALIGNMENT) // (page_bytes + ENTRY_BYTES)
        entries = self.num_pages * ENTRY_BYTES
        first = ALIGNMENT + -(-entries // ALIGNMENT) * ALIGNMENT
        self._header = np.frombuffer(memory, np.uint8, FINGERPRINT_BYTES)
        self._entries = np.frombuffer(memory, np.uint8, entries, ALIGNMENT).reshape(-1, ENTRY_BYTES)
        self._generations = self._entries.view(np.uint64)[:, 0]
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # a reader's memory is not writable
            self.pages = (
                torch.frombuffer(memory, dtype=torch.uint8, offset=first, count=self.num_pages * page_bytes)
                if self.num_pages
                else torch.empty(0, dtype=torch.uint8)
            )

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the pages' model and format, FINGERPRINT_BYTES."""
        return self._header.tobytes()

    @fingerprint.setter
    def fingerprint(self, value: bytes) -> None:
        self._header[:] = np.frombuffer(value, np.uint8)

    def begin(self, place: int) -> None:
        """Invalidate a page that is going to be written."""
        self._generations[place] |= 1
        self._entries[place, _KEY] = 0

    def end(self, place: int, key: bytes) -> None:
        """Record that the page with this key has been written since `begin`."""
        self._entries[place, _KEY] = np.frombuffer(key, np.uint8)
        self._generations[place] += 1

    def erase(self) -> None:
        """Invalidate all pages."""
        self._generations[:] = (self._generations | 1) + 1
        self._entries[:, _KEY] = 0

    def entries(self, places: Iterable[int], keys: Iterable[bytes]) -> bytes | None:
        """Return the entries of pages; None unless each is complete and has its key."""
        found = b""
        for place, key in zip(places, keys, strict=True):
            if not 0 <= place < self.num_pages:
                return None
            entry = self._entries[place].tobytes()
            if entry[0] & 1 or entry[_KEY] != key:
                return None
            found += entry
        return found
