"""`sidestream bench http`: HTTP compared with ZeroMQ, as clients see it."""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from ...options.engine import add_command, add_value, at_least, check_output
from ...options.environment import write_figures
from ...options.models import add_bench_model
from ..throughput import percentile
from .closed_loop import ClientFigures, Load, decode_figures
from .gateway import cpu_seconds
from .report import engine_figures, shown

DESCRIPTION = """\
Measure the cost of the HTTP front for clients: the same closed loop of streams over ZeroMQ, as in `sidestream bench
serve`, and over HTTP, in turn, first to the base model and then to adapters in turn.

Without --engine and --http a server is started. Clients are several processes; if the machine has enough cores, they
run on cores that the server does not use. Each measurement has other random prompts, so that none is in the prefix
cache."""

EXAMPLES = """\
examples:
  sidestream bench http                                              Llama-3.1-8B's shape with random weights
  sidestream bench http demo --concurrency 8 --output-len 64         the demo model
  sidestream bench http --engine ipc:///run/engine.sock --http http://127.0.0.1:8000"""

START_SECONDS = 1800.0
SETTLE_SECONDS, WARM_UP_SECONDS = 2.0, 5.0
"""Seconds before figures count, and of the first round, which is a warm-up."""
ARMS = ("ZeroMQ", "HTTP")
SERVER_CORES = 4
"""For a batcher, a GPU process, a gateway and their children; with fewer cores, sharing all is better."""
HEAD = (
    f"{'':>10} {'':>6} {'tokens/s':>8} {'first p50':>9} {'p99':>7} {'gap p50':>7} {'p99':>7} {'late plans':>10} "
    f"{'GPU idle':>8} {'client':>6} {'gateway':>7}"
)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the bench to `sidestream bench`."""
    parser = add_command(commands, "http", "compare HTTP with ZeroMQ for clients", DESCRIPTION, EXAMPLES, run)
    add_bench_model(parser)
    parser.add_argument("--engine", metavar="ADDRESS", help="a running server, with HTTP at --http")
    parser.add_argument("--http", metavar="URL", help="URL of the server's HTTP front, http://host:port")
    add_value(parser, "--concurrency", 64, "streams at once", metavar="C")
    add_value(parser, "--input-len", 128, "prompt tokens")
    add_value(parser, "--output-len", 256, "output tokens")
    add_value(parser, "--num-adapters", 8, "adapters, which take turns; 0: the base model", at_least(0))
    add_value(parser, "--lora-rank", 32, "rank of random adapters", metavar="R")
    add_value(parser, "--seconds", 15.0, "seconds per measurement", float, "S")
    add_value(parser, "--rounds", 3, "rounds")
    add_value(parser, "--processes", 4, "client processes")
    add_value(parser, "--output-json", Path("bench-http.json"), "file of the figures", Path, "FILE")


class Server(NamedTuple):
    """A running server: its engine's address, the URL of its gateway, and the gateway's process if known."""

    address: str
    url: str
    gateway: int | None = None


@contextmanager
def server(
    directory: Path, arguments: Sequence[str], engines: int = 1, environment: Mapping[str, str] = os.environ
) -> Iterator[Server]:
    """Run `sidestream serve`; its socket is in `directory`. Raises ValueError with its output if it does not start."""
    address, log = f"ipc://{directory}/engine.sock", directory / "log"
    command = [sys.executable, "-m", "sidestream.tools.cli", "serve", *arguments, "--bind", address, "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        until = time.monotonic() + START_SECONDS
        while (output := log.read_text()).count("serving at") < engines or "answering HTTP at" not in output:
            if process.poll() is not None or time.monotonic() > until:
                raise ValueError(f"the server did not start: {output[-2000:]}")
            time.sleep(0.2)
        url = next(line.split()[-1] for line in output.splitlines() if "answering HTTP at" in line)
        yield Server(address, url, gateway_of(process.pid))
    finally:
        process.terminate()
        process.wait()


def gateway_of(server: int) -> int | None:
    """Return the gateway's process among the children of a server."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process may have ended
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server and "gateway.server_process" in (process / "cmdline").read_text():
                return int(process.name)
    return None


def model_arguments(options: argparse.Namespace, directory: Path) -> list[str]:
    """Return the model's arguments; write random adapters, and a directory if only a shape is given."""
    from ..latency import model_fields
    from ..random_model import write_model, write_random_adapters

    config, model = model_fields(options)
    count = options.num_adapters
    sizes = ["--max-num-seqs", str(options.concurrency)]
    if options.model == "demo":
        return sizes
    if model is not None:
        adapters = write_random_adapters(directory / "adapters", config, options.lora_rank, count)
        arguments = [str(model)]
    else:
        adapters = write_model(directory / "shape", config, count, options.lora_rank)
        arguments = [str(directory / "shape"), "--load-format", "dummy"]
    if adapters:
        arguments += ["--max-loras", str(count), "--lora-modules"]
        arguments += [f"{name}={path}" for name, path in adapters.items()]
    return [*arguments, *sizes, "--max-model-len", str(options.input_len + options.output_len + 64)]


class Clients:
    """Processes that load a server together."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "sidestream.tools.bench.serving.closed_loop"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)
        ]
        for process in self._processes:
            self._line(process)

    def run(
        self, load: Load, counters: Callable[[], dict[str, float]]
    ) -> tuple[list[ClientFigures], list[dict[str, float]]]:
        """Return the figures of all processes and the counters at both ends. Raises ValueError for a failed request."""
        count = len(self._processes)
        for index, process in enumerate(self._processes):
            first, last = (load.all_streams * edge // count for edge in (index, index + 1))
            share = msgspec.structs.replace(load, streams=last - first, place=first)
            assert process.stdin is not None  # a pipe, as requested
            process.stdin.write(msgspec.json.encode(share) + b"\n")
            process.stdin.flush()
        counted = []
        for moment in (load.begin, load.end):
            time.sleep(max(0.0, moment - time.monotonic()))
            counted.append(counters())
        figures = [decode_figures(self._line(process)) for process in self._processes]
        problems = [problem for each in figures for problem in each.problems]
        if problems:
            raise ValueError(f"{len(problems)} streams failed at {load.url}; the first: {problems[0]}")
        return figures, counted

    def close(self) -> None:
        """Stop them."""
        for process in self._processes:
            process.terminate()
            process.communicate()

    @staticmethod
    def _line(process: "subprocess.Popen[bytes]") -> bytes:
        assert process.stdout is not None  # a pipe, as requested
        line = process.stdout.readline()
        if not line:
            raise ValueError("a client process ended; its output is above")
        return line


def measure(options: argparse.Namespace, target: Server, clients: Clients) -> dict[str, Any]:
    """Measure both in turn for each workload, and print the tables; the first round of each is a warm-up."""
    from ....runtime.client.client import Client

    result: dict[str, Any] = {}
    with Client(target.address, name="bench http") as client:
        names = [adapter.name for adapter in client.list_adapters()][: options.num_adapters]
        workloads: dict[str, list[str]] = {"base": []} | ({f"{len(names)} adapters": names} if names else {})
        print(HEAD)
        for workload, adapters in workloads.items():
            pairs = []
            for round_ in range(options.rounds + 1):
                seconds = options.seconds if round_ else min(WARM_UP_SECONDS, options.seconds)
                rows = [
                    once(options, client, clients, url, target.gateway, adapters, seconds)
                    for url in (target.address, target.url)
                ]
                if round_:
                    pairs.append((rows[0], rows[1]))
                    for arm, figures in zip(ARMS, rows, strict=True):
                        print(line(workload, arm, figures), flush=True)
            result[workload] = {"pairs": pairs, **summary(pairs)}
    for workload in workloads:
        print("\n".join(summary_lines(workload, result[workload])))
    return result


def once(
    options: argparse.Namespace,
    client: Any,
    clients: Clients,
    url: str,
    gateway: int | None,
    adapters: list[str],
    seconds: float,
) -> dict[str, float]:
    """Measure once: `seconds` count after the streams are mixed."""

    def counters() -> dict[str, float]:
        return client.stats() | ({} if gateway is None else {"gateway": cpu_seconds(gateway)})

    info = client.connect()
    begin = time.monotonic() + min(SETTLE_SECONDS, seconds)
    load = Load(
        url=url,
        streams=0,
        place=0,
        all_streams=options.concurrency,
        prompt_len=options.input_len,
        output_len=options.output_len,
        vocabulary=info.vocabulary,
        model=info.model,
        adapters=adapters,
        seed=time.monotonic_ns(),
        begin=begin,
        end=begin + seconds,
    )
    figures, (before, after) = clients.run(load, counters)
    used = None if gateway is None else after["gateway"] - before["gateway"]
    return row(figures, engine_figures(before, after), seconds, used)


def run(options: argparse.Namespace) -> int:
    """Start a server, unless one is given, measure, print the table and write the JSON."""
    check_output("--output-json", options.output_json)
    if (options.engine is None) != (options.http is None):
        raise ValueError("--engine and --http must be given together; give both, or none to start a server")
    cores = split_cores(options.processes)
    cores_text = "clients and server share all cores" if cores is None else f"clients on cores {cores.clients}"
    print(
        f"{options.concurrency} streams of {options.input_len} prompt and {options.output_len} output tokens, "
        f"{options.processes} client processes; {cores_text}"
    )
    with tempfile.TemporaryDirectory(prefix="ssb-") as name, ExitStack() as stack:
        with on_cores(None if cores is None else cores.clients):
            clients = Clients(options.processes)
        stack.callback(clients.close)
        if options.engine is not None:
            target = Server(options.engine, options.http.rstrip("/"))
        else:
            with on_cores(None if cores is None else cores.server):
                target = stack.enter_context(server(Path(name), model_arguments(options, Path(name))))
        result = measure(options, target, clients)
    content = {
        "options": {key: value for key, value in vars(options).items() if isinstance(value, (int, float))},
        "workloads": result,
    }
    print("times in ms; late plans and GPU idle as the engine counts; client: CPU share of the busiest process")
    write_figures(options.output_json, content)
    return 0


def row(
    seen: Sequence[ClientFigures], engine: Mapping[str, float], seconds: float, gateway: float | None
) -> dict[str, float]:
    """Return the figures of one measurement, times in milliseconds. `gateway`: its CPU seconds, None if unknown."""
    first = [1e3 * value for each in seen for value in each.first_tokens]
    gaps = [1e3 * value for each in seen for value in each.gaps]
    return {
        "tokens_per_s": sum(each.tokens for each in seen) / seconds,
        "requests": sum(each.requests for each in seen),
        "first_p50_ms": percentile(first, 0.5),
        "first_p99_ms": percentile(first, 0.99),
        "gap_p50_ms": percentile(gaps, 0.5),
        "gap_p99_ms": percentile(gaps, 0.99),
        "busiest_client_share": max(each.cpu_seconds for each in seen) / seconds,
        "gateway_share": math.nan if gateway is None else gateway / seconds,
        **{f"engine_{name}": value for name, value in engine.items()},
    }


def line(workload: str, arm: str, figures: Mapping[str, float]) -> str:
    """Return one measurement as a line under HEAD."""
    return (
        f"{workload:>10} {arm:>6} {figures['tokens_per_s']:>8.0f} {figures['first_p50_ms']:>9.2f} "
        f"{figures['first_p99_ms']:>7.2f} {figures['gap_p50_ms']:>7.2f} {figures['gap_p99_ms']:>7.2f} "
        f"{figures['engine_late_plans_share']:>10.2%} {figures['engine_gpu_idle_share']:>8.2%} "
        f"{figures['busiest_client_share']:>6.0%} {shown(1e2 * figures['gateway_share'], 0):>6}%"
    )


def summary(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, list[float]]:
    """Return HTTP relative to ZeroMQ for each pair: the share of tokens per second, and the delay of first tokens."""
    return {
        "tokens_per_s_share": [http["tokens_per_s"] / zeromq["tokens_per_s"] for zeromq, http in pairs],
        **{
            f"first_{name}_later_ms": [http[f"first_{name}_ms"] - zeromq[f"first_{name}_ms"] for zeromq, http in pairs]
            for name in ("p50", "p99")
        },
    }


def summary_lines(workload: str, compared: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the summary as lines: medians, and the range of the pairs."""
    shares = compared["tokens_per_s_share"]
    lines = [f"{workload}: HTTP has {median(shares):.2%} of ZeroMQ's tokens/s ({min(shares):.2%} to {max(shares):.2%})"]
    for name in ("p50", "p99"):
        later = compared[f"first_{name}_later_ms"]
        lines.append(f"  first token {name} {median(later):+.2f} ms ({min(later):+.2f} to {max(later):+.2f})")
    return lines


class Cores(NamedTuple):
    """Logical CPUs."""

    server: list[int]
    clients: list[int]


def siblings(cpu: int) -> str:
    """Return the logical CPUs of one core in Linux's notation, or the CPU itself if unknown."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def split_cores(clients: int) -> Cores | None:
    """Return a core for each client process and the rest for the server; None if that leaves too few.

    Hardware threads of one core go to the same side.
    """
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        by_core.setdefault(siblings(cpu), []).append(cpu)
    cores = list(by_core.values())
    if len(cores) < clients + SERVER_CORES:
        return None
    own, rest = cores[-clients:], cores[:-clients]
    return Cores([cpu for core in rest for cpu in core], [cpu for core in own for cpu in core])


@contextmanager
def on_cores(cpus: Sequence[int] | None) -> Iterator[None]:
    """Run processes that start in this context on these CPUs; None: without a restriction."""
    before = os.sched_getaffinity(0)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
