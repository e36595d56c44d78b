"""How a process becomes a rank: torch.distributed's process group, registered under the name that ops use."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed

from ....compiler.options import OptionError
from ....ops.collectives.exchange import open_exchange
from ....ops.collectives.group import RankGroup, forget_group, register_group, tensor_parallel_group

MEETING_SECONDS = 120.0
POLL_SECONDS = 0.01
SHARED_MACHINE = {
    "GLOO_SOCKET_IFNAME": "lo",  # ranks are processes of one host: nothing listens on a network
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast is the whole machine's
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def create_meeting() -> int:
    """The descriptor of a file through which ranks find each other; those that inherit it give it to `join_group`. It
    has no name: it is gone with the last process that holds it, however that ends. Nobody closes it: torch's store
    writes to it once more when its last reference goes, and must not find another file in its place.
    """
    return os.memfd_create("sidestream-meeting")


def join_group(
    rank: int, world: int, meeting: int, device: torch.device, check: Callable[[], None] | None = None
) -> RankGroup:
    """Wait for the other ranks at the file of `create_meeting`, and register the group of all. `check`, on the rank
    that knows the others' processes, is called until all have come, and may raise: torch would wait for the dead.

    Raises OptionError in a process that is in a group already, RuntimeError when the others do not come, and GroupError
    where GPUs can't share memory.
    """
    if distributed.is_initialized():
        raise OptionError(
            "this process has a process group of torch.distributed already (another LLM with tensor_parallel_size?); "
            "close that one first, or use another process"
        )
    for name, value in SHARED_MACHINE.items():
        os.environ.setdefault(name, value)
    store = distributed.FileStore(f"/proc/self/fd/{meeting}", world)
    store.set(_here(rank), "")
    while check is not None and not all(store.check([_here(each)]) for each in range(world)):
        check()
        time.sleep(POLL_SECONDS)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=MEETING_SECONDS),
    )
    group = RankGroup(tensor_parallel_group(world), rank, world, distributed.group.WORLD)
    register_group(group)
    if on_gpu:
        try:
            open_exchange(group, device)
        except BaseException:
            leave_group(group)
            raise
    return group


def _here(rank: int) -> str:
    return f"rank {rank} is here"


def leave_group(group: RankGroup) -> None:
    """Forget the group; the process may join another."""
    forget_group(group.name)
    if distributed.is_initialized():
        distributed.destroy_process_group()
