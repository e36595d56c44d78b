"""Times of launches on a GPU, measured with CUDA events."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any


def elapsed_us(run: Callable[[], Any], count: int = 1) -> float:
    """Return microseconds per call of `run`, over `count` calls."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / count


def captured(launches: Sequence[Callable[[], Any]], rounds: int) -> Any:
    """Return a CUDA graph of `rounds` times all launches, which must be compiled already."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return graph


def launch_us(launches: Sequence[Callable[[], Any]], rounds: int, repeats: int) -> float:
    """Return microseconds per launch of such a graph: the median of `repeats` replays after two warm-up replays."""
    graph = captured(launches, rounds)
    times = [elapsed_us(graph.replay) for _ in range(repeats + 2)]
    return statistics.median(times[2:]) / (rounds * len(launches))
