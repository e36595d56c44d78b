"""CURVE keys: which clients may connect to a server over tcp, and which server a client trusts.

`sidestream keys curve DIR` makes one folder for each side:

    DIR/server/        server.secret, allowed/NAME.public   for `sidestream serve --keys DIR/server`
    DIR/client-NAME/   client.secret, server.public         for `Client(address, keys="DIR/client-NAME")`

A file holds one key: 40 characters of Z85 and a newline. Secret files must have mode 0600; files are never overwritten.
The server admits the keys in `allowed` (ZAP); the client trusts only the server with server.public's secret.
"""

import os
import re
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DOMAIN = b"sidestream"
ZAP_ADDRESS = "inproc://zeromq.zap.01"
_KEY = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyFileError(ValueError):
    """A key file is missing, damaged, or open to other users."""


@dataclass(frozen=True)
class ServerKeys:
    """A server's key pair, and the folder of admitted public keys, which is read at each connection."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: Path

    def allows(self, public: bytes) -> bool:
        """Return whether a client with this public key may connect. Files that cannot be read are skipped."""
        for path in self.allowed.glob("*.public"):
            try:
                if _read(path) == public:
                    return True
            except KeyFileError:
                continue
        return False

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Require CURVE on a socket, before it is bound. Its context needs a `ZapHandler` to admit clients."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = self.public, self.secret, True
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True)
class ClientKeys:
    """A client's key pair, and the public key of the server that it trusts."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Require CURVE and this server's key on a socket that is not connected yet."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self.public, self.secret, self.server


def generate(directory: Path, clients: list[str]) -> list[Path]:
    """Write the folders above and return the clients' folders. Keeps a server's existing keys and adds the clients.

    Raises KeyFileError for an invalid name or a client that already has keys.
    """
    server = directory / "server"
    for name in clients:
        if not NAME.fullmatch(name):
            raise KeyFileError(
                f"client name {name[:80]!r} must be 1 to 64 letters, digits, dots, underscores or hyphens, the first "
                "a letter or digit"
            )
        if (directory / f"client-{name}").exists() or (server / "allowed" / f"{name}.public").exists():
            raise KeyFileError(
                f"client {name!r} has keys in {directory} already; choose another name, or remove its folder and "
                f"server/allowed/{name}.public"
            )
    if len(set(clients)) < len(clients):
        raise KeyFileError("a client is named twice; give each a different name")
    for folder in (directory, server, server / "allowed"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (server / "server.secret").exists():
        _write(server / "server.secret", zmq.curve_keypair()[1], 0o600)
    server_public = zmq.curve_public(_read_secret(server / "server.secret"))
    folders = []
    for name in clients:
        folder = directory / f"client-{name}"
        folder.mkdir(mode=0o700)
        public, secret = zmq.curve_keypair()
        _write(folder / "client.secret", secret, 0o600)
        _write(folder / "server.public", server_public, 0o644)
        _write(server / "allowed" / f"{name}.public", public, 0o644)
        folders.append(folder)
    return folders


def load_server_keys(directory: str | Path) -> ServerKeys:
    """Load a server's keys. Raises KeyFileError, also if no client is allowed or an allowed key is damaged."""
    directory = Path(directory)
    secret = _read_secret(directory / "server.secret")
    if not [_read(path) for path in directory.glob("allowed/*.public")]:
        raise KeyFileError(
            f"{directory / 'allowed'} has no NAME.public, so no client could connect; add one with "
            "`sidestream keys curve DIR --client NAME`"
        )
    return ServerKeys(zmq.curve_public(secret), secret, directory / "allowed")


def load_client_keys(directory: str | Path) -> ClientKeys:
    """Load a client's keys. Raises KeyFileError."""
    directory = Path(directory)
    secret = _read_secret(directory / "client.secret")
    return ClientKeys(zmq.curve_public(secret), secret, _read(directory / "server.public"))


class ZapHandler:
    """Answers ZAP requests (may this public key connect?) for all CURVE sockets of a context, in its own thread.

    Open it before the socket binds and close it after the socket. A context has one.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys) -> None:
        self._keys = keys
        self._stopping = threading.Event()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._answer, name="sidestream-zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)

    def __enter__(self) -> "ZapHandler":
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _answer(self) -> None:
        with self._socket:
            while not self._stopping.is_set():
                try:
                    if self._socket.poll(100):
                        self._socket.send_multipart(self._decide(self._socket.recv_multipart()))
                except zmq.ContextTerminated:
                    return

    def _decide(self, frames: list[bytes]) -> list[bytes]:
        version, request_id = frames[0], frames[1] if len(frames) > 1 else b""
        admitted = (
            len(frames) == 7
            and version == b"1.0"
            and frames[2] == DOMAIN
            and frames[5] == b"CURVE"
            and self._keys.allows(z85.encode(frames[6]))
        )
        status = [b"200", b"OK"] if admitted else [b"400", b"this key is not allowed"]
        return [b"1.0", request_id, *status, b"", b""]


def _write(path: Path, key: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(key + b"\n")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            key = file.read(64).rstrip(b"\r\n")
    except OSError as error:
        raise _unreadable(path, error) from None
    if not _KEY.fullmatch(key):
        raise KeyFileError(
            f"{path} is not a key: it must have 40 characters of Z85; make a new one with `sidestream keys curve DIR`"
        )
    return key


def _unreadable(path: Path, error: OSError) -> KeyFileError:
    text = f"{path}: {error.strerror}; make keys with `sidestream keys curve DIR` and give this side's folder"
    return KeyFileError(text)


def _read_secret(path: Path) -> bytes:

    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from None
    if mode & 0o077:
        raise KeyFileError(
            f"{path} is open to other users (mode {mode:03o}); chmod 600 it, and make new keys if it may have been read"
        )
    return _read(path)
