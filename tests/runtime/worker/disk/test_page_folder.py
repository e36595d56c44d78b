"""Files of KV pages: what is served after faults, attacks, other engines and full disks, and the bound of all files."""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from sidestream.compiler.options import OptionError
from sidestream.runtime.scheduler.disk.disk_pages import PAGE_ABSENT, PAGE_DAMAGED
from sidestream.runtime.worker.disk.page_folder import FOLDER, HEADER_BYTES, PageFolder

SIZE = 5000
FINGERPRINT, OTHER = "a" * 64, "b" * 64
LIMIT = 1 << 30


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def page(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def folder_in(root: Path, fingerprint: str = FINGERPRINT, limit: int = LIMIT) -> PageFolder:
    return PageFolder(root / "kv", fingerprint, limit)


def is_served(folder: PageFolder, number: int) -> bool:
    """Whether a page is found; only its own bytes may be."""
    into = np.zeros(SIZE, np.uint8)
    fault = folder.load(key(number), into)
    assert fault is not None or np.array_equal(into, page(number))
    return fault is None


def save(folder: PageFolder, *numbers: int) -> list[Path]:
    """Pages, each used a minute after the one before."""
    paths = []
    for number in numbers:
        folder.save(key(number), page(number))
        paths.append(folder.directory / folder.name(key(number)))
        os.utime(paths[-1], (60 * number, 60 * number))
    return paths


def test_a_page_returns_as_it_was(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    (path,) = save(folder, 1)
    assert is_served(folder, 1) and is_served(folder_in(tmp_path), 1) and not is_served(folder, 2)
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_mtime > 60
    assert folder.directory.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in folder.directory.iterdir()] == [path.name]


def truncate(path: Path) -> None:
    os.truncate(path, HEADER_BYTES + SIZE - 1)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    moved = path.rename(path.parent.parent / "moved")
    path.symlink_to(moved)


def let_others_write(path: Path) -> None:
    path.chmod(0o620)


def be_of_another_page(path: Path) -> None:
    shutil.copy(path.with_name(path.name.replace(key(1).hex(), key(2).hex())), path)


def be_of_another_model(path: Path) -> None:
    shutil.copy(path.with_name(path.name.replace(FINGERPRINT[:40], OTHER[:40])), path)


@pytest.mark.parametrize(
    "damage", [truncate, extend, alter, link, let_others_write, be_of_another_page, be_of_another_model]
)
def test_a_file_that_is_not_as_written_is_deleted_and_not_served(tmp_path: Path, damage) -> None:
    folder = folder_in(tmp_path)
    path, _ = save(folder, 1, 2)
    save(folder_in(tmp_path, OTHER), 1)
    damage(path)
    assert folder.load(key(1), np.zeros(SIZE, np.uint8)) == PAGE_DAMAGED
    assert not os.path.lexists(path) and folder.load(key(1), np.zeros(SIZE, np.uint8)) == PAGE_ABSENT
    assert is_served(folder, 2)
    save(folder, 1)
    assert is_served(folder, 1), "it is written again"


def test_a_file_of_another_user_is_deleted_and_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in(tmp_path)
    (path,) = save(folder, 1)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:  # then its folder is another user's, too
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert folder.load(key(1), np.zeros(SIZE, np.uint8)) == PAGE_DAMAGED and not path.exists()


def test_the_least_recently_used_files_of_all_models_are_deleted(tmp_path: Path) -> None:
    file_bytes = HEADER_BYTES + SIZE
    other = folder_in(tmp_path, OTHER)
    paths = save(other, 1, 2, 3)
    (notes := tmp_path / "kv" / "notes").touch()
    os.utime(notes, (0, 0))
    (temporary := other.directory / "left.tmp").touch()
    os.utime(temporary, (0, 0))
    folder = folder_in(tmp_path, limit=7 * file_bytes)
    save(folder, 4, 5, 6)
    assert is_served(other, 1), "it becomes the last used one"
    assert not temporary.exists() and notes.exists()
    save(folder, 7)
    assert [path.exists() for path in paths] == [True, False, True]
    for number in range(8, 30):
        save(folder, number)
        files = list(folder.directory.iterdir())
        assert sum(path.stat().st_size for path in files) <= 7 * file_bytes
    assert is_served(folder, 29) and len(files) == 6


def test_files_of_other_engines_are_counted_from_time_to_time(tmp_path: Path) -> None:
    file_bytes = HEADER_BYTES + SIZE
    one, two = (folder_in(tmp_path, limit=32 * file_bytes) for _ in range(2))
    for number in range(200):
        save((one, two)[number % 2], number)
        assert len(list(one.directory.iterdir())) <= 32 + 32 // 16


def test_two_engines_share_files(tmp_path: Path) -> None:
    one, two = folder_in(tmp_path), folder_in(tmp_path)
    (path,) = save(one, 1)
    before = path.stat().st_ino
    save(two, 1, 2)
    assert path.stat().st_ino == before, "a page that has a file is not written again"
    assert is_served(one, 2) and is_served(two, 1)
    save(other := folder_in(tmp_path, OTHER), 1)
    two.delete_all()
    assert not is_served(one, 1) and not is_served(one, 2) and is_served(other, 1)
    assert one.load(key(1), np.zeros(SIZE, np.uint8)) == PAGE_ABSENT


def test_a_full_disk_makes_space_from_old_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in(tmp_path, limit=7 * (HEADER_BYTES + SIZE))
    save(folder, *range(6))
    monkeypatch.setattr("sidestream.compiler.program.cache_folder.SPARE_BYTES", 1 << 60)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            save(folder, 7)
    assert len(list(folder.directory.iterdir())) == 5 and not is_served(folder, 0)
    monkeypatch.undo()
    save(folder, 8)
    assert is_served(folder, 8)


def test_a_removed_directory_is_not_made_again(tmp_path: Path) -> None:
    """It may be a disk that is not mounted."""
    folder = folder_in(tmp_path)
    save(folder, 1)
    shutil.rmtree(tmp_path / "kv")
    with pytest.raises(FileNotFoundError):
        save(folder, 2)
    assert not is_served(folder, 1) and not (tmp_path / "kv").exists()


def test_folders_that_others_may_use_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / FOLDER
    folder.mkdir(mode=0o755, parents=True)
    with pytest.raises(OptionError, match=rf"other users may read or write .*; run `chmod 700 .*{FOLDER}`"):
        folder_in(tmp_path)
    folder.chmod(0o700)
    folder_in(tmp_path)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(OptionError, match="is not a directory of this user"):
        folder_in(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"kv_disk='.*file' cannot be used: .*; name another directory"):
        PageFolder(tmp_path / "file", FINGERPRINT, LIMIT)
