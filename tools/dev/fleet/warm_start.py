"""`python -m sidestream.tools.dev.fleet.warm_start`: start times of a fleet's engine with cold and warm caches.

Each round starts with an empty cache. The first engine starts, then a second one next to it, on the next GPU if there
is one; both stop, and the first one starts again. An engine starts as in a replica of the fleet, without the seconds
that Ray needs for the replica.
"""

import argparse
import asyncio
import contextlib
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from statistics import median

from msgspec import structs

from ....runtime.fleet.engine import EngineProcess
from ....runtime.fleet.options import FleetOptions, read_options, serve_settings
from ....runtime.server.settings import ServeSettings
from .places import own_places

STARTS = ("first, cold", "second next to it, warm", "first again, warm")


async def start(settings: ServeSettings, number: int) -> tuple[EngineProcess, float]:
    """Return engine `number`, and the seconds until it served. Raises RuntimeError if it ended."""
    if settings.llm.get("device") != "cpu":
        ranks = int(settings.llm.get("tensor_parallel_size") or 1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(number * ranks + each) for each in range(ranks))
    started = time.monotonic()
    process = EngineProcess(settings, lambda line: None)
    try:
        await process.address()
    except RuntimeError:
        await process.drain(0.0)
        raise
    return process, time.monotonic() - started


async def measure(settings: ServeSettings, folder: Path) -> list[float]:
    """Return seconds of each of `STARTS`. Raises RuntimeError."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    took = []
    async with contextlib.AsyncExitStack() as running:
        for number in (0, 1):
            process, seconds = await start(structs.replace(settings, bind=f"ipc://{folder}/{number}.sock"), number)
            running.push_async_callback(process.drain, settings.drain_seconds)
            took.append(seconds)
    process, seconds = await start(structs.replace(settings, bind=f"ipc://{folder}/0.sock"), 0)
    await process.drain(settings.drain_seconds)
    return [*took, seconds]


def main(arguments: list[str] | None = None) -> int:
    """Return 0."""
    parser = argparse.ArgumentParser(prog="python -m sidestream.tools.dev.fleet.warm_start", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a fleet's TOML file (default: the demo)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    fleet = FleetOptions() if options.file is None else read_options(options.file)
    settings = structs.replace(serve_settings(fleet), keys=None)
    machine = platform.processor() or platform.machine()
    print(
        f"{settings.served_model_name}, {settings.llm}; {os.cpu_count()} threads of {machine}, Python "
        f"{platform.python_version()}",
        flush=True,
    )
    rounds = []
    with own_places() as folder:
        for number in range(options.rounds):
            rounds.append(asyncio.run(measure(settings, folder)))
            found = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in zip(STARTS, rounds[-1], strict=True))
            print(f"round {number + 1}: {found}", flush=True)
    for name, each in zip(STARTS, zip(*rounds, strict=True), strict=True):
        print(f"{name:24} median {median(each):6.1f} s, {min(each):.1f} to {max(each):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
