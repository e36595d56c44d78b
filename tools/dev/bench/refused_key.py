"""Time the requests of one key while all requests of another key are refused.

    python -m sidestream.tools.dev.bench.refused_key --source before=/checkout/src --source after=.venv/src

A source is a folder that contains the package `sidestream`. For each source it starts `sidestream serve` with the demo
model on the CPU. A refused key has spent its one request per minute; each phase has another one. Eight connections of
that key then send the bodies of ATTACKS from another process, and a client of the other key measures. Each phase is
measured next to a quiet one, since other work of the machine changes both.
"""

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....runtime.gateway.auth import edit_keys_file
from ....runtime.gateway.auth.key_store import Key
from ...bench.serving.gateway import cpu_seconds
from ...bench.serving.http import Server, server
from ...options.environment import collect
from ..chaos.served_gateway import exchange

CONNECTIONS = 8
ANSWER_SECONDS = 120.0
REQUESTS = ("chat", "completion", "models", "health")
_TEXT = "What is the capital of France? " * 30
_LONG = "a b " * 250_000


def _chat(count: int, text: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"max_tokens": 1, "messages": [{"role": roles[index % 2], "content": text} for index in range(count)]}


def _completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "prompt": prompt, **fields}


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ATTACKS: dict[str, Any] = {
    "chat, 1 short message": lambda: (CHAT, _chat(1, "Hi")),
    "chat, 4095 messages, 4.0 MB": lambda: (CHAT, _chat(4095, _TEXT)),
    "chat, 1 message, 1 MB": lambda: (CHAT, _chat(1, _LONG)),
    "completion, echo, 8 texts, 8 MB": lambda: (COMPLETION, _completion([_LONG] * 8, echo=True, logprobs=1)),
    "completion, echo, 1024 lists of ids": lambda: (COMPLETION, _completion([[5, 6, 7]] * 1024, echo=True)),
    "completion, 10M ids, 20 MB": lambda: (COMPLETION, _completion([[5] * 262_000] * 38)),
    "chat, 4.0 MB, client disconnects": lambda: (CHAT, _chat(4095, _TEXT)),
}


def request_bytes(path: str, key: str, body: dict[str, Any]) -> bytes:
    """Return an HTTP request."""
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    )
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def attack(port: int, key: str, name: str) -> None:
    """Send refused requests over CONNECTIONS connections until the process is killed. Prints each status."""
    path, body = ATTACKS[name]()
    data, leaves = request_bytes(path, key, body), "disconnects" in name

    def report(status: str) -> None:
        os.write(1, f"{status}\n".encode())  # in one piece: other threads report too

    def once(peer: socket.socket) -> str:
        """Send a request. Returns the head of its answer, "" if the server ended the connection."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer came first
            peer.sendall(data)
        if leaves:
            report("left")
            return ""
        with peer.makefile("rb") as answer:
            status = answer.readline().split()
            fields = dict(line.decode().lower().strip().split(": ", 1) for line in iter(answer.readline, b"\r\n"))
            answer.read(int(fields["content-length"]))
        report(status[1].decode())
        return "" if fields.get("connection") == "close" else status[1].decode()

    def connection() -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as peer:
                    while once(peer):
                        pass
            except (OSError, LookupError, ValueError):
                report("reset")

    os.nice(19)  # a client elsewhere would take nothing from the server's cores
    for _ in range(CONNECTIONS):
        threading.Thread(target=connection).start()


@contextmanager
def attacking(port: int, key: str, name: str) -> Iterator[Counter[str]]:
    """Run `attack` in another process. The counter of statuses is complete at the end."""
    statuses: Counter[str] = Counter()
    command = [sys.executable, "-m", "sidestream.tools.dev.bench.refused_key", "--attack", str(port), key, name]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        try:
            while output.seek(0, os.SEEK_END) == 0 and process.poll() is None:  # it has had its first answer
                time.sleep(0.05)
            yield statuses
        finally:
            process.kill()
            process.wait()
            output.seek(0)
            statuses.update(output.read().split())


def measure(port: int, key: str, seconds: float) -> dict[str, list[float]]:
    """Return the times in ms of each request of REQUESTS, sent one after the other for `seconds`."""
    times: dict[str, list[float]] = defaultdict(list)
    short = {"chat": (CHAT, _chat(1, "Hi")), "completion": (COMPLETION, _completion("Hi"))}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name in REQUESTS:
            path, body = short.get(name, (f"/{'v1/' if name == 'models' else ''}{name}", None))
            begin = time.perf_counter()
            data = None if body is None else json.dumps(body)
            connection.request("GET" if data is None else "POST", path, data, headers)
            answer = connection.getresponse()
            answer.read()
            times[name].append(1e3 * (time.perf_counter() - begin))
            if answer.status != 200:
                raise RuntimeError(f"{path} of the other key got status {answer.status}")
        time.sleep(0.02)
    connection.close()
    return times


def serving(source: str, keys: Path, directory: Path) -> AbstractContextManager[Server]:
    """Serve the demo model with the package of a source."""
    arguments = ["--device", "cpu", "--precision", "fp32", "--max-model-len", "256", "--max-num-seqs", "16"]
    arguments += ["--api-keys", str(keys), "--usage-log", "none"]
    # the package of the source only, not that of the current directory
    environment = {"PYTHONPATH": str(Path(source).absolute()), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    return server(directory, arguments, environment=os.environ | environment)


@dataclass
class Phase:
    """Times in ms of each request of REQUESTS, and the share of a core that the gateway used."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_seconds: float = 0.0
    seconds: float = 0.0

    def measure(self, port: int, gateway: int, key: str, seconds: float) -> None:
        """Add requests sent for `seconds`; `gateway` is the process id of the gateway."""
        begin, cpu = time.monotonic(), cpu_seconds(gateway)
        for request, times in measure(port, key, seconds).items():
            self.times[request] += times
        self.cpu_seconds += cpu_seconds(gateway) - cpu
        self.seconds += time.monotonic() - begin


def spend(port: int, key: str) -> None:
    """Spend the one request of a key."""
    for status in (200, 429):
        headers = {"Authorization": f"Bearer {key}"}
        with exchange(port, "POST", COMPLETION, _completion("x"), ANSWER_SECONDS, headers) as answer:
            if answer.status != status:
                raise RuntimeError(f"the refused key got status {answer.status}, not {status}")


def compare(label: str, served: Server, good: str, refused: Iterator[str], options: argparse.Namespace) -> None:
    """Print a row for each attack: median in ms without and with it, and the change, for each request of REQUESTS."""
    port, gateway = int(served.url.rpartition(":")[2]), served.gateway
    if gateway is None:
        raise RuntimeError("the process of the gateway was not found")
    measure(port, good, 1)
    print(f"{label:36s}" + "".join(f"{name:>26s}" for name in REQUESTS) + "       gateway CPU  refused key")
    for name in ATTACKS if options.only is None else [name for name in ATTACKS if options.only in name]:
        quiet, loaded, statuses = Phase(), Phase(), Counter[str]()
        for _ in range(options.rounds):
            key = next(refused)
            quiet.measure(port, gateway, good, options.seconds)
            spend(port, key)
            with attacking(port, key, name) as some:
                loaded.measure(port, gateway, good, options.seconds)
            statuses += some
        cells = []
        for request in REQUESTS:
            before, after = statistics.median(quiet.times[request]), statistics.median(loaded.times[request])
            cells.append(f"{before:8.2f} {after:8.2f} {100 * (after / before - 1):+7.0f}%")
        cpu = "".join(f"{100 * phase.cpu_seconds / phase.seconds:8.1f}%" for phase in (quiet, loaded))
        print(f"{name:36s}" + "".join(cells) + f"{cpu}  {dict(statuses)}", flush=True)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", action="append", default=[], metavar="LABEL=DIR", help="measured package")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each phase, less than 50")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of a quiet phase and an attack")
    parser.add_argument("--only", metavar="TEXT", help="attacks whose name contains it")
    parser.add_argument("--attack", nargs=3, metavar=("PORT", "KEY", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack is not None:
        port, key, name = options.attack
        attack(int(port), key, name)
        return
    print(json.dumps(collect()))
    print(f"{CONNECTIONS} connections of the refused key; median in ms without and with them, and the change")
    for source in options.source:
        label, _, folder = source.partition("=")
        with tempfile.TemporaryDirectory(prefix="refused-") as directory:
            keys = Path(directory) / "keys.toml"
            good = edit_keys_file.add(keys, Key("good", "", "good"))
            refused = [
                edit_keys_file.add(keys, Key(f"refused-{index}", "", "refused", requests_per_minute=1))
                for index in range(len(ATTACKS) * options.rounds)
            ]
            with serving(folder, keys, Path(directory)) as served:
                compare(label, served, good, iter(refused), options)


if __name__ == "__main__":
    main()
