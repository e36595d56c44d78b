"""Writes an adapter's update into the buffer that a server has made for this connection."""

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
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def write_update(update: AdapterUpdate, address: Address, path: str) -> None:
    """Write an update into the file that the server has named. Raises ServerError."""
    try:
        handle = open_buffer(address, path)
        try:
            update.write(handle)
        finally:
            os.close(handle)
    except OSError as problem:
        raise ServerError(f"the update could not be written into shared memory: {problem.strerror}") from None
