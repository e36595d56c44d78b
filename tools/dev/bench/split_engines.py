"""Time the gaps between tokens while long prompts arrive: a prefill and a decode engine, and two engines that do both.

    python -m sidestream.tools.dev.bench.split_engines --shape llama-3.1-8b

Each server runs on two GPUs, one after the other. `--streams` streams decode over HTTP, first alone and then while
prompts of `--prompt-len` tokens arrive. Their rate is `--load` of what one prefill engine computes per second, for both
servers.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....runtime.client.client import Client
from ...bench.random_model import write_model
from ...bench.serving.closed_loop import Http, Load
from ...bench.serving.http import Clients, Server, row, server
from ...bench.serving.report import percentile
from ...bench.serving.traffic import poisson_times, random_ids
from ...options.engine import positive
from ...options.models import shape_fields

SERVERS = {
    "prefill + decode": ["--prefill-engines", "1", "--decode-engines", "1"],
    "two mixed": ["--data-parallel-size", "2"],
}
PROBES = 24
"""Prompts that are sent at once to measure the rate of one prefill engine."""
ANSWER_TOKENS = 8
COUNTERS = ("host_pages_loaded_total", "page_loads_refused_total")
"""Of the second engine: pages of the prefill engine that it has read, and loads that it has not used."""


@contextmanager
def served(model: Path, flags: Sequence[str], options: argparse.Namespace, directory: Path) -> Iterator[Server]:
    """Start a server of two engines, and return it with the address of the second one."""
    arguments = [str(model), "--load-format", "dummy", *flags, "--device", options.device]
    arguments += ["--max-num-seqs", str(2 * options.streams), "--max-model-len", str(options.prompt_len + 1024)]
    with server(directory, arguments, engines=2) as both:
        time.sleep(1.0)  # until the gateway has asked both engines
        yield both._replace(address=f"ipc://{directory}/engine-1.sock")


async def first_tokens(load: Load, times: Sequence[float]) -> list[float]:
    """Send a random prompt at each time after now; return the seconds to their first tokens."""
    source, begin = random.Random(load.seed), time.monotonic()

    async def send(at: float) -> float:
        prompt = random_ids(source, load.prompt_len, load.vocabulary)
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        connection = await Http.connect(load.url)
        answer = await connection.ask(load, prompt, None, load.output_len)
        connection.writer.close()
        return answer.times[0] - answer.sent

    return await asyncio.gather(*map(send, times))


def measure(
    options: argparse.Namespace, target: Server, clients: Clients, rate: float | None
) -> tuple[dict[str, Any], float]:
    """Return the figures of a server without prompts and with them, and the rate of prompts per second."""
    with Client(target.address, name="bench") as client:
        info = client.connect()
    fixed: dict[str, Any] = {"streams": 0, "place": 0, "adapters": []}
    fixed |= {"vocabulary": info.vocabulary, "model": info.model}
    sizes = {"all_streams": 0, "prompt_len": options.prompt_len, "output_len": ANSWER_TOKENS}
    prompts = Load(url=target.url, seed=1, begin=0, end=0, **sizes, **fixed)
    for seed in (2, 3):  # the first ones compile and capture
        prompts.seed, begin = seed, time.monotonic()
        asyncio.run(first_tokens(prompts, [0.0] * PROBES))
        probed = PROBES / (time.monotonic() - begin)
    rate = options.load * probed if rate is None else rate
    found: dict[str, Any] = {}
    for name, arrivals in (("warm-up", 0.0), ("without", 0.0), ("with", rate)):
        seconds = options.seconds if name != "warm-up" else min(3.0, options.seconds)
        begin = time.monotonic() + 2.0
        sizes = {"all_streams": options.streams, "prompt_len": 64, "output_len": options.output_len}
        load = Load(url=target.url, seed=time.monotonic_ns(), begin=begin, end=begin + seconds, **sizes, **fixed)
        times = poisson_times(random.Random(5), arrivals, seconds + 2.0, 100_000) if arrivals else []
        prompts.seed = load.seed
        with ThreadPoolExecutor(1) as sender:
            firsts = sender.submit(asyncio.run, first_tokens(prompts, times))
            figures, _ = clients.run(load, dict)
        waits = [1e3 * value for value in firsts.result()]
        found[name] = row(figures, {}, seconds, None)
        found[name] |= {f"prompt_p{q}_ms": percentile(waits, q / 100) if waits else 0.0 for q in (50, 99)}
    with Client(target.address, name="bench") as client:
        found["with"] |= {key: client.stats()[key] for key in COUNTERS}
    return found, rate


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="name of a model's shape, or its config.json")
    parser.add_argument("--streams", type=positive, default=64, metavar="N")
    parser.add_argument("--prompt-len", type=positive, default=2048, metavar="N")
    parser.add_argument("--output-len", type=positive, default=512, metavar="N")
    parser.add_argument("--load", type=float, default=0.7, metavar="X")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S")
    parser.add_argument("--processes", type=positive, default=4, metavar="N", help="client processes")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    rate: float | None = None
    with tempfile.TemporaryDirectory(prefix="ssb-") as name:
        model = Path(name, "shape")
        write_model(model, shape_fields(options.shape), 0, 8)
        clients = Clients(options.processes)
        try:
            for kind, flags in SERVERS.items():
                with served(model, flags, options, Path(name)) as target:
                    found, rate = measure(options, target, clients, rate)
                for prompts in ("without", "with"):
                    shown = {key: round(value, 2) for key, value in found[prompts].items()}
                    print(f"{kind}, {prompts} {rate:.1f} prompts/s: {shown}", flush=True)
        finally:
            clients.close()


if __name__ == "__main__":
    main()
