"""`sidestream gateway` in a child process, in front of running engines."""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

STOP_SECONDS = 60.0
LOOK_SECONDS = 30.0


@contextlib.contextmanager
def exchange(
    port: int, method: str, path: str, body: Any, seconds: float, headers: Mapping[str, str] | None = None
) -> Any:
    """Send a request to this machine (`body`: None or JSON), and yield the response. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, data, kind | dict(headers or {}))
        yield connection.getresponse()


def events(response: Any) -> Iterator[Any]:
    """Yield the events of a stream. Raises ValueError if it ends without the last one."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise ValueError("the stream was cut")


def statuses(port: int) -> list[str] | None:
    """Return the status of each engine of a gateway; None without an answer."""
    try:
        with exchange(port, "GET", "/health", None, LOOK_SECONDS) as response:
            status = json.loads(response.read())
        return list(status["engines"].values()) if "status" in status else None
    except (http.client.HTTPException, OSError, ValueError):
        return None


class ServedGateway:
    """A gateway without keys for engines at `addresses`; its usage log and its log are below `folder`."""

    def __init__(self, folder: Path, addresses: Sequence[str], *arguments: str) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.usage_log, self.log = folder / "usage.db", folder / "gateway.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [sys.executable, "-m", "sidestream.tools.cli", "gateway", "--port", str(self.port)]
        command += ["--usage-log", str(self.usage_log), *arguments]
        for address in addresses:
            command += ["--engine", address]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL; the usage log is complete after SIGTERM."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def call(self, method: str, path: str, body: Any = None, seconds: float = 60.0) -> tuple[int, Any]:
        """Return the status and the body of a response, JSON decoded. Raises OSError, HTTPException or ValueError."""
        with exchange(self.port, method, path, body, seconds) as response:
            content = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(content) if is_json else content.decode()

    def wait(self, engines: int, seconds: float) -> None:
        """Wait until it uses so many engines. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while (statuses(self.port) or []).count("ok") < engines:
            if self.process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"the gateway does not use {engines} engines: {self.log.read_text()[-1000:]}")
            time.sleep(0.2)
