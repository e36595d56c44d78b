"""Private copies of updates in the GPU process."""

import os
import stat
from pathlib import Path

import pytest
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.server.updates.files import UpdateFiles

DATA = (8).to_bytes(8, "little") + os.urandom(9 << 20)


def copy(files: UpdateFiles, source: Path, data: bytes, name: str | None) -> None:
    """Copy an update that its sender changes at once, and keep it as version `name`."""
    source.write_bytes(data + b"more")
    with files.copied(str(source), len(data)) as file:
        source.write_bytes(b"x" * len(data))
        assert file.contents is not None and file.contents.tobytes() == data
        file.complete()
        if name is not None:
            files.keep(name)


def read(files: UpdateFiles, name: str) -> bytes:
    with files.opened(name) as file:
        return os.pread(file.handle, len(DATA) + 1, 0)


def test_the_sender_cannot_change_a_copy(tmp_path: Path) -> None:
    files, source, folder = UpdateFiles(tmp_path / "updates"), tmp_path / "buffer", tmp_path / "updates"
    copy(files, source, DATA, "policy@1")
    assert read(files, "policy@1") == DATA and stat.S_IMODE((folder / "policy@1").stat().st_mode) == 0o600
    copy(files, source, DATA[::-1], None)
    assert [each.name for each in folder.iterdir()] == ["policy@1"], "an update that fails leaves no file"


def test_a_removed_file_is_used_again(tmp_path: Path) -> None:
    """Its versions before and after are unaffected, whatever their sizes are."""
    files, source, folder = UpdateFiles(tmp_path / "updates"), tmp_path / "buffer", tmp_path / "updates"
    copy(files, source, DATA, "policy@1")
    number = (folder / "policy@1").stat().st_ino
    copy(files, source, DATA[:5000], "policy@2")
    with files.opened("policy@1") as former:
        files.remove(["policy@1", "policy@9", "..", "policy"])
        copy(files, source, DATA[:100], "policy@3")
        assert os.fstat(former.handle).st_ino == number == (folder / "policy@3").stat().st_ino
    assert (read(files, "policy@2"), read(files, "policy@3")) == (DATA[:5000], DATA[:100])
    files.remove(["policy@2", "policy@3"])
    assert len(list(folder.iterdir())) == 1, "one file stays for the next update"


def test_sources_that_are_no_update(tmp_path: Path) -> None:
    files, source = UpdateFiles(tmp_path / "updates"), tmp_path / "buffer"
    source.write_bytes(DATA[:100])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(source)
    for path, error, text in (
        (source, RequestError, "has 100 bytes instead of 101"),
        (tmp_path / "pipe", RequestError, "not a regular file"),
        (tmp_path / "link", OSError, "symbolic links"),
    ):
        with pytest.raises(error, match=text), files.copied(str(path), 101):
            pass
