"""Connects to an existing Ray, or starts a local one. Ray requires a token, so that others cannot use it."""

import logging
import os
import secrets
import socket
import stat
import subprocess
import sys
from pathlib import Path

LOOPBACK = "127.0.0.1"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
MODE = "RAY_AUTH_MODE"
CONNECT_SECONDS = 2.0


class ClusterError(ConnectionError):
    """There is no Ray, or it cannot be reached. The message explains the remedy."""


def secure() -> None:
    """Make Ray require a token, in this process and its children. Only this user can read the token's file.

    Must be called before Ray is imported. Ray's variables in the environment take precedence. Raises OSError.
    """
    os.environ.setdefault(MODE, "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ[MODE] != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    path = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def connect(start: bool) -> bool:
    """Connect to the Ray of $RAY_ADDRESS or of this machine. `start`: start one if there is none.

    Returns whether one was started. It outlives this process until `ray stop`. Raises ClusterError.
    """
    secure()
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS") or local_address()
    started = False
    if address is None:
        if not start:
            raise ClusterError(
                "no Ray is running on this machine; start one with `sidestream fleet deploy`, or set RAY_ADDRESS"
            )
        start_local()
        address, started = local_address(), True
    try:
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except ConnectionError as error:
        raise ClusterError(f"no Ray answers at {address}: set RAY_ADDRESS to another, or start it") from error
    return started


def local_address() -> str | None:
    """Return the address of this machine's Ray if it accepts connections: `ray.init` would wait for minutes."""
    try:
        address = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return None
    return address


def start_local() -> None:
    """Start a Ray for this machine only. Raises ClusterError."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"]
    command.append(f"--dashboard-host={LOOPBACK}")
    # a new session, so that Ray survives when the command and its children are killed
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise ClusterError(f"Ray did not start: {' '.join(lines[-3:])}")
