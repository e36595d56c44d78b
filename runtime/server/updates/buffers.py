"""Files in the socket's directory into which clients write updates: memory that server and client share."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from ...api.errors import RequestError
from ...protocol.addresses import Address
from ...protocol.messages import Buffer, OpenBuffer, UpdateAdapter
from ..connections import ClientConnection


@dataclass(frozen=True)
class _File:
    path: Path
    token: str
    nbytes: int


class UpdateBuffers:
    """One file for each connection at most, which exists as long as the connection.

    address    of the server; only an ipc address has a directory that is closed to other users
    max_bytes  largest size of a file
    """

    def __init__(self, address: Address, max_bytes: int) -> None:
        self._socket, self._max_bytes = address.path, max_bytes
        self._files: dict[ClientConnection, _File] = {}
        if self._socket is not None:
            for path in self._socket.parent.glob(f"{self._socket.name}.update-*"):  # of a process that was killed
                path.unlink(missing_ok=True)

    def open(self, client: ClientConnection, message: OpenBuffer) -> Buffer:
        """Return the client's buffer; make one if it has none that is large enough. Raises RequestError and OSError."""
        if self._socket is None:
            raise RequestError(
                "an update needs memory that the client shares with the server; connect to an ipc:// address on the "
                "server's machine, or load the adapter from a directory"
            )
        if message.bytes > self._max_bytes:
            raise RequestError(
                f"bytes is {message.bytes}, but an update has at most {self._max_bytes}; start the server with "
                f"--max-update-bytes {message.bytes}"
            )
        file = self._files.get(client)
        if file is None or file.nbytes < message.bytes:
            self.close(client)
            token = secrets.token_hex(16)
            file = _File(self._socket.with_name(f"{self._socket.name}.update-{token}"), token, message.bytes)
            handle = os.open(file.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._files[client] = file
            try:
                os.ftruncate(handle, file.nbytes)
            finally:
                os.close(handle)
        return Buffer(message.call, str(file.path), file.token)

    def path(self, client: ClientConnection, message: UpdateAdapter) -> str:
        """Return the file that holds a client's update. Raises RequestError for a token that is not the client's."""
        file = self._files.get(client)
        if file is None or not secrets.compare_digest(file.token.encode(), message.token.encode()):
            raise RequestError("token is not that of this connection's buffer; send open_buffer first")
        if message.bytes > file.nbytes:
            raise RequestError(f"bytes is {message.bytes}, but the buffer has {file.nbytes}; open a larger one")
        return str(file.path)

    def close(self, client: ClientConnection) -> None:
        """Delete a client's buffer, if it has one."""
        file = self._files.pop(client, None)
        if file is not None:
            file.path.unlink(missing_ok=True)

    def close_all(self) -> None:
        """Delete all buffers."""
        for client in list(self._files):
            self.close(client)
