"""Ranks whose kernels run in Triton's interpreter at the same time: processes of this one, with memory in common.

    exchanges = shared_exchanges(2)
    out = shared_tensor((3, 64), torch.bfloat16)              # for each rank, before the processes begin
    run_ranks(exchanges, lambda group: all_reduce.launch(x[group.rank], group.name, out=(out[group.rank],)))

Each rank runs the programs of a launch one after the other, like a GPU that has room for one: a program that waited for
a later one of its own rank, or of another that can't begin yet, would hang here.
"""

import mmap
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from math import prod

import torch
from sidestream.ops.collectives.exchange import PURPOSE, Exchange, exchange_bytes
from sidestream.ops.collectives.tensor_parallel_group import RankGroup, register_group, tensor_parallel_group

from support.checks import poison

LIMIT = 300.0  # seconds after which a launch counts as hung


def shared_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Poisoned memory that later processes have in common with this one, at the same address."""
    size = prod(shape) * dtype.itemsize
    memory = torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]
    return poison(memory.view(dtype).view(*shape))


def shared_exchanges(world: int, slot_bytes: int = 1 << 16) -> list[Exchange]:
    """Each rank's view of the ranks' memory; counters are zero and slots full of NaN."""
    memories = tuple(shared_tensor((exchange_bytes(world, slot_bytes),), torch.uint8) for _ in range(world))
    for memory in memories:
        memory[: -5 * slot_bytes] = 0
    return [Exchange(rank, memories, slot_bytes) for rank in range(world)]


def register_rank(exchange: Exchange) -> RankGroup:
    """From now on ops of this process belong to the exchange's rank."""
    group = RankGroup(tensor_parallel_group(exchange.world), exchange.rank, exchange.world)
    group.buffers[PURPOSE] = exchange
    register_group(group)
    return group


def run_ranks(exchanges: Sequence[Exchange], work: Callable[[RankGroup], None]) -> None:
    """Call `work(group)` as each rank, in a process of its own, all at once. Fails if one fails or hangs."""
    children = [_fork(exchange, work) for exchange in exchanges]
    end, statuses = time.monotonic() + LIMIT, {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    statuses[child] = status
        if time.monotonic() > end or any(statuses.values()):
            for child in set(children) - set(statuses):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            break
        time.sleep(0.005)
    assert list(statuses.values()) == [0] * len(children), f"ranks failed, or hung for {LIMIT} s: {statuses}"


def _fork(exchange: Exchange, work: Callable[[RankGroup], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:  # nothing of the parent runs here: no exit handler, no test
        work(register_rank(exchange))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
