"""What launches on a GPU, recorded as one CUDA graph."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


def capture(device: torch.device, prepare: Callable[[], object], run: Callable[[], object], pool: Any = None) -> Any:
    """The CUDA graph of `run`, which launches on the current stream; `pool` shares its memory with other captures.

    `prepare` runs before on the same stream: it compiles and loads what `run` launches. Meanwhile other threads may
    wait for events and launch on streams of their own; what touches this stream must wait.
    """
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.stream(stream):
        prepare()
        torch.cuda.synchronize(device)
        # not torch.cuda.graph: that collects garbage and empties the allocator's cache before each capture
        # thread_local: by default CUDA refuses another thread's wait for a step's event, and ends the capture
        graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


@lru_cache(maxsize=16)
def capture_stream(device: torch.device) -> Any:
    """One stream for all captures: what libraries allocate for a stream is allocated once."""
    return torch.cuda.Stream(device)
