"""Addresses of a server, `ipc:///absolute/path` or `tcp://host:port`, and checks that they are safe. Opens no socket.

An ipc socket is protected by its directory (mode 0700, owned by this user). Every user of the machine can connect to a
tcp port on the loopback. Other tcp addresses need CURVE keys.
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
    """An address is malformed or not safe to use."""


@dataclass(frozen=True)
class Address:
    """A parsed address: `path` for ipc, `host` and `port` for tcp. `str` gives ZeroMQ's form."""

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
        """Whether only processes of this machine can connect: ipc, or tcp on a loopback address."""
        if self.scheme == "ipc":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name may resolve to any address


def parse(text: str) -> Address:
    """Parse `ipc:///absolute/path` or `tcp://host:port`. `localhost` becomes 127.0.0.1; with port 0 the system chooses
    a port. Raises AddressError.
    """
    scheme, separator, location = text.partition("://")
    if separator and scheme == "ipc":
        return Address("ipc", path=_socket_path(text, location))
    match = _TCP.fullmatch(location) if separator and scheme == "tcp" else None
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
            raise AddressError(f"address {text!r}: [{host}] is not an IPv6 address") from None
    return Address("tcp", host="127.0.0.1" if host == "localhost" else host, port=port)


def _socket_path(text: str, location: str) -> Path:
    path = Path(location)
    if not path.is_absolute() or not path.name or ".." in path.parts or "\x00" in location:
        raise AddressError(
            f"address {text[:200]!r} must have an absolute path without '..', for example "
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
    """Return `$SIDESTREAM_ADDRESS`, or an ipc socket in a private directory of this user."""
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
    """Return the directory for temporary files. `tempfile` finds none on a full disk, but a socket needs no space."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def check_keys(address: Address, keys: bool, flag: str = "--keys") -> None:
    """Raise AddressError for tcp beyond the loopback without CURVE keys. Call it before binding and connecting.

    `flag`: the option that gives keys, for the message.
    """
    if not address.local and not keys:
        raise AddressError(
            f"{address} can be reached from other machines, so it needs keys: make them with "
            f"`sidestream keys curve DIR` and give them with {flag}; or use an ipc address or tcp://127.0.0.1:PORT"
        )


def make_private_directory(address: Address) -> None:
    """Create an ipc address's directory with mode 0700, or check the one that exists. Does nothing for tcp.

    Raises AddressError as `check_private_directory` does.
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
    """Raise AddressError unless an ipc address's directory belongs to this user and is closed to others.

    Root may use other users' directories.

    In a directory that others can write to, another user's process could listen and receive the prompts.
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
        raise AddressError(f"{directory} is not a directory (links are not followed); choose another address")
    if found.st_uid != os.getuid() and os.getuid() != 0:
        raise AddressError(f"{directory} belongs to another user; choose an address in your own directory")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise AddressError(
            f"{directory} is open to other users (mode {stat.S_IMODE(found.st_mode):03o}); choose a directory for the "
            "socket alone (`mkdir -m 700 DIR`)"
        )


class AddressLock:
    """A lock on an ipc address, since a second bind would silently take over the socket. Does nothing for tcp.

    The kernel releases it (flock) when its process ends. Raises AddressError if another process holds it.
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

        if self._file is not None:
            os.close(self._file)
            self._file = None
