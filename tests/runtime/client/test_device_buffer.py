"""Updates in a GPU's memory, over a driver of this process: the client's copy is what the server reads."""

import errno
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from sidestream.runtime.api.adapter_update import AdapterUpdate
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.client.device_buffer import DeviceBuffer
from sidestream.runtime.server.updates.device_memory import copy_device_memory
from support.ipc import FakeDriver, install

GPU = torch.device("cuda", 1)
UUID = b"\1".hex() * 16


class OnGpu(AdapterUpdate):
    """Its tensors are said to be on a GPU."""

    gpu: Any = 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def tensors(count: int = 3) -> dict[str, torch.Tensor]:
    made = {f"t{index}": torch.randn(5, 7 + index).bfloat16() for index in range(count)}
    return made | {"turned": torch.randn(4, 6).T, "empty": torch.empty(0, 3)}


def received(handle: bytes, nbytes: int) -> bytes:
    target = os.memfd_create("target")
    try:
        copy_device_memory(handle, nbytes, GPU, nullcontext(), target)
        return os.pread(target, nbytes + 1, 0)
    finally:
        os.close(target)


def file_of(update: AdapterUpdate) -> bytes:
    with update.in_memory() as handle:
        return os.pread(handle, update.nbytes + 1, 0)


def test_the_server_reads_the_file_that_the_client_copied(driver: FakeDriver) -> None:
    buffer = DeviceBuffer(driver)
    for count in (3, 1, 9):  # the second one fits into the memory of the first, the third does not
        update = OnGpu(tensors(count), {"r": 4}, "pin")
        written = buffer.write(update, [UUID, "another"])
        assert written is not None and written[0] == UUID and len(driver.allocations) == 1
        assert received(written[1], update.nbytes) == file_of(update)
    assert not any(driver.mapped.values()) and driver.contexts == driver.pushed == 0
    for _ in range(2):
        buffer.close()
        assert not driver.allocations and not driver.freed_while_mapped


def test_other_tensors_and_servers_take_host_memory(driver: FakeDriver) -> None:
    buffer = DeviceBuffer(driver)
    assert buffer.write(AdapterUpdate(tensors(), {}, "pin"), [UUID]) is None, "on the CPU"
    assert buffer.write(OnGpu(tensors(), {}, "pin"), []) is None, "a server without a GPU"
    assert buffer.write(OnGpu(tensors(), {}, "pin"), ["00" * 16]) is None, "a server on another one"
    for call in ("cuDeviceGet", "cuMemAlloc_v2", "cuIpcGetMemHandle", "cuMemcpyDtoDAsync_v2"):
        driver.fails = {call: 2}
        assert buffer.write(OnGpu(tensors(), {}, "pin"), [UUID]) is None, call
        assert driver.contexts == driver.pushed == 0
    driver.fails = {}
    assert buffer.write(OnGpu(tensors(), {}, "pin"), [UUID]) is not None


def no_space(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_handles_that_are_not_an_update_s_memory(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = DeviceBuffer(driver)
    update = OnGpu(tensors(), {"r": 4}, "pin")
    _, handle = buffer.write(update, [UUID]) or ("", b"")
    for given, nbytes, text in (
        (bytes(64), 8, "error 400"),
        (b"x" * 64, 8, "error 400"),
        (handle, update.nbytes + 1, f"has {update.nbytes} bytes, not {update.nbytes + 1}"),
        (handle, 1 << 50, "bytes, not"),
    ):
        with pytest.raises(RequestError, match=rf"cannot be opened: .*{text}.*--ipc=host"):
            received(given, nbytes)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "posix_fallocate", no_space)
        received(handle, update.nbytes)
    real = driver._cuIpcCloseMemHandle

    def freed_meanwhile(address: Any) -> None:
        real(address)
        driver.allocations.clear()

    driver._cuIpcCloseMemHandle = freed_meanwhile  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="trainer must live until the answer"):
        received(handle, update.nbytes)
    assert not any(driver.mapped.values())
