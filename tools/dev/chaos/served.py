"""The server under attack: `sidestream serve` in a child process, and what its processes hold."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ....runtime.api.errors import ServerError
from ....runtime.client.client import Client

ROLES = {"sidestream.runtime.server.batcher": "batcher", "sidestream.runtime.server.gpu_process": "GPU process"}
LARGEST_FILE = 256 << 20
"""Bytes after which the server's writes fail while the disk counts as full for it, and never otherwise."""


@dataclass(frozen=True)
class Holdings:
    """What one process holds: resident bytes, open files, threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Holdings | None":
        """None if the process is gone."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{pid}/fd"))
            threads = len(os.listdir(f"/proc/{pid}/task"))
        except (OSError, IndexError):
            return None
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), files, threads)


class ServedDemo:
    """A server below `folder` (socket, cache, adapters' root, log): of the demo model, unless `arguments` of
    `sidestream serve` name another one.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.adapters = folder / "adapters"
        self.log = folder / "server.log"
        self.begun = time.monotonic()
        self.killed_at: float | None = None
        """When a process was last killed by intention, on the monotonic clock."""
        self.back_at = self.begun
        """When it was last seen to serve again after that."""
        self.outages: list[float] = []
        """Seconds from each kill until the server said ok again."""
        self.address = f"ipc://{folder}/run/engine.sock"
        for made in (self.cache, self.adapters):
            made.mkdir(mode=0o700, parents=True)
        command = [sys.executable, "-m", "sidestream.tools.cli", "serve", "--no-http", "--bind", self.address]
        command += ["--adapter-root", str(self.adapters), "--allow-adapter-loading", *arguments]
        environment = (
            {"OMP_NUM_THREADS": "1"}
            | os.environ
            | {
                "SIDESTREAM_CACHE": str(self.cache),
                "XDG_RUNTIME_DIR": str(folder),
            }
        )
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        # here, since a server whose disk is full could not write it
        self._logging = threading.Thread(target=self._keep_log, name="log", daemon=True)
        self.log.touch()
        self._logging.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the supervisor runs."""
        return self._process.poll() is None

    @property
    def is_back(self) -> bool:
        """Whether it has been seen to serve since the last kill."""
        return self.killed_at is None or self.back_at > self.killed_at

    @property
    def undisturbed(self) -> float:
        """Seconds since the last kill, or since the start."""
        return time.monotonic() - (self.killed_at or self.begun)

    def processes(self) -> dict[str, int]:
        """Role -> process id: the supervisor, and those of its children that run."""
        found = {"supervisor": self._process.pid} if self.alive else {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except (OSError, IndexError, ValueError):
                continue
            if parent == self._process.pid:
                found |= {role: int(entry.name) for module, role in ROLES.items() if module in words}
        return found

    def holdings(self) -> dict[str, Holdings]:
        """What each process holds."""
        held = {role: Holdings.of(pid) for role, pid in self.processes().items()}
        return {role: each for role, each in held.items() if each is not None}

    def wait(self, seconds: float = 180.0) -> float:
        """Wait until the server answers; returns the seconds that it took. Raises TimeoutError."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if not self.alive:
                raise TimeoutError(f"the server ended: {self.tail()}")
            try:
                with Client(self.address, connect_timeout=2.0, call_timeout=5.0) as client:
                    if client.health().status == "ok":
                        return time.monotonic() - begun
            except (ServerError, TimeoutError, OSError):
                pass
            time.sleep(0.2)
        raise TimeoutError(f"the server did not answer for {seconds:g} s: {self.tail()}")

    def full_disk(self, full: bool) -> None:
        """From now on the server's processes cannot write files (or can again): a disk with no room left."""
        for pid in self.processes().values():
            limit = 0 if full else LARGEST_FILE
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))

    def _keep_log(self) -> None:
        said = self._process.stdout
        if said is not None:
            with said, self.log.open("wb") as log:
                while piece := os.read(said.fileno(), 1 << 16):
                    log.write(piece)
                    log.flush()

    def tail(self, lines: int = 8) -> str:
        """The end of the server's log."""
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def said(self, words: str) -> str:
        """The last line of the server's log with `words` in it; empty if there is none."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if words in line), "")

    def tracebacks(self) -> list[str]:
        """The tracebacks that the server has printed, on one line each."""
        found = []
        for part in self.log.read_text(errors="replace").split("Traceback (most recent call last):")[1:]:
            lines = part.strip("\n").splitlines()
            end = next((index for index, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
            found.append(" | ".join(line.strip() for line in lines[max(0, end - 4) : end + 1]))
        return found

    def stop(self) -> list[str]:
        """SIGTERM, then SIGKILL if it does not end; returns what is left of it: processes and sockets."""
        children = set(self.processes().values()) - {self._process.pid}
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._logging.join(5)  # a process that is left would keep it
        left = [f"process {pid}" for pid in children if Path(f"/proc/{pid}").exists()]
        return left + [str(path.relative_to(self.folder)) for path in self.folder.rglob("*.sock")]
