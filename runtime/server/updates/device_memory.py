"""Copy updates out of the memory of a trainer's GPU."""

import mmap
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....ops.core.cuda_driver import cuda_driver, device_uuid
from ....ops.core.ipc_memory import MappedMemory
from ...api.errors import RequestError

CHUNK_BYTES = 1 << 24


def readable_devices(device: torch.device) -> list[str]:
    """Return the UUIDs of the GPUs whose memory a process of `device` maps."""
    if device.type != "cuda":
        return []
    indices = range(torch.cuda.device_count())
    reachable = (each for each in indices if each == device.index or torch.cuda.can_device_access_peer(device, each))
    return [device_uuid(cuda_driver(), each) for each in reachable]


def copy_device_memory(
    handle: bytes, nbytes: int, device: torch.device, device_calls: AbstractContextManager[Any], target: int
) -> None:
    """Copy the first bytes of the memory with an IPC handle to an open file. Each call of the device holds
    `device_calls`.

    Raises RequestError for a handle that cannot be opened or whose memory is too small, and OSError.
    """
    with device_calls:
        memory, stream = _opened(handle, nbytes, device), torch.cuda.Stream(device)
    try:
        os.posix_fallocate(target, 0, nbytes)  # a full file system is an OSError here, and would be a signal below
        copy = torch.frombuffer(mmap.mmap(target, nbytes), dtype=torch.uint8)
        for part, source in zip(copy.split(CHUNK_BYTES), memory.tensor.split(CHUNK_BYTES), strict=True):
            with device_calls, torch.cuda.stream(stream):
                part.copy_(source)
    finally:
        with device_calls:
            memory.close()
    with device_calls:
        _opened(handle, nbytes, device).close()  # the trainer has not ended or freed the memory during the copy


def _opened(handle: bytes, nbytes: int, device: torch.device) -> MappedMemory:
    try:
        return MappedMemory(handle, nbytes, device)
    except (RuntimeError, ValueError) as problem:
        raise RequestError(
            f"the update's memory cannot be opened: {problem}. The trainer must live until the answer, and containers "
            "need one IPC namespace (--ipc=host); tensors on the CPU need neither"
        ) from None
