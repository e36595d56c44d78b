"""Memory of a trainer's GPU from which a server on the same host reads updates."""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Collection, Generator
from typing import Any

from ...ops.core.cuda_driver import call_driver, cuda_driver, device_uuid, export_memory
from ..api.adapter_update import AdapterUpdate

_log = logging.getLogger(__name__)


class DeviceBuffer:
    """A copy of the last update, in memory of its own: torch's may be in expandable segments, which have no handles,
    and is used again by the trainer. `write` allocates it; it only grows.
    """

    def __init__(self, driver: Any = None) -> None:
        self._driver, self._gpu, self._nbytes, self._handle = driver, 0, 0, b""
        self._address: ctypes.c_uint64 | None = None
        self._lock = threading.Lock()

    def write(self, update: AdapterUpdate, devices: Collection[str]) -> tuple[str, bytes] | None:
        """Copy an update whose tensors are on one of the GPUs with the UUIDs `devices`. Return the GPU's UUID and the
        memory's IPC handle; None for other tensors, and if the driver refuses.

        Waits for the GPU, so that kernels that compute the tensors have ended.
        """
        gpu = update.gpu
        if gpu is None or not devices:
            return None
        with self._lock:
            try:
                self._driver = self._driver or cuda_driver()
                uuid = device_uuid(self._driver, gpu)
                if uuid not in devices:
                    return None
                self._resize(gpu, update.nbytes)
                with self._context():
                    self._copy(update)
                return uuid, self._handle
            except (RuntimeError, OSError) as problem:
                _log.warning("an update goes through host memory: %s", problem)
                return None

    def close(self) -> None:
        """Free the memory; the server has answered all updates."""
        with self._lock, contextlib.suppress(RuntimeError):  # a device with a fault frees it when the process ends
            self._free()

    def _copy(self, update: AdapterUpdate) -> None:
        tensors, end = update.tensors, len(update.header)
        call_driver(self._driver, "cuCtxSynchronize")
        call_driver(self._driver, "cuMemcpyHtoD_v2", self._at(0), update.header, ctypes.c_size_t(end))
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes:
                source = ctypes.c_uint64(tensor.data_ptr())
                call_driver(self._driver, "cuMemcpyDtoDAsync_v2", self._at(end), source, ctypes.c_size_t(nbytes), None)
            end += nbytes
        call_driver(self._driver, "cuCtxSynchronize")

    def _at(self, offset: int) -> ctypes.c_uint64:
        if self._address is None:
            raise RuntimeError("the buffer has no memory")
        return ctypes.c_uint64((self._address.value or 0) + offset)

    def _resize(self, gpu: int, nbytes: int) -> None:
        if self._address is None or self._gpu != gpu or self._nbytes < nbytes:
            self._free()
            self._gpu = gpu
            with self._context():
                self._address, self._handle = export_memory(self._driver, nbytes)
            self._nbytes = nbytes

    def _free(self) -> None:
        address, self._address = self._address, None
        if address is not None:
            with self._context():
                call_driver(self._driver, "cuMemFree_v2", address)

    @contextlib.contextmanager
    def _context(self) -> Generator[None]:
        """Make the GPU's primary context, which is torch's, current in this thread."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        call_driver(self._driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._gpu))
        call_driver(self._driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            call_driver(self._driver, "cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        finally:
            self._driver.cuDevicePrimaryCtxRelease_v2(device)
