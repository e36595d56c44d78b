"""A client writes its updates through a mapping of the server's buffer."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from sidestream.runtime.api.adapter_update import AdapterUpdate
from sidestream.runtime.api.errors import ServerError
from sidestream.runtime.client.update import SharedUpdate
from sidestream.runtime.protocol.addresses import Address, parse


def update_of(value: float, rows: int = 1000) -> AdapterUpdate:
    return AdapterUpdate({"a": torch.full((rows, 3), value, dtype=torch.bfloat16), "b": torch.ones(0)}, {"r": 3}, "pin")


def buffer(path: Path, nbytes: int) -> str:
    path.write_bytes(b"")
    os.truncate(path, nbytes)
    return str(path)


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return parse(f"ipc://{tmp_path}/engine.sock")


def test_each_update_is_written_into_the_buffer_that_the_server_names(tmp_path: Path, address: Address) -> None:
    shared, first = SharedUpdate(), update_of(1.0)
    path = buffer(tmp_path / "first", first.nbytes)
    for value, rows in ((1.0, 1000), (2.0, 1000), (3.0, 10)):
        update = update_of(value, rows)
        shared.write(update, address, path)
        written = load((tmp_path / "first").read_bytes()[: update.nbytes])
        assert (
            torch.equal(written["a"], torch.full((rows, 3), value, dtype=torch.bfloat16)) and not written["b"].numel()
        )
    longer = update_of(4.0, 2000)
    shared.write(longer, address, buffer(tmp_path / "second", longer.nbytes + 5))
    assert load((tmp_path / "second").read_bytes()[: longer.nbytes])["a"].sum() == 4.0 * 6000
    assert load((tmp_path / "first").read_bytes()[: update.nbytes])["a"][0, 0] == 3.0, "it is not used any more"
    shared.close()
    shared.close()


def test_what_is_no_buffer_of_the_server_is_refused(tmp_path: Path, address: Address) -> None:
    shared, update = SharedUpdate(), update_of(1.0)
    (tmp_path / "elsewhere").mkdir()
    for path, problem in (
        (buffer(tmp_path / "elsewhere" / "buffer", update.nbytes), "outside its socket's directory"),
        (buffer(tmp_path / "short", update.nbytes - 1), "shorter than"),
        (buffer(tmp_path / "empty", 0), "could not be written"),
        (str(tmp_path / "missing"), "No such file"),
    ):
        with pytest.raises(ServerError, match=problem):
            shared.write(update, address, path)
    (tmp_path / "link").symlink_to(buffer(tmp_path / "target", update.nbytes))
    with pytest.raises(ServerError, match="shared memory"):
        shared.write(update, address, str(tmp_path / "link"))
    assert not any((tmp_path / "target").read_bytes())
