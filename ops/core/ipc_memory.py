"""Device memory that other processes of this host map, found by CUDA's IPC handles of 64 bytes.

The exporting process must free the memory only after all others have unmapped it.
"""

import contextlib
import ctypes
from collections.abc import Generator
from typing import Any

import torch

from .cuda_driver import HANDLE_BYTES, IpcHandle, call_driver, cuda_driver, export_memory

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class ExportedMemory:
    """`nbytes` of a device's memory, outside torch's allocator: its expandable segments have no handles.

    handle   64 bytes for `MappedMemory` in another process
    tensor   uint8 [nbytes], zeros; invalid after `free`

    Raises RuntimeError for errors of the driver.
    """

    def __init__(self, nbytes: int, device: torch.device, driver: Any = None) -> None:
        self._driver, self._device = driver or cuda_driver(), device
        self._address: ctypes.c_uint64 | None = None
        with device_context(device):
            self._address, self.handle = export_memory(self._driver, nbytes)
            self.tensor = tensor_at(self._address.value, nbytes, device).zero_()
            torch.cuda.synchronize(device)  # before another process writes

    def free(self) -> None:
        """Free the memory; no process may use it any more. Does nothing the second time."""
        address, self._address = self._address, None
        if address is not None:
            with device_context(self._device):
                call_driver(self._driver, "cuMemFree_v2", address)


class MappedMemory:
    """Memory of another process, mapped into this one's context of `device`.

    handle   64 bytes from another process; do not trust them
    nbytes   size of the view

    tensor   uint8 [nbytes], on `device` for torch even if the memory is a peer's; invalid after `close`

    Raises RuntimeError if the driver refuses the handle, and ValueError if the allocation is smaller.
    """

    def __init__(self, handle: bytes, nbytes: int, device: torch.device, driver: Any = None) -> None:
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        self._driver, self._device = driver or cuda_driver(), device
        self._address: ctypes.c_uint64 | None = None
        address, flags = ctypes.c_uint64(), ctypes.c_uint(LAZY_PEER_ACCESS)
        with device_context(device):
            opened = IpcHandle.from_buffer_copy(handle)
            call_driver(self._driver, "cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, flags)
            self._address = address
            try:
                first, size = ctypes.c_uint64(), ctypes.c_size_t()
                where = ctypes.byref(first), ctypes.byref(size)
                call_driver(self._driver, "cuMemGetAddressRange_v2", *where, address)
                if not 0 <= nbytes <= first.value + size.value - (address.value or 0):
                    raise ValueError(f"the memory of an IPC handle has {size.value} bytes, not {nbytes}")
            except (RuntimeError, ValueError):
                self.close()
                raise
        self.tensor = tensor_at(address.value, nbytes, device)

    def close(self) -> None:
        """Unmap the memory; no kernel may use it any more. Does nothing the second time."""
        address, self._address = self._address, None
        if address is not None:
            with device_context(self._device):
                call_driver(self._driver, "cuIpcCloseMemHandle", address)


@contextlib.contextmanager
def device_context(device: torch.device) -> Generator[None]:
    """Make a device's context current for the driver's calls of this thread. Waits for the device."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield


def tensor_at(address: int | None, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [nbytes] at an address, a view that owns nothing."""
    # not __cuda_array_interface__, which would copy a peer's memory to this device
    storage = torch._C._construct_storage_from_data_pointer(address or 0, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
