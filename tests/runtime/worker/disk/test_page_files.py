"""Threads that write and read KV pages: results, order with copies of the same pages, and failing disks."""

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from sidestream.compiler.options import OptionError
from sidestream.runtime.scheduler.disk.disk_pages import PAGE_ABSENT, PAGE_DAMAGED
from sidestream.runtime.scheduler.step_plan import FileOrder, PageCopies
from sidestream.runtime.worker.disk.page_files import PageFiles
from sidestream.runtime.worker.transfer.page_copier import PageCopier, _InFlight

KEYS = [bytes([number]) * 32 for number in range(40)]


@pytest.fixture
def files(tmp_path: Path) -> PageFiles:
    """Files of ten pages of a kilobyte."""
    pages = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (10, 1024), np.uint8))
    return PageFiles(pages, tmp_path / "kv", "f" * 64, 1 << 20)


def order(ticket: int, action: str, place: int = -1, key: bytes | None = None) -> PageCopies:
    return PageCopies(ticket, [], [], file=FileOrder(action, KEYS[place] if key is None else key, place))


def ended(files: PageFiles | PageCopier, count: int) -> dict[int, str | None]:
    found: dict[int, str | None] = {}
    while len(found) < count:
        found |= dict(files.finished())
        time.sleep(0.001)
    return found


def test_pages_return_to_other_places(files: PageFiles) -> None:
    pages = files._pages
    before = pages.copy()
    for place in range(5):
        files.start(order(place + 1, "write", place))
    assert ended(files, 5) == dict.fromkeys(range(1, 6))
    for place in range(5):
        files.start(order(place + 6, "read", place + 5, KEYS[place]))
    files.start(order(11, "read", 0, KEYS[9]))
    assert ended(files, 6) == dict.fromkeys(range(6, 11)) | {11: PAGE_ABSENT}
    assert np.array_equal(pages[5:], before[:5]) and np.array_equal(pages[:5], before[:5])


def test_writes_before_a_deletion_leave_no_files(files: PageFiles) -> None:
    """Also one that is under way when it is ordered, and others that are queued."""
    save, delete_all = files.folder.save, files.folder.delete_all
    started, deleted = threading.Event(), threading.Event()

    def save_after_the_deletion(key: bytes, content: np.ndarray) -> None:
        started.set()
        deleted.wait()
        save(key, content)

    files.folder.save = save_after_the_deletion
    files.folder.delete_all = lambda: (delete_all(), deleted.set())
    files.start(order(1, "write", 1))
    started.wait()
    files.start(order(7, "delete_all"))
    for ticket in (2, 3):
        files.start(order(ticket, "write", ticket))
    assert ended(files, 4) == dict.fromkeys((1, 2, 3, 7))
    assert not list(files.folder.directory.iterdir())
    files.start(order(8, "write", 3))
    assert ended(files, 1) == {8: None} and (files.folder.directory / files.folder.name(KEYS[3])).exists()


def test_a_failing_disk_is_reported_for_each_page_and_logged_once(
    files: PageFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.start(order(1, "write", 1))
    assert ended(files, 1) == {1: None}
    (files.folder.directory / files.folder.name(KEYS[1])).write_bytes(b"short")
    files.start(order(2, "read", 2, KEYS[1]))
    assert ended(files, 1) == {2: PAGE_DAMAGED}
    shutil.rmtree(files.folder.directory)
    for ticket in (3, 4, 5):
        files.start(order(ticket, "write", ticket))
    assert all(problem and "No such file" in problem for problem in ended(files, 3).values())
    assert sum("KV pages are not kept on disk" in record.message for record in caplog.records) == 1
    files.start(order(6, "write", 99, KEYS[6]))
    assert ended(files, 1)[6]


def test_a_page_is_read_after_copies_of_its_place(tmp_path: Path) -> None:
    """On a GPU copies take time; the scheduler reuses a place when it is free in its own books."""

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    copier = PageCopier([torch.zeros(2, 4, 512, dtype=torch.uint8)], 6, torch.device("cpu"))
    copier.files = PageFiles(copier.pages, tmp_path / "kv", "f" * 64, 1 << 20)
    copier.pages[1] = 7
    copier.start(order(1, "write", 1))
    assert ended(copier, 1) == {1: None}
    saving, loading = Event(), Event()
    copier._in_flight.append(_InFlight(2, {0}, {2}, set(), saving, saving))
    copier._in_flight.append(_InFlight(3, set(), set(), {3}, loading, loading))
    for ticket, place in ((4, 2), (5, 3), (6, 4)):
        copier.start(order(ticket, "read", place, KEYS[1]))
    assert ended(copier, 1) == {6: None} and copier.pages[4, 0] == 7
    assert not copier.pages[2:4].any() and not copier.finished()
    saving.done = loading.done = True
    assert ended(copier, 4) == dict.fromkeys((2, 3, 4, 5)) and bool((copier.pages[2:4] == 7).all())


def test_the_bound_holds_two_pages_of_all_ranks(tmp_path: Path) -> None:
    pages = torch.zeros(3, 1024, dtype=torch.uint8)
    with pytest.raises(OptionError, match=r"kv_disk_gb=.* does not hold two KV pages of \d+ bytes; raise it"):
        PageFiles(pages, tmp_path / "kv", "f" * 64, 4400, tp_size=2)
    assert PageFiles(pages, tmp_path / "kv", "f" * 64, 24000, tp_size=2).max_files == 10
    files = PageFiles(pages, tmp_path / "kv", "f" * 64, 2300)
    for ticket in (1, 2, 3):
        files.start(order(ticket, "write", ticket - 1))
        assert ended(files, 1) == {ticket: None} and len(list(files.folder.directory.iterdir())) == 1
