"""What programs take: measured at a start, so that a scheduler knows what a step with drafts costs, and estimated, so
that a server knows which step does not end.
"""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch

from ...compiler.cost.cost import Assumptions, estimate, total_seconds
from ...compiler.cost.hardware import Gpu
from ...compiler.program.program import Bucket, Program

REPLAYS = 5


def time_programs(
    programs: Iterable[tuple[Bucket, Callable[[], object]]], device: torch.device
) -> tuple[tuple[int, int, float], ...]:
    """(sequences, rows a sequence, seconds) of each program, given with what runs it once: the fastest of REPLAYS runs
    after one that is not timed. What else the device does meanwhile, such as copies of adapters, makes runs slower.
    """
    return tuple((bucket.sequences, bucket.rows, _fastest_run(run, device)) for bucket, run in programs)


def longest_step(largest: Program, max_model_len: int, gpu: Gpu | None) -> float:
    """Seconds that the cost model gives an engine's longest step: its largest program, with every sequence at its full
    length and every adapter in use. Steps of other programs have fewer rows.

    `gpu`: its figures; None for a CPU, of which the cost model has none: 0.0.
    """
    return 0.0 if gpu is None else total_seconds(estimate(largest, Assumptions(context=max_model_len), gpu))


def _fastest_run(run: Callable[[], object], device: torch.device) -> float:
    run()
    if device.type != "cuda":
        return min(_seconds(run) for _ in range(REPLAYS))
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        marks[-1].synchronize()
        return min(begin.elapsed_time(end) for begin, end in pairwise(marks)) / 1e3


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
