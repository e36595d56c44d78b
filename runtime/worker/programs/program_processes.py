"""Processes that build programs and compile kernels for a start, while this process loads weights.

They are forked after the passes have run, so each has the optimized graph, and save programs and kernels in their
caches. They do not use the GPU. What is not built in time, or whose process has died, is built here.
"""

import ctypes
import logging
import os
import selectors
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from ....compiler.program.program import Bucket
from .kernel_queue import KernelQueue

MOST_PROCESSES = 16
LEAST_PROGRAMS = 8
"""Fewer programs per process are not worth a fork."""
STALL_SECONDS = 60.0
"""A process that builds no program and compiles no kernel for so long is killed."""
PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


_BUILT, _COMPILED, _EMPTY = b"b", b"k", b"e"  # a process reports: program built, kernel compiled, queue empty


@dataclass
class _Process:
    """A forked process: the buckets of its programs, how many are built, and how many queues of kernels are empty."""

    pid: int
    progress: int
    buckets: Sequence[Bucket]
    built: int = 0
    empty_queues: int = 0


class ProgramProcesses:
    """Context in which processes call `build` for each of `buckets`; it ends when all are built.

    with ProgramProcesses(buckets, compiled.keep, number_of_processes(len(buckets)), queues) as processes:
        processes.wait(bucket)  # before its program is read from the cache
        processes.wait_for_kernels(1)

    They compile the kernels of `queues`, one queue after the other. The queues have the first of `buckets`; programs of
    the others are built at the end.
    """

    def __init__(
        self, buckets: Sequence[Bucket], build: Callable[[Bucket], Any], count: int, queues: Sequence[KernelQueue] = ()
    ) -> None:
        """Fork `count` processes; none if it is 0."""
        self._processes: list[_Process] = []
        self.num_queues = len(queues)
        for place in range(count):
            share = [replace(bucket, pages=1) for bucket in buckets[place::count]]  # as the cache stores programs
            ours, theirs = os.pipe()
            with warnings.catch_warnings():
                # Python warns of locks that other threads hold; the child runs the compiler only, which takes none
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _build_all(share, build, theirs, queues)
            os.close(theirs)
            self._processes.append(_Process(pid, ours, share))
        for queue in queues:
            queue.close()

    def wait(self, bucket: Bucket) -> None:
        """Wait until a bucket's program is built for any number of pages, or its process has ended."""
        bucket = replace(bucket, pages=1)
        for process in list(self._processes):
            if bucket in process.buckets:
                while process.buckets.index(bucket) >= process.built and self._receive(process):
                    pass

    def wait_for_kernels(self, queues: int) -> None:
        """Wait until the kernels of the first `queues` queues are compiled, or the processes have ended."""
        for process in list(self._processes):
            while process.empty_queues < queues and self._receive(process):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in list(self._processes):
            if error is not None:
                os.kill(process.pid, signal.SIGKILL)
            while self._receive(process):
                pass

    def _receive(self, process: _Process) -> bool:
        """Wait for a process's next report. Return False at its end, and forget it."""
        with selectors.DefaultSelector() as selector:
            selector.register(process.progress, selectors.EVENT_READ)
            if not selector.select(STALL_SECONDS):
                os.kill(process.pid, signal.SIGKILL)
        received = os.read(process.progress, 4096)
        process.built += received.count(_BUILT)
        process.empty_queues += received.count(_EMPTY)
        if not received:
            self._processes.remove(process)
            os.close(process.progress)
            _, status = os.waitpid(process.pid, 0)
            if process.built < len(process.buckets):
                _log.debug("a process that builds programs ended with status %d after %d", status, process.built)
        return bool(received)


def number_of_processes(programs: int, ranks: int = 1) -> int:
    """Return the number of processes for so many programs of one rank, when so many ranks of a host start together."""
    if not sys.platform.startswith("linux"):
        return 0
    cores = len(os.sched_getaffinity(0)) // ranks - 1  # one loads the model
    count = min(MOST_PROCESSES, cores, programs // LEAST_PROGRAMS)
    return count if count > 1 else 0


def _build_all(
    buckets: Sequence[Bucket], build: Callable[[Bucket], Any], progress: int, queues: Sequence[KernelQueue]
) -> None:
    """Build the programs in a forked process, compile kernels, and end it."""
    code = 1
    report = partial(os.write, progress)
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)  # the threads of this process's parent are not there
        queued = [(queue, bucket) for queue in queues for bucket in buckets if bucket in queue.buckets]
        for queue, bucket in queued:
            program = build(bucket)
            report(_BUILT)
            queue.add(bucket, program)
        for queue in queues:
            queue.close_input()
        for queue in queues:
            queue.compile_all(partial(report, _COMPILED))
            report(_EMPTY)
        for bucket in buckets[len(queued) :]:
            build(bucket)
            report(_BUILT)
        code = 0
    finally:
        os._exit(code)
