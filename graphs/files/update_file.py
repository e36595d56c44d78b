"""An update of an adapter: an open file in the safetensors format, and its bytes in this process's memory."""

import contextlib
import os
import threading
from collections.abc import Callable, Generator

import numpy as np
from numpy.typing import NDArray


class UpdateFile:
    """An open file with an update.

    handle    descriptor of the file; the caller closes it
    contents  uint8 [bytes of the file] in memory that nobody else can write; None: only the file has them

    With `contents` the constructor sets the file's size and writes its header, which other processes read. `complete`
    writes the rest, which takes longer than to copy it into memory. Raises OSError.
    """

    def __init__(self, handle: int, contents: NDArray[np.uint8] | None = None) -> None:
        self.handle, self.contents = handle, contents
        self._lock = threading.Lock()
        self._rest, self._offset = memoryview(b""), 0
        if contents is not None:
            os.ftruncate(handle, contents.size)
            header = 8 + int.from_bytes(contents[:8].tobytes(), "little")  # as the sender says: it may exceed the file
            self._write(contents.data[:header])
            self._rest = contents.data[header:]

    def complete(self) -> None:
        """Write the rest of the file, or wait until another thread has written it. Raises OSError."""
        with self._lock:
            self._write(self._rest)
            self._rest = memoryview(b"")

    def _write(self, data: memoryview) -> None:
        while data:
            count = os.pwrite(self.handle, data, self._offset)
            data, self._offset = data[count:], self._offset + count


@contextlib.contextmanager
def private_update(nbytes: int, fill: Callable[[memoryview], None]) -> Generator[UpdateFile]:
    """Return an update of `nbytes` that `fill` writes into memory; its file is in memory too. Raises OSError."""
    contents = np.empty(nbytes, np.uint8)
    fill(contents.data)
    handle = os.memfd_create("adapter-update", os.MFD_CLOEXEC)
    try:
        yield UpdateFile(handle, contents)
    finally:
        os.close(handle)
