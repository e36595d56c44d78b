"""Where an engine listens: `ipc:///absolute/path` or `tcp://host:port`, and what makes an address safe to use.

An ipc socket is guarded by the directory that it lies in (0700, ours); a tcp port on the loopback is open to every user
of the machine, and anything beyond needs CURVE keys. Nothing here opens a socket.
"""

import fcntl
import ipaddress
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "SIDESTREAM_ADDRESS"
MAX_PATH_BYTES = 107  # sockaddr_un.sun_path, without its closing zero
_TCP = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]{2,45})\]|(?P<host>\*|[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)):(?P<port>[0-9]{1,5})"
)


class AddressError(ValueError):
    """An address is malformed, or not safe to use as it is; the text says which and what to do."""


@dataclass(frozen=True)
class Address:
    """A parsed address: `path` for ipc, `host` and `port` for tcp. Its `str` is what ZeroMQ takes."""

    scheme: str
    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether only processes of this machine can reach it: ipc, or tcp on a loopback address."""
        if self.scheme == "ipc":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name may resolve to anything


def parse(text: str) -> Address:
    """Raises AddressError for anything but `ipc:///absolute/path` and `tcp://host:port` (`localhost` becomes
    127.0.0.1; port 0 lets the system choose).
    """
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "ipc":
        return Address("ipc", path=_socket_path(text, rest))
    match = _TCP.fullmatch(rest) if separator and scheme == "tcp" else None
    if match is None:
        raise AddressError(
            f"address {text[:200]!r} must be ipc:///absolute/path or tcp://host:port, for example tcp://127.0.0.1:5757"
        )
    host, port = match["six"] or match["host"], int(match["port"])
    if port > 65535:
        raise AddressError(f"address {text!r}: port {port} is above 65535")
    if match["six"]:
        try:
            host = ipaddress.IPv6Address(host).compressed
        except ValueError:
            raise AddressError(f"address {text!r}: [{host}] is no IPv6 address") from None
    return Address("tcp", host="127.0.0.1" if host == "localhost" else host, port=port)


def _socket_path(text: str, rest: str) -> Path:
    path = Path(rest)
    if not path.is_absolute() or not path.name or ".." in path.parts or "\x00" in rest:
        raise AddressError(
            f"address {text[:200]!r} must hold an absolute path without '..', for example "
            "ipc:///run/user/1000/sidestream/engine.sock"
        )
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise AddressError(
            f"address {text[:200]!r}: the path has {length} bytes, a socket's path at most {MAX_PATH_BYTES}; choose "
            "a shorter one"
        )
    return path


def default_address() -> str:
    """`$SIDESTREAM_ADDRESS`, or an ipc socket in a directory of this user's own."""
    if os.environ.get(ENVIRONMENT):
        return os.environ[ENVIRONMENT]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = (
        Path(runtime) / "sidestream"
        if runtime and Path(runtime).is_dir()
        else temporary_root() / f"sidestream-{os.getuid()}"
    )
    return f"ipc://{directory}/engine.sock"


def temporary_root() -> Path:
    """Where this machine keeps what does not last. Python finds no such directory on a full disk, for it tries to write
    a file there; sockets need no room.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def check_keys(address: Address, keys: bool, flag: str = "--keys") -> None:
    """Raises AddressError for tcp beyond the loopback without CURVE keys, which the command's `flag` gives.

    To be asked before binding and before connecting.
    """
    if not address.local and not keys:
        raise AddressError(
            f"{address} can be reached from other machines, so it needs keys: make them with `sidestream keys curve DIR` "
            f"and give them with {flag}; "
            "or use an ipc address or tcp://127.0.0.1:PORT"
        )


def make_private_directory(address: Address) -> None:
    """For binding: creates an ipc address's directory with mode 0700. Does nothing for tcp.

    Raises AddressError if the directory is there and other users could enter it, or it is not ours.
    """
    if address.path is None:
        return
    directory = address.path.parent
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    check_private_directory(address)


def check_private_directory(address: Address) -> None:
    """For connecting: raises AddressError unless an ipc address's directory is ours (or root asks) and closed to other
    users. Nothing to check for tcp.

    A socket in a directory that anybody may write to could be anybody's: it would be told our prompts.
    """
    if address.path is None:
        return
    directory = address.path.parent
    try:
        found = directory.lstat()
    except FileNotFoundError:
        raise AddressError(
            f"nothing serves at {address}: there is no directory {directory}; start `sidestream serve`, or give its "
            "address"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise AddressError(f"{directory} is not a directory (links are not followed here); choose another address")
    if found.st_uid != os.getuid() and os.getuid() != 0:
        raise AddressError(f"{directory} belongs to another user; choose an address in a directory of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise AddressError(
            f"{directory} is open to other users (mode {stat.S_IMODE(found.st_mode):03o}); chmod 700 it, or choose "
            "another directory"
        )


class AddressLock:
    """Held by the process that serves at an ipc address: a second bind would silently take the socket over. Nothing to
    hold for tcp.

    The lock is the kernel's (flock), so it goes with its process, however that ends. Raises AddressError if another
    process holds it.
    """

    def __init__(self, address: Address) -> None:
        self._file: int | None = None
        if address.path is None:
            return
        self._file = os.open(f"{address.path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise AddressError(
                f"another engine serves at {address}; stop it, or choose another address with --bind"
            ) from None

    def release(self) -> None:
        """Let another process serve here."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
