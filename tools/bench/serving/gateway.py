"""`sidestream bench gateway`: the cost of the HTTP front, with an engine on a simulated GPU."""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...options.engine import add_value
from ...options.environment import version_text
from .report import engine_figures

DESCRIPTION = """\
Stream completions through one gateway process from an engine with a simulated GPU, and count the events that arrive.
A bare starlette application under the same uvicorn sends the same bytes for comparison, twice: unpaced, as fast as the
client reads, and paced, an event to each stream at every step. Unpaced, one poll of the sockets serves many events;
paced, the process wakes up as often as the gateway.

Events per second of the process's CPU time do not depend on other load of the machine. The same streams without the
gateway, over ZeroMQ, show its cost for the engine: each round has both, and they are compared pair by pair."""

PROMPT, OUTPUT = [7] * 64, 4096
ADAPTERS = 4


@dataclass
class Figures:
    """Received events, CPU seconds of the measured process, and the engine's figures, over `seconds`."""

    events: int
    seconds: float
    cpu_seconds: float
    engine: dict[str, float]

    def __str__(self) -> str:
        rate, efficiency = self.events / self.seconds, self.events / self.cpu_seconds
        share = 100 * self.cpu_seconds / self.seconds
        return f"{rate:9.0f} events/s {efficiency:9.0f} events per CPU second {share:5.1f}% of a core"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the bench to `sidestream bench`."""
    parser = commands.add_parser("gateway", help="measure the cost of the HTTP front", description=DESCRIPTION)
    add_value(parser, "--streams", 32, "streams at once")
    add_value(parser, "--step-ms", 3.0, "time of a simulated step", float, "MS")
    add_value(parser, "--seconds", 10.0, "seconds per measurement", float, "S")
    add_value(parser, "--rounds", 3, "rounds")
    parser.set_defaults(run=run)


async def stream(url: str, body: bytes, counts: list[int]) -> None:
    """Run one stream after another on new connections, and count the events."""
    host, port = url.removeprefix("http://").split(":")
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        tail = b""
        while data := await reader.read(1 << 16):
            tail += data
            counts[0] += tail.count(b"data: ")
            if b"[DONE]" in tail:
                break
            tail = tail[-5:] if not tail.endswith(b"data: ") else b""
        writer.close()


Streams = AbstractAsyncContextManager[Callable[[list[int]], Coroutine[Any, Any, None]]]
"""A context that returns a coroutine function: a stream that counts its events."""


@asynccontextmanager
async def over_http(url: str, body: bytes) -> AsyncIterator[Any]:
    """Stream from an HTTP server."""
    yield lambda counts: stream(url, body, counts)


@asynccontextmanager
async def over_zeromq(address: str) -> AsyncIterator[Any]:
    """Stream from the engine on one connection, as the gateway does."""
    from ....runtime.api.sampling_params import SamplingParams
    from ....runtime.client.async_client import AsyncClient

    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)

    async def one(counts: list[int]) -> None:
        while True:
            async with aclosing(client.stream_lists(PROMPT, params)) as lists:
                async for chunks in lists:
                    counts[0] += len(chunks)

    async with AsyncClient(address, name="bench gateway") as client:
        yield one


def measure(
    target: Streams, process: int, streams: int, seconds: float, stats: Callable[[], dict[str, float]]
) -> Figures:
    """Load a server for a while; `process` is that of the CPU time."""

    async def load() -> Figures:
        counts = [0]
        async with target as start:
            tasks = [asyncio.create_task(start(counts)) for _ in range(streams)]
            await asyncio.sleep(min(2.0, seconds / 2))
            counters = await asyncio.to_thread(stats)
            before, cpu, began = counts[0], cpu_seconds(process), time.monotonic()
            await asyncio.sleep(seconds)
            events, taken, used = counts[0] - before, time.monotonic() - began, cpu_seconds(process) - cpu
            figures = Figures(events, taken, used, engine_figures(counters, await asyncio.to_thread(stats)))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return figures

    return asyncio.run(load())


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process and its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_event(url: str, body: bytes) -> str:
    """Return an event of the gateway, for the bare application."""
    import http.client

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    line = connection.getresponse().readline().decode().strip()
    connection.close()
    if not line.startswith("data: "):
        raise ValueError(f"the gateway answered {line[:200]}")
    return line


class Bare:
    """The bare application in a process of its own; `step_seconds`: 0 for unpaced."""

    def __init__(self, event: str, step_seconds: float) -> None:
        command = [sys.executable, "-m", "sidestream.tools.bench.serving.bare_app", event, str(step_seconds)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None  # a pipe, as requested
        self.url, self.process = self._process.stdout.readline().strip(), self._process.pid

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.communicate()


def compare(address: str, url: str, gateway: int, stats: Any, options: argparse.Namespace) -> None:
    """Measure all in turn, and print the gateway's share of both limits and its cost for the engine."""
    asked = {"prompt": PROMPT, "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0, "stream": True}
    body = json.dumps(asked).encode()
    event = first_event(url, body)
    bare = {name: Bare(event, seconds) for name, seconds in (("unpaced", 0.0), ("paced", options.step_ms / 1000))}

    def one(target: Streams, process: int) -> Figures:
        return measure(target, process, options.streams, options.seconds, stats)

    try:
        shares: dict[str, list[float]] = {name: [] for name in bare}
        pairs = []
        for round_ in range(options.rounds):
            through = one(over_http(url, body), gateway)
            alone = one(over_zeromq(address), os.getpid())
            print(f"round {round_ + 1}\n  gateway       {through}")
            for name, limit in bare.items():
                found = one(over_http(limit.url, body), limit.process)
                shares[name].append((through.events / through.cpu_seconds) / (found.events / found.cpu_seconds))
                print(f"  bare, {name:8}{found}   the gateway reaches {100 * shares[name][-1]:.1f}%, by CPU time")
            pairs.append((through.engine, alone.engine))
            for name, figures in (("with", through.engine), ("without", alone.engine)):
                print(f"  engine {name + ' gateway':16} {engine_line(figures)}", flush=True)
        for name, each in shares.items():
            print(f"median share of the bare application's events per CPU second, {name}: {100 * median(each):.1f}%")
        for line in engine_summary(pairs):
            print(line)
    finally:
        for limit in bare.values():
            limit.close()


def engine_line(figures: dict[str, float]) -> str:
    """Return a line of the engine's figures."""
    return (
        f"late plans {100 * figures['late_plans_share']:6.2f}%   GPU idle {figures['gpu_idle_us_per_step']:7.1f} us a "
        f"step   batcher CPU {1e3 * figures['batcher_cpu_ms_per_step']:6.1f} us a step"
    )


def engine_summary(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> list[str]:
    """Return lines of the engine's figures with the gateway minus without it: median and range of the pairs."""

    def change(name: str, unit: str, factor: float) -> str:
        changes = [factor * (through[name] - alone[name]) for through, alone in pairs]
        return f"{median(changes):+.2f} {unit} ({min(changes):+.2f} to {max(changes):+.2f})"

    return [
        "the engine with the gateway, next to without it:",
        f"  late plans   {change('late_plans_share', 'points', 100)}",
        f"  GPU idle     {change('gpu_idle_us_per_step', 'us a step', 1)}",
        f"  batcher CPU  {change('batcher_cpu_ms_per_step', 'us a step', 1e3)}",
    ]


def run(options: argparse.Namespace) -> int:
    """Start the engine and the gateway, and measure."""
    from ....runtime.client.client import Client
    from ....runtime.gateway.server_process import listen, url_of
    from ....runtime.gateway.settings import GatewaySettings
    from ....runtime.server.settings import ServeSettings
    from ....runtime.server.supervisor import Supervisor
    from ....runtime.server.supervisor_loop import GatewayProcess

    print(re.sub(r"\n+", "\n", version_text()))
    print(f"{options.streams} streams, steps of {options.step_ms:g} ms\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="ssb-") as name:
        directory = Path(name)
        tokenizer = Path(__file__).parents[2] / "demo_model" / "tokenizer.json"
        (directory / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        pages = (len(PROMPT) + OUTPUT) // 64 + 2
        llm = {
            "step_seconds": options.step_ms / 1000,
            "max_num_seqs": options.streams,
            "max_num_batched_tokens": 8192,
            "num_slots": ADAPTERS,
            "max_model_len": pages * 64,
            "num_pages": pages * options.streams + 64,
            "vocabulary": 256,
        }
        settings = ServeSettings(
            model=name,
            llm=llm,
            bind=f"ipc://{directory}/engine.sock",
            gpu_command=[sys.executable, "-m", "sidestream.tools.bench.serving.simulated_gpu"],
            served_model_name="simulated",
        )
        listener = listen("127.0.0.1", 0)
        url = url_of(listener)
        command = [sys.executable, "-m", "sidestream.runtime.gateway.server_process"]
        front = GatewayProcess(command, lambda engines: GatewaySettings(engines=engines, port=0), listener)
        supervisor = Supervisor(settings, print_line=lambda line: None, gateway=front)
        problem: list[BaseException] = []

        def load() -> None:
            try:
                with Client(settings.bind, connect_timeout=60.0) as client:
                    gateway = front.child
                    if gateway is None:
                        raise RuntimeError("the gateway did not start")
                    compare(settings.bind, url, gateway.process.pid, client.stats, options)
            except BaseException as error:  # raised when the processes have ended
                problem.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGTERM)  # does not wait for open requests

        threading.Thread(target=load, daemon=True).start()
        supervisor.run()
    if problem:
        raise problem[0]
    return 0
