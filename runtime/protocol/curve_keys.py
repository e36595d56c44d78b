"""CURVE keys: who may speak with an engine over tcp, and how both sides know each other.

`sidestream keys curve DIR` makes one folder for each side, which is all that this side needs:

    DIR/server/        server.secret   allowed/NAME.public      stays with the engine: `sidestream serve --keys
                       DIR/server`
    DIR/client-NAME/   client.secret   server.public            goes to the client: `Client(address,
                       keys="DIR/client-NAME")`

A file holds one key: 40 characters of Z85 and a line end. A public key follows from its secret. Secret files have mode
0600 and are refused with any other; files are never overwritten. The engine admits the keys in `allowed` only (ZAP),
the client the one engine that holds server.public's secret.
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
    """A key file is missing, damaged, or open to other users; the text names it and the remedy."""


@dataclass(frozen=True)
class ServerKeys:
    """An engine's pair, and the folder of the public keys that it admits (read at each connection, so keys can come
    and go while it runs).
    """

    public: bytes
    secret: bytes = field(repr=False)
    allowed: Path

    def allows(self, public: bytes) -> bool:
        """Whether a client with this public key may connect now; a file that cannot be read admits nobody."""
        for path in self.allowed.glob("*.public"):
            try:
                if _read(path) == public:
                    return True
            except KeyFileError:
                continue
        return False

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Makes a socket, before it is bound, speak CURVE only.

        A `Gate` must be open in the same context, or nobody is admitted.
        """
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = self.public, self.secret, True
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True)
class ClientKeys:
    """A client's pair, and the public key of the engine that it trusts."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Makes a socket, before it connects, speak CURVE, and with this engine only."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self.public, self.secret, self.server


def generate(directory: Path, clients: list[str]) -> list[Path]:
    """Writes the folders above; an engine's pair that is there already is kept, and the clients are added to it.
    Returns the clients' folders.

    Raises KeyFileError for a bad name or a client that has keys already.
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
        raise KeyFileError("a client is named twice; give each its own name")
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
    """The engine's side. Raises KeyFileError, also when no client is allowed or an allowed one's file is damaged."""
    directory = Path(directory)
    secret = _read_secret(directory / "server.secret")
    if not [_read(path) for path in directory.glob("allowed/*.public")]:
        raise KeyFileError(
            f"{directory / 'allowed'} holds no NAME.public, so nobody could connect; add a client with `sidestream "
            "keys curve DIR --client NAME`"
        )
    return ServerKeys(zmq.curve_public(secret), secret, directory / "allowed")


def load_client_keys(directory: str | Path) -> ClientKeys:
    """A client's side. Raises KeyFileError."""
    directory = Path(directory)
    secret = _read_secret(directory / "client.secret")
    return ClientKeys(zmq.curve_public(secret), secret, _read(directory / "server.public"))


class Gate:
    """Answers ZAP's question, "may this public key in?", for every CURVE socket of a context, in a thread of its own.

    Open it before the socket binds and close it after the socket is closed. There is one gate for a context.
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
        """Ends the thread."""
        self._stopping.set()
        self._thread.join(timeout=5)

    def __enter__(self) -> "Gate":
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
        raise KeyFileError(
            f"{path}: {error.strerror}; make keys with `sidestream keys curve DIR` and name the folder of this side"
        ) from None
    if not _KEY.fullmatch(key):
        raise KeyFileError(
            f"{path} is no key: it must hold 40 characters of Z85; make a new one with `sidestream keys curve DIR`"
        )
    return key


def _read_secret(path: Path) -> bytes:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise KeyFileError(
            f"{path}: {error.strerror}; make keys with `sidestream keys curve DIR` and name the folder of this side"
        ) from None
    if mode & 0o077:
        raise KeyFileError(
            f"{path} is open to other users (mode {mode:03o}); chmod 600 it, and make new keys if somebody may have "
            "read it"
        )
    return _read(path)
