"""Time updates of an adapter from a trainer's process, and their effect on other streams.

    sidestream serve m8b --load-format dummy --max-loras 4 --max-lora-rank 32 --allow-adapter-loading \\
        --bind ipc:///dev/shm/updates/engine.sock
    python -m sidestream.tools.dev.bench.adapter_updates ipc:///dev/shm/updates/engine.sock --devices cpu cuda

first_traffic.py's page says how to write a model directory without weights. An update has all linears of `--shape` at
rank 32 in bf16: 168 MB for Llama-3.1-8B. The trainer has the tensors on each of `--devices` in turn.

Three windows per device, while `--streams` others decode: nothing else; `--updates` updates, one after the other, each
timed until the first token of its version; and one update per second for `--seconds`. A gap is the time between two
chunks of one stream; gaps of a window are its longest.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from ....runtime.api.sampling_params import SamplingParams
from ....runtime.client.async_client import AsyncClient
from ....runtime.client.client import Client
from ...bench.random_model import write_random_adapter
from ...bench.serving.cold import Background
from ...bench.serving.report import longest_gap
from ...bench.serving.traffic import random_ids
from ...options.engine import positive
from ...options.models import shape_fields

NAME = "updates-bench"
RANK = 32
PROMPT_TOKENS = 128
SETTLE_SECONDS = 0.5
CONNECT_SECONDS = 600.0
T = TypeVar("T")


def train(orders: Connection, options: argparse.Namespace, device: str, directory: str) -> None:
    """Run the trainer's process: for each order (updates, seconds between their starts) reply with their times."""
    from safetensors.torch import load_file

    tensors = load_file(Path(directory, "adapter_model.safetensors"), device=device)
    config = json.loads(Path(directory, "adapter_config.json").read_text())
    first_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    source = random.Random(1)
    with Client(options.address, name="trainer") as client:
        vocabulary = client.connect().vocabulary
        orders.send(sum(tensor.nbytes for tensor in tensors.values()))
        while True:
            updates, interval = orders.recv()
            times, begin = [], time.monotonic()
            for update in range(updates):
                time.sleep(max(0.0, begin + update * interval - time.monotonic()))
                for tensor in tensors.values():
                    tensor[0] += 0.001  # no version has the content of another
                prompt = random_ids(source, PROMPT_TOKENS, vocabulary)
                tensor.sum().item()  # waits for a GPU
                start = time.monotonic()
                client.update_adapter(NAME, tensors, config)
                updated = time.monotonic()
                client.generate(prompt, first_token, NAME)
                times.append((updated - start, time.monotonic() - start))
            orders.send(times)


async def watched(background: Background, work: Awaitable[T]) -> tuple[T, float, float]:
    """Return the result of `work`, and chunks per second and longest gap (ms) of the others meanwhile."""
    await asyncio.sleep(SETTLE_SECONDS)
    await background.check()
    background.forget()
    start = time.monotonic()
    result = await work
    end = time.monotonic()
    chunks = sum(start < moment <= end for times in background.arrivals for moment in times)
    return result, chunks / (end - start), 1e3 * longest_gap(background.arrivals, start, end)


async def measure(options: argparse.Namespace, device: str, directory: str) -> str:
    """Return the figures of one device."""
    client = AsyncClient(options.address, connect_timeout=CONNECT_SECONDS, name="updates")
    server = await client.connect()
    background = Background(client, server.vocabulary, min(server.max_model_len - PROMPT_TOKENS, 4096))
    orders, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    trainer = context.Process(target=train, args=(theirs, options, device, directory), daemon=True)
    trainer.start()
    theirs.close()  # so that the end of the trainer is an EOFError here
    try:
        nbytes = await asyncio.to_thread(orders.recv)

        async def updated(count: int, interval: float) -> list[tuple[float, float]]:
            orders.send((count, interval))
            times: list[tuple[float, float]] = await asyncio.to_thread(orders.recv)
            return times

        await background.start(options.streams, 0)
        await updated(2, 0.0)  # the first ones allocate memory
        _, rate_alone, gap_alone = await watched(background, asyncio.sleep(options.seconds))
        times, _, gap = await watched(background, updated(options.updates, 0.0))
        _, rate, _ = await watched(background, updated(options.seconds, 1.0))
    finally:
        await background.stop()
        await client.close()
        trainer.terminate()
        trainer.join()
    updates, first_tokens = ([1e3 * each for each in column] for column in zip(*times, strict=True))
    return (
        f"{options.updates} updates of {nbytes / 1e6:.0f} MB: {statistics.median(updates):.1f} ms, to the first token "
        f"{statistics.median(first_tokens):.1f} (longest {max(first_tokens):.1f}); longest gap of {options.streams} "
        f"others {gap:.1f} ms, without updates {gap_alone:.1f}; with an update per second {rate / rate_alone:.1%} of "
        "their chunks"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="where the server is bound, such as ipc:///dev/shm/updates/engine.sock")
    parser.add_argument("--shape", default="llama-3.1-8b", help="the served model's shape, or its config.json")
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"], help="of the trainer's tensors, in turn")
    parser.add_argument("--updates", type=positive, default=50, metavar="N")
    parser.add_argument("--seconds", type=positive, default=20, metavar="S", help="of the other two windows")
    parser.add_argument("--streams", type=positive, default=32, metavar="N")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sidestream-updates-") as directory:
        adapter = write_random_adapter(Path(directory, NAME), shape_fields(options.shape), RANK, 0)
        for device in options.devices:
            print(f"{device}: {asyncio.run(measure(options, device, adapter))}", flush=True)


if __name__ == "__main__":
    main()
