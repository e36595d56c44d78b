"""The driver's calls for memory that processes share, over memory of this process, so that ranks can be threads."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from sidestream.ops.collectives.tensor_parallel_group import RankGroup, tensor_parallel_group
from sidestream.ops.core import ipc_memory


class FakeDriver:
    """Counts what is allocated and mapped. `fails`: a call -> its error code; `handle_fails`: handles not to open.

    `freed_while_mapped`: frees of memory that another one still had mapped, which CUDA forbids.
    """

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.allocations: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.freed_while_mapped = self.contexts = self.pushed = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            with self._lock:
                return self.fails.get(name) or getattr(self, f"_{name}")(*arguments) or 0

        return call

    def _cuMemAlloc_v2(self, out: Any, size: Any) -> None:
        memory = ctypes.create_string_buffer(b"\xff" * size.value, size.value)
        out._obj.value = ctypes.addressof(memory)
        self.allocations[out._obj.value] = memory

    def _cuMemFree_v2(self, address: Any) -> None:
        self.freed_while_mapped += bool(self.mapped.get(address.value))
        del self.allocations[address.value]

    def _cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        handle._obj.reserved[:8] = address.value.to_bytes(8, "little")

    def _cuIpcOpenMemHandle_v2(self, out: Any, handle: Any, flags: Any) -> int:
        address = int.from_bytes(bytes(handle)[:8], "little")
        if address not in self.allocations or flags.value != 1:
            return 400  # CUDA_ERROR_INVALID_HANDLE
        self.mapped[address] = self.mapped.get(address, 0) + 1
        out._obj.value = address
        return 0

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        self.mapped[address.value] -= 1

    def _cuDeviceGet(self, out: Any, index: Any) -> None:
        out._obj.value = index.value

    def _cuDeviceGetUuid_v2(self, out: Any, device: Any) -> None:
        out.raw = bytes([device.value]) * 16

    def _cuMemcpyHtoD_v2(self, target: Any, source: bytes, nbytes: Any) -> None:
        ctypes.memmove(target.value, source, nbytes.value)

    def _cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, nbytes: Any, stream: Any) -> None:
        ctypes.memmove(target.value, source.value, nbytes.value)

    def _cuCtxSynchronize(self) -> None:
        pass

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: Any) -> None:
        self.contexts += 1

    def _cuDevicePrimaryCtxRelease_v2(self, device: Any) -> None:
        self.contexts -= 1

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:
        self.pushed += 1

    def _cuCtxPopCurrent_v2(self, out: Any) -> None:
        self.pushed -= 1

    def _cuMemGetAddressRange_v2(self, first: Any, size: Any, address: Any) -> None:
        first._obj.value, size._obj.value = address.value, len(self.allocations[address.value])


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver whose devices are this process's memory; tensors of any device are on the CPU."""
    fake = FakeDriver()
    monkeypatch.setattr(ipc_memory, "cuda_driver", lambda: fake)
    monkeypatch.setattr(ipc_memory, "device_context", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    at = ipc_memory.tensor_at
    monkeypatch.setattr(ipc_memory, "tensor_at", lambda *place: at(*place[:2], torch.device("cpu")))
    return fake


class ThreadGroup(RankGroup):
    """A rank that is a thread."""

    barrier: threading.Barrier
    parts: list[Any]

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See RankGroup."""
        self.parts[self.rank] = part
        self.barrier.wait(60)
        gathered = list(self.parts)
        self.barrier.wait(60)
        return gathered


def on_threads(world: int, work: Callable[[RankGroup], Any]) -> list[Any]:
    """What `work` returns or raises on each rank."""
    barrier, parts, results = threading.Barrier(world), [None] * world, [None] * world

    def run(rank: int) -> None:
        group = ThreadGroup(tensor_parallel_group(world), rank, world)
        group.barrier, group.parts = barrier, parts
        try:
            results[rank] = work(group)
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    with _all_joined(threads):
        for thread in threads:
            thread.start()
    return results


@contextlib.contextmanager
def _all_joined(threads: list[threading.Thread]) -> Generator[None]:
    yield
    for thread in threads:
        thread.join()
