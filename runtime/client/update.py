"""Write an adapter's update into the buffer that a server has made for this connection."""

import contextlib
import mmap
import os
from pathlib import Path

from ..api.adapter_update import AdapterUpdate
from ..api.errors import RequestError, ServerError
from ..protocol.addresses import Address


def check_shared(address: Address) -> None:
    """Raise RequestError unless client and server share memory: over ipc."""
    if address.path is None:
        raise RequestError(
            f"update_adapter shares memory with the server, which {address} does not: connect to an ipc:// address on "
            "the server's machine, or save the adapter and use load_adapter with replace=True"
        )


def open_buffer(address: Address, path: str) -> int:
    """Return the descriptor of an existing file in the directory of the server's socket. Raises ServerError, OSError.

    The caller closes it.
    """
    if address.path is None or Path(path).parent != address.path.parent:
        raise ServerError("the server named a buffer outside its socket's directory", "bad_frame")
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


class SharedUpdate:
    """The buffer that the server has made for this connection. It stays mapped, since to map it takes longer than to
    write an update. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._path = ""
        self._memory: mmap.mmap | None = None

    def write(self, update: AdapterUpdate, address: Address, path: str) -> None:
        """Write an update into the file that the server has named. Raises ServerError."""
        try:
            if path != self._path:
                self._map(address, path)
        except OSError as problem:
            text = f"the update could not be written into shared memory: {problem.strerror}"
            raise ServerError(text) from None
        if self._memory is None or len(self._memory) < update.nbytes:
            raise ServerError(f"the server's buffer is shorter than the {update.nbytes} bytes asked for", "bad_frame")
        with memoryview(self._memory) as memory, memory[: update.nbytes] as target:
            update.copy(target)

    def _map(self, address: Address, path: str) -> None:
        handle = open_buffer(address, path)
        try:
            size = os.fstat(handle).st_size
            os.posix_fallocate(handle, 0, size)  # a full disk is an error here; a write to the mapping would be killed
            memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self.close()
        self._path, self._memory = path, memory

    def close(self) -> None:
        """Unmap the buffer, or leave that to a thread that writes to it."""
        memory, self._path, self._memory = self._memory, "", None
        if memory is not None:
            with contextlib.suppress(BufferError):
                memory.close()
