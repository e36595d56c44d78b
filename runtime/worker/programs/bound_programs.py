"""Keep the bound programs of buckets: build missing ones in the background, measure and estimate their times."""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from threading import Event, Lock
from typing import Generic, TypeVar

import torch

from ....compiler.cost.bytes_and_flops import Assumptions
from ....compiler.cost.estimate import estimate, total_seconds
from ....compiler.cost.hardware import Gpu
from ....compiler.program.program import Bucket, Program
from ...adapters.background_jobs import BackgroundJobs

REPLAYS = 5
T = TypeVar("T")


class BoundPrograms(Generic[T]):
    """Bound programs by bucket. Each call passes the function `make` that builds one: stored here, it would keep the
    owner of these programs alive. The caller waits for it, or after `build_in_background` a thread builds.
    """

    def __init__(self) -> None:
        self._programs: dict[Bucket, T] = {}
        self._requested: set[Bucket] = set()
        self._jobs: BackgroundJobs | None = None
        self._building = Lock()

    def get(self, bucket: Bucket, make: Callable[[Bucket], T]) -> T:
        """Return the bucket's program, or a larger one while a thread builds it."""
        program = self._programs.get(bucket)
        if program is not None:
            return program
        if self._jobs is not None:
            larger = [other for other in list(self._programs) if _can_run(other, bucket)]
            if larger:
                self._request(self._jobs, bucket, make)
                return self._programs[
                    min(larger, key=lambda other: (other.tokens, other.sequences, other.lora, other.parts))
                ]
        return self._build(bucket, make)

    def build_in_background(self, first: Iterable[Bucket], make: Callable[[Bucket], T]) -> None:
        """Build `first` now, which must be able to run every step, and later ones on a thread."""
        for bucket in first:
            self.get(bucket, make)
        self._jobs = BackgroundJobs("programs", idle_seconds=0.0)

    def _build(self, bucket: Bucket, make: Callable[[Bucket], T]) -> T:
        with self._building:  # torch's tracer is not thread-safe
            if bucket not in self._programs:
                self._programs[bucket] = make(bucket)
            return self._programs[bucket]

    def _request(self, jobs: BackgroundJobs, bucket: Bucket, make: Callable[[Bucket], T]) -> None:
        if bucket in self._requested:
            return  # also after a failure: the larger program continues to serve it
        self._requested.add(bucket)

        def build(_stopped: Event) -> None:
            self._build(bucket, make)

        jobs.submit(build)


def _can_run(program: Bucket, wanted: Bucket) -> bool:
    """Return whether a program can run another bucket's steps, padded. `rows` matters to GPU kernels only."""
    return (
        program.decode == wanted.decode
        and program.verifies == wanted.verifies
        and program.tokens >= wanted.tokens
        and program.sequences >= wanted.sequences
        and program.lora >= wanted.lora
        and program.parts >= wanted.parts
        and program.cascade <= wanted.cascade
    )


def measure_programs(
    programs: Iterable[tuple[Bucket, Callable[[], object]]], device: torch.device
) -> tuple[tuple[int, int, float], ...]:
    """Return (sequences, rows per sequence, seconds) of each (bucket, function that runs its program once): the fastest
    of REPLAYS runs after an untimed one. Concurrent work of the device, such as copies of adapters, slows runs down.
    """
    return tuple((bucket.sequences, bucket.rows, _fastest_run(run, device)) for bucket, run in programs)


def estimate_longest_step(largest: Program, max_model_len: int, gpu: Gpu | None) -> float:
    """Return the estimated seconds of the largest program at full length; 0.0 without `gpu` (on a CPU)."""
    return 0.0 if gpu is None else total_seconds(estimate(largest, Assumptions(context=max_model_len), gpu))


def _fastest_run(run: Callable[[], object], device: torch.device) -> float:
    run()
    if device.type != "cuda":
        return min(_seconds(run) for _ in range(REPLAYS))
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        return min(begin.elapsed_time(end) for begin, end in pairwise(events)) / 1e3


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
