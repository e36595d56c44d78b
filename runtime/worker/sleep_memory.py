"""Device and host memory that is released while an engine sleeps and restored at the same addresses: CUDA graphs, bound
programs and tensor maps hold addresses. On a GPU this uses the driver's virtual memory calls.
"""

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Mapping
from itertools import accumulate
from math import prod
from typing import Any

import torch

from ...ops.core.cuda_driver import call_driver, check_code, cuda_driver
from ..adapters.host_memory import host_bytes, page_lock
from ..api.errors import CapacityError
from .memory_budget import Specs

ALIGNMENT = 512  # bytes, as in torch's allocator
LOCK_BYTES = 1 << 30
PINNED, DEVICE, READ_WRITE, RECOMMENDED = 1, 1, 3, 1  # CU_MEM_ALLOCATION_TYPE_PINNED and so on
OUT_OF_MEMORY = 2


class ReleasableTensors:
    """`tensors`: one of each of `specs` (name -> shape, dtype), initially zeros. They must not be accessed between
    `release` and `restore`. Raises CapacityError if the device has too little memory.
    """

    def __init__(self, specs: Specs, device: torch.device) -> None:
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in specs.values()]
        offsets = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        self._memory = CudaMemory(offsets[-1], device) if device.type == "cuda" else HostMemory(offsets[-1])
        self._bytes = self._memory.tensor()
        self._bytes.zero_()
        self._copy: _HostCopy | None = None
        self.tensors: Mapping[str, torch.Tensor] = {
            name: self._bytes[first : first + size].view(dtype).view(shape)
            for (name, (shape, dtype)), first, size in zip(specs.items(), offsets, sizes, strict=False)
        }

    def release(self, keep: bool) -> None:
        """Free the memory; with `keep` copy it first to host memory. The device must have finished with it."""
        self._copy = _HostCopy(self._bytes) if keep else None
        self._memory.release()

    def restore(self) -> None:
        """Allocate the memory again, with the kept content or zeros."""
        self._memory.restore()
        if self._copy is None:
            self._bytes.zero_()
        else:
            self._bytes.copy_(self._copy.memory)
        self._copy = None


class _HostCopy:
    """A copy of a uint8 tensor in host memory."""

    def __init__(self, source: torch.Tensor) -> None:
        self.memory = host_bytes(source.numel())
        if source.device.type == "cuda":
            self.memory.zero_()  # allocates all pages before they are locked
            chunks = self.memory.split(LOCK_BYTES)
            page_lock(self, chunks, contextlib.nullcontext(), remedy="free host memory, or use sleep(level=2)")
        self.memory.copy_(source)


class HostMemory:
    """`nbytes` of host memory that the system takes back at `release`; it reads as zeros afterwards."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[:nbytes]

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes]."""
        return self._bytes

    def release(self) -> None:
        """Free the memory."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Do nothing: the system allocates memory at the next write."""


class CudaMemory:
    """`nbytes` of a GPU's memory at fixed addresses, with undefined content after `restore`. The addresses are freed
    with this object and its tensors.

    Raises CapacityError if the device has too little memory, and RuntimeError for other errors of the driver.
    """

    def __init__(self, nbytes: int, device: torch.device, driver: Any = None) -> None:
        self.nbytes = nbytes
        self.device = device
        self._driver = cuda_driver() if driver is None else driver
        location = _Location(DEVICE, device.index or 0)
        self._properties, self._access = _Properties(PINNED, 0, location), _Access(location, READ_WRITE)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the driver's calls need a context
        unit, zero = ctypes.c_size_t(), ctypes.c_uint64(0)
        properties = ctypes.byref(self._properties)
        recommended = ctypes.c_int(RECOMMENDED)
        call_driver(self._driver, "cuMemGetAllocationGranularity", ctypes.byref(unit), properties, recommended)
        self._size = ctypes.c_size_t(max(1, -(-nbytes // unit.value)) * unit.value)
        self._address = ctypes.c_uint64()
        address = ctypes.byref(self._address)
        call_driver(self._driver, "cuMemAddressReserve", address, self._size, ctypes.c_size_t(0), zero, zero)
        self._handles: list[ctypes.c_uint64] = []
        finalizer = weakref.finalize(self, _free, self._driver, self._address, self._size, self._handles)
        finalizer.atexit = False  # the end of the process frees all
        self.restore()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] at the addresses; call it while they have memory."""
        return torch.as_tensor(self, device=self.device)

    def release(self) -> None:
        """Free the memory; the device must have finished with it."""
        _unmap(self._driver, self._address, self._size, self._handles)

    def restore(self) -> None:
        """Allocate memory again; a failure changes nothing."""
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        code = self._driver.cuMemCreate(ctypes.byref(handle), self._size, properties, ctypes.c_uint64(0))
        if code == OUT_OF_MEMORY:
            raise CapacityError(
                f"{self._size.value / 2**30:.2f} GiB of device memory are needed and not free; end other processes "
                "that use this device"
            )
        check_code("cuMemCreate", code)
        self._handles.append(handle)
        try:
            offset, flags = ctypes.c_size_t(0), ctypes.c_uint64(0)
            call_driver(self._driver, "cuMemMap", self._address, self._size, offset, handle, flags)
            access = ctypes.byref(self._access)
            call_driver(self._driver, "cuMemSetAccess", self._address, self._size, access, ctypes.c_size_t(1))
        except RuntimeError:
            self._driver.cuMemUnmap(self._address, self._size)
            self._driver.cuMemRelease(self._handles.pop())
            raise


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _unmap(driver: Any, address: ctypes.c_uint64, size: ctypes.c_size_t, handles: list[ctypes.c_uint64]) -> None:
    while handles:
        call_driver(driver, "cuMemUnmap", address, size)
        call_driver(driver, "cuMemRelease", handles.pop())


def _free(driver: Any, address: ctypes.c_uint64, size: ctypes.c_size_t, handles: list[ctypes.c_uint64]) -> None:
    driver.cuCtxSynchronize()
    _unmap(driver, address, size, handles)
    call_driver(driver, "cuMemAddressFree", address, size)
