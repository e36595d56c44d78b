"""Measure the batcher alone: a real batcher, real sockets and clients, and a simulated GPU.

    python -m sidestream.tools.dev.bench.batcher --streams 256 --step-ms 3 --seconds 20
    python -m sidestream.tools.dev.bench.batcher --streams 64 --step-ms 3.1 --structured

Prints the batcher's time per step (planning, committing, detokenizing, making chunks), the share of late plans, and the
idle time of the simulated GPU. A plan is late if the GPU process had no step to run while requests were open.
"""

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from ....runtime.protocol.framing import decode_from_server, encode
from ....runtime.protocol.messages import (
    HEARTBEAT_SECONDS,
    Adapters,
    Beat,
    Chunks,
    Error,
    GetStats,
    Hello,
    ListAdapters,
    Sampling,
    Stats,
    StructuredOutputs,
    Submit,
    Welcome,
)
from ....runtime.server.settings import ServeSettings
from ...bench.latency import ENDLESS
from ...bench.serving.report import engine_figures

ADAPTERS = 8
START_SECONDS = 300.0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="bench_batcher", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument(
        "--output", type=int, default=256, help="tokens of an answer; a finished request is followed by another"
    )
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parents[2] / "demo_model" / "tokenizer.json")
    parser.add_argument(
        "--structured", action="store_true", help="every answer must fit a JSON schema, over the tokenizer's tokens"
    )
    parser.add_argument("--address", help="load this server instead, and print its figures")
    parser.add_argument(
        "--adapters",
        type=int,
        default=0,
        metavar="N",
        help="with --address: use N of its adapters in turn (default: the base model only)",
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


class Load:
    """Keeps `streams` requests open over one connection."""

    def __init__(self, address: str, options: argparse.Namespace) -> None:
        self.options = options
        self.socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.connect(address)
        self.tokens = self.issued = self.finished = 0
        self.gaps: list[float] = []
        self.last = 0.0
        self.adapters: list[str | None] = [None]

    def greet(self) -> None:
        """Wait until the server serves, and choose adapters."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.socket.poll(500, zmq.POLLOUT):
                self.socket.send(encode(Hello("bench_batcher")))
                if isinstance(self.receive(10.0), Welcome):
                    break
                time.sleep(0.2)
        else:
            raise TimeoutError(f"no server answers after {START_SECONDS:g} s")
        wanted = self.options.adapters if self.options.address else ADAPTERS
        if wanted:
            self.socket.send(encode(ListAdapters(0)))
            while not isinstance(message := self.receive(10.0), Adapters):
                pass
            self.adapters = [adapter.name for adapter in message.adapters[:wanted]]

    def receive(self, timeout: float) -> Any:
        """Return the next message, or None."""
        return decode_from_server(self.socket.recv()).message if self.socket.poll(int(timeout * 1000)) else None

    def submit(self) -> None:
        """Send one more request, to the next adapter in turn."""
        options, number = self.options, self.issued
        self.issued += 1
        # so that answers end at different times
        length = options.output if number >= options.streams else options.output * (17 + number % 16) // 32
        fits = StructuredOutputs(json=json.dumps(ENDLESS)) if options.structured else None
        sampling = Sampling(temperature=0.0, max_tokens=length, ignore_eos=True, structured_outputs=fits)
        prompt = [(number * 7 + place * (1 + number % 3)) % 200 for place in range(options.prompt)]
        adapter = self.adapters[number % len(self.adapters)]
        self.socket.send(encode(Submit(str(number), prompt_token_ids=prompt, sampling=sampling, adapter=adapter)))

    def run(self, seconds: float) -> None:
        """Read chunks and refill for so long."""
        self.last = time.monotonic()
        until = self.last + seconds
        beat_at = 0.0
        while (now := time.monotonic()) < until:
            if now >= beat_at:
                self.socket.send(encode(Beat()))
                beat_at = now + HEARTBEAT_SECONDS
            self._count(self.receive(HEARTBEAT_SECONDS))

    def _count(self, message: Any) -> None:
        """Count the tokens of a message, and refill."""
        if isinstance(message, Error):
            raise RuntimeError(f"{message.code}: {message.message}")
        if not isinstance(message, Chunks):
            return
        now = time.monotonic()
        self.gaps.append(now - self.last)
        self.last = now
        for chunk in message.chunks:
            self.tokens += len(chunk.token_ids)
            if chunk.usage is not None:
                self.finished += 1
                self.submit()

    def stats(self) -> dict[str, float]:
        """Return the server's counters. Tokens that arrived before them are counted."""
        self.socket.send(encode(GetStats(0)))
        while not isinstance(message := self.receive(10.0), Stats):
            self._count(message)
        return message.values


def watch(address: str, options: argparse.Namespace) -> dict[str, float]:
    """Load a server, and compare its counters before and after."""
    client = Load(address, options)
    client.greet()
    for _ in range(options.streams):
        client.submit()
    client.run(min(3.0, options.seconds / 4))
    before, tokens, begin, cpu = (
        client.stats(),
        client.tokens,
        time.monotonic(),
        resource.getrusage(resource.RUSAGE_SELF),
    )
    client.gaps.clear()
    client.run(options.seconds)
    after, elapsed = client.stats(), time.monotonic() - begin
    used = resource.getrusage(resource.RUSAGE_SELF)
    gaps = sorted(client.gaps)
    return engine_figures(before, after) | {
        "seconds": elapsed,
        "tokens_per_second": (client.tokens - tokens) / elapsed,
        "requests_finished": client.finished,
        "frame_gap_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "frame_gap_p99_ms": 1e3 * gaps[len(gaps) * 99 // 100],
        "client_cpu_share": (used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime) / elapsed,
    }


def measure(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Start a server with a simulated GPU, and load it."""
    from ....ops.core.kv_layout import PAGE_SIZE, pages_for
    from ....runtime.server.supervisor import Supervisor

    (directory / "tokenizer.json").write_bytes(options.tokenizer.read_bytes())
    pages = pages_for(options.prompt + options.output) + 1
    llm = {
        "step_seconds": options.step_ms / 1000,
        "max_num_seqs": options.streams,
        "max_num_batched_tokens": 8192,
        "num_slots": ADAPTERS,
        "max_model_len": pages * PAGE_SIZE,
        "num_pages": pages * options.streams + 64,
        "vocabulary": vocabulary(options.tokenizer) if options.structured else 256,
    }
    settings = ServeSettings(
        model=str(directory),
        llm=llm,
        adapters={f"a{index}": str(directory) for index in range(ADAPTERS)},
        bind=f"ipc://{directory}/engine.sock",
        gpu_command=[sys.executable, "-m", "sidestream.tools.bench.serving.simulated_gpu"],
    )
    figures: dict[str, float] = {}

    def load() -> None:
        try:
            figures.update(watch(settings.bind, options))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)  # does not wait for open requests

    # the second signal may arrive after the supervisor's handler is gone
    signal.signal(signal.SIGTERM, lambda *_: None)
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    Supervisor(settings, print_line=lambda line: None).run()
    thread.join(1.0)
    return figures


def vocabulary(tokenizer: Path) -> int:
    """Return the number of tokens of a tokenizer.json."""
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    added = [token["id"] for token in content["added_tokens"]]
    return 1 + max(*content["model"]["vocab"].values(), *added)


def main() -> int:
    """Measure and print."""
    options = arguments()
    if options.address:
        figures = watch(options.address, options)
    else:
        with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as directory:
            figures = measure(options, Path(directory))
    if not figures:
        print("the server did not come up", file=sys.stderr)
        return 1
    steps = options.address or f"simulated steps of {options.step_ms:g} ms"
    print(
        f"{options.streams} streams{' of constrained answers' * options.structured}, {steps}, prompt {options.prompt}, "
        f"output {options.output}, {os.cpu_count()} CPU cores"
    )
    for name, value in figures.items():
        print(f"  {name:24} {value:12.4f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
