"""Where an engine of a fleet listens, and what it leaves there when it ends."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

import ray

from ..protocol.addresses import default_address, parse

OLD_SECONDS = 60.0
"""A socket's lock is taken within moments of its making; one that nobody holds after that belongs to nobody."""


def private_address(name: str, keys: bool) -> str:
    """Where a replica's engine listens: on this host's address in the cluster if there are keys, else at a socket file.

    Raises ValueError for a cluster of several hosts without keys: a socket file is reached from its own host only.
    """
    if keys:
        host = ray.util.get_node_ip_address()
        return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
    hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if len(hosts) > 1:
        raise ValueError(
            f"the cluster has {len(hosts)} hosts, and engines are reached from other hosts with keys only: make them "
            "with `sidestream keys curve DIR --client gateway`, put DIR on every host, and name it as engine-keys"
        )
    folder = parse(default_address()).path
    directory = folder.parent if folder is not None else Path(f"/tmp/sidestream-{os.getuid()}")
    return f"ipc://{directory}/fleet-{name}.sock"


def leave(address: str) -> None:
    """Remove the files of an engine that has ended; of a replica's name there is only ever one."""
    path = parse(address).path
    if path is not None:
        _remove(path)


def sweep(address: str, old_seconds: float = OLD_SECONDS) -> None:
    """Remove the files of engines of the same directory that were killed with their replicas: of those that nobody
    holds any more. `address`: of one engine there.
    """
    path = parse(address).path
    if path is None:
        return
    for lock in path.parent.glob("fleet-*.sock.lock"):
        with contextlib.suppress(OSError):  # it is held, or somebody else removes it
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime >= old_seconds:
                    _remove(lock.with_suffix(""))
            finally:
                os.close(descriptor)


def _remove(socket: Path) -> None:
    for path in (socket, socket.with_name(f"{socket.name}.lock")):
        path.unlink(missing_ok=True)
