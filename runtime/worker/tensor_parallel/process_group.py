"""Join torch.distributed's process group and register it under the name that ops use."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed

from ....compiler.options import OptionError
from ....ops.collectives.exchange import free_exchange, open_exchange
from ....ops.collectives.tensor_parallel_group import RankGroup, forget_group, register_group, tensor_parallel_group

TIMEOUT_SECONDS = 120.0
POLL_SECONDS = 0.01
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"}  # all ranks are on one host: do not listen on a network


def create_store_file() -> int:
    """Return the descriptor of an anonymous file for `join_group`, which all ranks inherit. Never close it: torch's
    store writes to it when its last reference is dropped, and must not write to another file of that number.
    """
    return os.memfd_create("sidestream-meeting")


def join_group(
    tp_rank: int, tp_size: int, store_fd: int, device: torch.device, check: Callable[[], None] | None = None
) -> RankGroup:
    """Wait for the other ranks at the file of `create_store_file`, and register the group. `check` is polled until all
    have arrived and may raise: torch would wait for processes that have died.

    Raises OptionError if this process is in a group already, RuntimeError if the others do not arrive, and GroupError
    if GPUs can't share memory.
    """
    if distributed.is_initialized():
        raise OptionError(
            "this process has a process group of torch.distributed already (another LLM with tensor_parallel_size?); "
            "close that one first, or use another process"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    store = distributed.FileStore(f"/proc/self/fd/{store_fd}", tp_size)
    store.set(_arrived(tp_rank), "")
    while check is not None and not all(store.check([_arrived(each)]) for each in range(tp_size)):
        check()
        time.sleep(POLL_SECONDS)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo",  # tensors of GPUs go through the memory of `open_exchange`
        store=store,
        rank=tp_rank,
        world_size=tp_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    group = RankGroup(tensor_parallel_group(tp_size), tp_rank, tp_size, distributed.group.WORLD)
    register_group(group)
    if on_gpu:
        try:
            open_exchange(group, device)
        except BaseException:
            leave_group(group)
            raise
    return group


def _arrived(tp_rank: int) -> str:
    return f"rank {tp_rank} has arrived"


def leave_group(group: RankGroup) -> None:
    """Destroy the group and free its memory, which no other rank has mapped any more; the process may join another
    group.
    """
    forget_group(group.name)
    free_exchange(group)
    if distributed.is_initialized():
        distributed.destroy_process_group()
