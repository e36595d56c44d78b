"""The server under attack: `sidestream serve` in a child process, and the holdings of its processes."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from ....runtime.api.errors import ServerError
from ....runtime.client.client import Client

ROLES = {"sidestream.runtime.server.batcher": "batcher", "sidestream.runtime.server.gpu_process": "GPU process"}
LARGEST_FILE = 256 << 20
"""Limits of the size of the server's files in bytes: with a full disk, and without."""


def descendants(pid: int) -> list[int]:
    """Return a process and all below it, parents first."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):  # it has ended, or is no process
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += sorted(child for child, parent in parents.items() if parent == each)
    return found


def command_line(pid: int) -> str:
    """Return a process's command line; "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return ""


@dataclass(frozen=True)
class Holdings:
    """Resident bytes, open files and threads of one process."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Holdings | None":
        """Return the holdings of a process, or None if it is gone."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{pid}/fd"))
            threads = len(os.listdir(f"/proc/{pid}/task"))
        except (OSError, IndexError):
            return None
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), files, threads)


class ServedDemo:
    """A server below `folder` (socket, cache, adapter root, log): the demo model, or the model in `arguments`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.adapters = folder / "adapters"
        self.log = folder / "server.log"
        self.started = time.monotonic()
        self.killed_at: float | None = None
        """Monotonic time of the last intended kill."""
        self.back_at = self.started
        """Monotonic time at which it was last seen to serve again."""
        self.outages: list[float] = []
        """Seconds from each kill until the server was healthy again."""
        self.address = f"ipc://{folder}/run/engine.sock"
        for made in (self.cache, self.adapters):
            made.mkdir(mode=0o700, parents=True)
        self._command = [sys.executable, "-m", "sidestream.tools.cli", "serve", "--no-http", "--bind", self.address]
        self._command += ["--adapter-root", str(self.adapters), "--allow-adapter-loading", *arguments]
        self.log.touch()
        self._process, self._logging = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], threading.Thread]:
        folder = str(self.folder)
        places = {"SIDESTREAM_CACHE": str(self.cache), "XDG_RUNTIME_DIR": folder, "XDG_STATE_HOME": folder}
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | places
        process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        # here, since a server with a full disk cannot write it
        logging = threading.Thread(target=self._keep_log, args=(process.stdout,), name="log", daemon=True)
        logging.start()
        return process, logging

    def restart(self) -> None:
        """Start another server at the same address after this one was killed."""
        self._process.wait()
        self._logging.join()
        self._process, self._logging = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Return whether the supervisor runs."""
        return self._process.poll() is None

    @property
    def is_back(self) -> bool:
        """Return whether it has been seen to serve since the last kill."""
        return self.killed_at is None or self.back_at > self.killed_at

    @property
    def undisturbed(self) -> float:
        """Return seconds since the last kill or the start."""
        return time.monotonic() - (self.killed_at or self.started)

    def processes(self) -> dict[str, int]:
        """Return role -> process id of the supervisor and its running children."""
        found = {"supervisor": self._process.pid} if self.alive else {}
        for pid in descendants(self._process.pid)[1:]:
            words = command_line(pid).split()
            found |= {role: pid for module, role in ROLES.items() if module in words}
        return found

    def wait(self, seconds: float = 180.0) -> float:
        """Wait until the server answers, and return the seconds. Raises TimeoutError."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            if not self.alive:
                raise TimeoutError(f"the server ended: {self.tail()}")
            try:
                with Client(self.address, connect_timeout=2.0, call_timeout=5.0) as client:
                    if client.health().status == "ok":
                        return time.monotonic() - started
            except (ServerError, TimeoutError, OSError):
                pass
            time.sleep(0.2)
        raise TimeoutError(f"the server did not answer for {seconds:g} s: {self.tail()}")

    def full_disk(self, full: bool) -> None:
        """Forbid the server's processes to write files, or allow it again: a full disk."""
        for pid in self.processes().values():
            limit = 0 if full else LARGEST_FILE
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))

    def _keep_log(self, output: IO[bytes]) -> None:
        with output, self.log.open("ab") as log:
            while piece := os.read(output.fileno(), 1 << 16):
                log.write(piece)
                log.flush()

    def tail(self, lines: int = 8) -> str:
        """Return the end of the server's log."""
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def said(self, words: str) -> str:
        """Return the last line of the log with `words` in it, or ""."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if words in line), "")

    def stop(self) -> list[str]:
        """Send SIGTERM, then SIGKILL; return processes and sockets that remain."""
        children = set(self.processes().values()) - {self._process.pid}
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._logging.join(5)  # a remaining process would keep it
        left = [f"process {pid}" for pid in children if Path(f"/proc/{pid}").exists()]
        return left + [str(path.relative_to(self.folder)) for path in self.folder.rglob("*.sock")]


def tracebacks_in(log: Path) -> list[str]:
    """Return the tracebacks in a log, one line each."""
    found = []
    for part in log.read_text(errors="replace").split("Traceback (most recent call last):")[1:]:
        lines = part.strip("\n").splitlines()
        end = next((index for index, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
        found.append(" | ".join(line.strip() for line in lines[max(0, end - 4) : end + 1]))
    return found
