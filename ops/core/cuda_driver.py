"""Calls of the CUDA driver by ctypes."""

import ctypes
from functools import cache
from typing import Any

HANDLE_BYTES = 64


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def cuda_driver() -> Any:
    """Return the CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def call_driver(driver: Any, name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises RuntimeError for an error code."""
    check_code(name, getattr(driver, name)(*arguments))


def check_code(name: str, code: int) -> None:
    """Raise RuntimeError unless the code that the driver's function `name` returned is 0."""
    if code:
        raise RuntimeError(f"the CUDA driver's {name} failed with error {code}")


def export_memory(driver: Any, nbytes: int) -> tuple[ctypes.c_uint64, bytes]:
    """Return the address of new memory in the current context, and its IPC handle. Raises RuntimeError."""
    address, handle = ctypes.c_uint64(), IpcHandle()
    call_driver(driver, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    try:
        call_driver(driver, "cuIpcGetMemHandle", ctypes.byref(handle), address)
    except RuntimeError:
        driver.cuMemFree_v2(address)
        raise
    return address, bytes(handle)
