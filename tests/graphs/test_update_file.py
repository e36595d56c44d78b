"""An update in memory and in its file."""

import os

import pytest
import torch
from safetensors.torch import load
from sidestream.graphs.files.update_file import private_update
from sidestream.runtime.api import adapter_update
from sidestream.runtime.api.adapter_update import AdapterUpdate

TENSORS = {
    "odd": torch.randn(7, 33).to(torch.bfloat16),
    "turned": torch.randn(40, 8).T,
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float16),
    "large": torch.randn(300, 100),
}


def check(file: bytes) -> None:
    """Compare a file, as safetensors reads it, with the tensors."""
    found = load(file)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_copies_are_in_the_safetensors_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_update, "PIECE", 1000)
    update = AdapterUpdate(TENSORS, {"r": 4}, "pin")
    memory = bytearray(update.nbytes)
    update.copy(memoryview(memory))
    check(bytes(memory))


def test_other_processes_read_the_header_before_the_rest_is_written() -> None:
    update = AdapterUpdate(TENSORS, {"r": 4}, "pin")
    with private_update(update.nbytes, update.copy) as file:
        assert file.contents is not None and os.fstat(file.handle).st_size == update.nbytes
        header = 8 + int.from_bytes(file.contents[:8].tobytes(), "little")
        assert os.pread(file.handle, update.nbytes, 0) == file.contents[:header].tobytes().ljust(update.nbytes, b"\0")
        file.complete()
        file.complete()
        check(os.pread(file.handle, update.nbytes, 0))


@pytest.mark.parametrize("contents", [b"", b"abc", b"\xff" * 64, bytes(64)])
def test_headers_that_are_none(contents: bytes) -> None:
    with private_update(len(contents), lambda memory: memory.__setitem__(slice(None), contents)) as file:
        file.complete()
        assert os.pread(file.handle, 100, 0) == contents
