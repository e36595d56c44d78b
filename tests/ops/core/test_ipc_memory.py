"""Memory that processes share by IPC handles: over a driver of this process, and between two processes of a GPU."""

import gc
from pathlib import Path

import pytest
import torch
from sidestream.ops.collectives.exchange import free_exchange, open_exchange, unmap_peers
from sidestream.ops.collectives.tensor_parallel_group import RankGroup
from sidestream.ops.core.cuda_driver import HANDLE_BYTES
from sidestream.ops.core.ipc_memory import ExportedMemory, MappedMemory
from support.ipc import FakeDriver, install
from support.ranks import run_on_ranks

DEVICE = torch.device("cuda", 0)
SLOT_BYTES = 1 << 16


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def test_what_one_writes_the_other_reads(driver: FakeDriver) -> None:
    own = ExportedMemory(100, DEVICE)
    assert own.tensor.tolist() == [0] * 100 and len(own.handle) == HANDLE_BYTES
    peer = MappedMemory(own.handle, 100, DEVICE)
    peer.tensor[7] = 3
    assert own.tensor[7] == 3
    for _ in range(2):
        peer.close()
        assert driver.mapped[own.tensor.data_ptr()] == 0
    for _ in range(2):
        own.free()
        assert not driver.allocations


def test_a_handle_is_checked_before_a_byte_is_read(driver: FakeDriver) -> None:
    own = ExportedMemory(100, DEVICE)
    for nbytes in (101, -1):
        with pytest.raises(ValueError, match=f"has 100 bytes, not {nbytes}"):
            MappedMemory(own.handle, nbytes, DEVICE)
    for handle in (b"", own.handle[:-1], own.handle + b"0"):
        with pytest.raises(ValueError, match=f"has 64 bytes, not {len(handle)}"):
            MappedMemory(handle, 100, DEVICE)
    with pytest.raises(RuntimeError, match="cuIpcOpenMemHandle_v2 failed with error 400"):
        MappedMemory(bytes(HANDLE_BYTES), 100, DEVICE)
    assert not any(driver.mapped.values())


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuIpcGetMemHandle"])
def test_memory_that_can_t_be_exported_is_freed(driver: FakeDriver, call: str) -> None:
    driver.fails[call] = 2
    with pytest.raises(RuntimeError, match=f"{call} failed with error 2"):
        ExportedMemory(100, DEVICE)
    assert not driver.allocations


def shared(group: RankGroup) -> list[list[int]]:
    """What each rank reads of both memories, in three exchanges, one after the other, on one GPU."""
    seen = []
    for turn in range(3):
        exchange = open_exchange(group, DEVICE, SLOT_BYTES)
        exchange.memory[-1] = 10 * turn + group.rank
        torch.cuda.synchronize()
        group.gather(torch.tensor([0]))
        seen.append([int(memory[-1]) for memory in exchange.memories])
        unmap_peers(group)
        group.gather(torch.tensor([0]))
        free_exchange(group)
        del exchange
        gc.collect()
    return seen


@pytest.mark.gpu
def test_two_processes_share_memory_of_a_gpu_again_and_again(tmp_path: Path) -> None:
    results = run_on_ranks(2, shared, tmp_path)
    assert results == [[[0, 1], [10, 11], [20, 21]]] * 2
