"""Addresses of a GPU whose memory comes and goes: the driver's calls for virtual memory.

CUDA graphs, bound programs and tensor maps hold addresses. Those of a range stay reserved for as long as it lives,
whatever memory lies under them.
"""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

from ..api.errors import CapacityError

PINNED, DEVICE, READ_WRITE, RECOMMENDED = 1, 1, 3, 1  # CU_MEM_ALLOCATION_TYPE_PINNED and so on
OUT_OF_MEMORY = 2


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


@cache
def cuda_driver() -> Any:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


class CudaPages:
    """`nbytes` of a GPU's addresses, with memory under them until `release` and again, with any content, after
    `restore`. In between nothing may read or write them. All goes back when this object and its tensors are gone.

    Raises CapacityError where the device has too little memory left, and RuntimeError for other faults of the driver.
    """

    def __init__(self, nbytes: int, device: torch.device, driver: Any = None) -> None:
        self.nbytes = nbytes
        self.device = device
        self._driver = cuda_driver() if driver is None else driver
        location = _Location(DEVICE, device.index or 0)
        self._properties, self._access = _Properties(PINNED, 0, location), _Access(location, READ_WRITE)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the driver's calls need a context
        unit = ctypes.c_size_t()
        _call(
            self._driver,
            "cuMemGetAllocationGranularity",
            ctypes.byref(unit),
            ctypes.byref(self._properties),
            ctypes.c_int(RECOMMENDED),
        )
        self._size = ctypes.c_size_t(max(1, -(-nbytes // unit.value)) * unit.value)
        self._address = ctypes.c_uint64()
        _call(
            self._driver,
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            self._size,
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._handles: list[ctypes.c_uint64] = []
        finish = weakref.finalize(self, _give_back, self._driver, self._address, self._size, self._handles)
        finish.atexit = False  # the process takes all with it
        self.restore()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] over the addresses; to be called while there is memory under them."""
        return torch.as_tensor(self, device=self.device)

    def release(self) -> None:
        """Give the memory back; the device must be done with it."""
        _unmap(self._driver, self._address, self._size, self._handles)

    def restore(self) -> None:
        """Take memory again; nothing has changed where that fails."""
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        code = self._driver.cuMemCreate(ctypes.byref(handle), self._size, properties, ctypes.c_uint64(0))
        if code == OUT_OF_MEMORY:
            raise CapacityError(
                f"{self._size.value / 2**30:.2f} GiB of device memory are needed and not free; free what others hold "
                "on this device"
            )
        _check("cuMemCreate", code)
        none = ctypes.c_size_t(0)
        self._handles.append(handle)
        try:
            _call(self._driver, "cuMemMap", self._address, self._size, none, handle, ctypes.c_uint64(0))
            access = ctypes.byref(self._access)
            _call(self._driver, "cuMemSetAccess", self._address, self._size, access, ctypes.c_size_t(1))
        except RuntimeError:
            self._driver.cuMemUnmap(self._address, self._size)
            self._driver.cuMemRelease(self._handles.pop())
            raise


def _unmap(driver: Any, address: ctypes.c_uint64, size: ctypes.c_size_t, handles: list[ctypes.c_uint64]) -> None:
    while handles:
        _call(driver, "cuMemUnmap", address, size)
        _call(driver, "cuMemRelease", handles.pop())


def _give_back(driver: Any, address: ctypes.c_uint64, size: ctypes.c_size_t, handles: list[ctypes.c_uint64]) -> None:
    driver.cuCtxSynchronize()
    _unmap(driver, address, size, handles)
    _call(driver, "cuMemAddressFree", address, size)


def _call(driver: Any, name: str, *arguments: Any) -> None:
    _check(name, getattr(driver, name)(*arguments))


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver's {name} failed with error {code}")
