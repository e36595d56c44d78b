"""Run arms in turn in this process, or several at once in processes of their own that share the GPUs."""

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import cycle
from multiprocessing import get_context
from typing import Any

import torch

_RUN: list[Callable[[str], Any]] = []
"""What a worker process runs."""


def run_arms(
    names: Sequence[str],
    start: Callable[..., Callable[[str], Any]],
    arguments: tuple[Any, ...],
    device: str | None,
    jobs: int = 1,
) -> Iterator[tuple[str, Any]]:
    """Yield (name, result) of each arm as it ends; the result of an arm that fails is its error as a string.

    start      called once per process with `arguments`, returns the function that runs an arm by its name
    jobs       arms at once
    """
    if min(jobs, len(names)) > 1:
        yield from _at_once(names, start, arguments, device, min(jobs, len(names)))
        return
    run = start(*arguments)
    for name in names:
        yield name, _attempt(run, name)


def _at_once(
    names: Sequence[str], start: Callable[..., Any], arguments: tuple[Any, ...], device: str | None, jobs: int
) -> Iterator[tuple[str, Any]]:
    """Run arms on threads with one process each. A process that dies fails only its own arm, and is replaced."""
    own, pools = threading.local(), list[ProcessPoolExecutor]()
    threads = max((os.cpu_count() or 1) // jobs, 1)
    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), 0 if device == "cpu" else torch.cuda.device_count())

    def submit(name: str) -> Any:
        if getattr(own, "pool", None) is None:
            own.gpu = getattr(own, "gpu", None) or next(gpus)
            own.pool = ProcessPoolExecutor(1, get_context("spawn"), _start, (start, arguments, threads, own.gpu))
            pools.append(own.pool)
        try:
            return own.pool.submit(_run, name).result()
        except BrokenProcessPool as problem:
            own.pool = None
            return f"its process ended: {problem}"

    try:
        with ThreadPoolExecutor(jobs) as runners:
            running = {runners.submit(submit, name): name for name in names}
            for future in as_completed(running):
                yield running[future], future.result()
    finally:
        for pool in pools:
            pool.shutdown()


def visible_gpus(chosen: str | None, count: int) -> Iterator[str]:
    """Yield values of CUDA_VISIBLE_DEVICES for one process after the other: each of the `count` GPUs in turn.

    `chosen` is the variable's present value; its names of GPUs are used.
    """
    names = chosen.split(",")[:count] if chosen else [str(index) for index in range(count)]
    return cycle(names or [chosen or ""])


def _start(start: Callable[..., Any], arguments: tuple[Any, ...], threads: int, gpu: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is initialized
    torch.set_num_threads(threads)
    _RUN.append(start(*arguments))


def _run(name: str) -> Any:
    return _attempt(_RUN[0], name)


def _attempt(run: Callable[[str], Any], name: str) -> Any:
    try:
        with torch.no_grad():
            return run(name)
    except Exception as problem:  # whatever it is, the other arms run
        return f"{type(problem).__name__}: {' '.join(str(problem).split())[:400]}"
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
