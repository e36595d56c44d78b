"""Several processes that form a tensor-parallel group, for tests of what ranks do together."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import sidestream.compiler.api
import torch
from sidestream.ops.collectives.tensor_parallel_group import RankGroup, register_group, tensor_parallel_group
from torch import distributed
from torch.multiprocessing import start_processes

from .captured import capture_once

SECONDS = 300
PRELOAD = [  # imported once, not by each rank; torch imports its own when a graph is captured
    *("support.compiled", "support.tiny", "support.ranks"),
    *("torch._dynamo", "torch.export._trace", "torch._functorch.aot_autograd"),
]


def run_on_ranks(world: int, work: Callable[..., Any], directory: Path, *args: Any, on_gpus: bool = False) -> list[Any]:
    """What `work(group, *args)` returns on each of `world` ranks, in rank order; `directory` is for this call alone.
    `on_gpus`: each rank has its GPU. Fails with the first rank that fails.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    start_processes(_rank, (world, work, str(directory), args, on_gpus), nprocs=world, start_method="forkserver")
    return [torch.load(directory / f"result{rank}.pt", weights_only=True) for rank in range(world)]


def _rank(
    rank: int, world: int, work: Callable[..., Any], directory: str, args: tuple[Any, ...], on_gpus: bool
) -> None:
    torch.set_num_threads(1)
    sidestream.compiler.api.capture_module = capture_once
    if on_gpus:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
    )
    group = RankGroup(tensor_parallel_group(world), rank, world, distributed.group.WORLD)
    register_group(group)
    torch.save(work(group, *args), Path(directory) / f"result{rank}.pt")
    distributed.destroy_process_group()
