"""KV pages in memory that a writer and readers share: pages arrive as they were, or the load fails."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sidestream import CapacityError
from sidestream.runtime.scheduler.kv_cache import next_key
from sidestream.runtime.scheduler.step_plan import PageCopies
from sidestream.runtime.worker.transfer.page_reader import NOT_THERE, OTHER_MODEL, PageReader
from sidestream.runtime.worker.transfer.page_writer import PageWriter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGES, PLACES = 24, 8
SHAPES = (((3, PAGES, 2, 64, 32), torch.int8), ((3, PAGES, 2, 64), torch.float32))
MODEL = b"m" * 32
KEYS = [next_key(b"root", [index]) for index in range(PLACES)]


@dataclass
class Pair:
    """A writer and a reader with a copy of random caches each."""

    path: str
    source: list[torch.Tensor]
    target: list[torch.Tensor]
    writer: PageWriter
    reader: PageReader

    def save(self, ticket: int, saves: list[tuple[int, int]], keys: list[bytes]) -> None:
        self.writer.start(PageCopies(ticket, saves, [], keys=tuple(keys)))
        assert finished(self.writer) == [(ticket, None)]

    def load(self, ticket: int, loads: list[tuple[int, int]], keys: list[bytes]) -> str | None:
        """Return why it failed."""
        self.reader.start(PageCopies(ticket, [], loads, "one", tuple(keys)))
        ((found, problem),) = finished(self.reader)
        assert found == ticket
        return problem


def finished(copier: Any) -> list[tuple[int, str | None]]:
    found: list[tuple[int, str | None]] = []
    while not found:
        found = copier.finished(1.0)
    return found


def caches(device: str) -> list[torch.Tensor]:
    return [torch.randint(-99, 99, shape, device=device).to(dtype) for shape, dtype in SHAPES]


@pytest.fixture(params=DEVICES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    device = torch.device(request.param)
    source, target = caches(request.param), caches(request.param)
    handle = os.memfd_create("pages")
    os.truncate(handle, 1 << 20)
    path = f"/proc/self/fd/{handle}"
    writer, reader = PageWriter(source, device, path), PageReader(target, device, {"one": path})
    writer.fingerprint = reader.fingerprint = MODEL
    yield Pair(path, source, target, writer, reader)
    os.close(handle)


def test_pages_arrive_as_they_were(pair: Pair) -> None:
    before = [cache.clone() for cache in pair.target]
    pair.save(1, [(3, 0), (7, 5)], KEYS[:2])
    pair.save(2, [(20, 2)], KEYS[2:3])
    assert pair.load(9, [(5, 4), (2, 23)], [KEYS[1], KEYS[2]]) is None
    for cache, former, source in zip(pair.target, before, pair.source, strict=True):
        for page in range(PAGES):
            expected = source[:, {4: 7, 23: 20}[page]] if page in (4, 23) else former[:, page]
            assert torch.equal(cache[:, page], expected), page


def test_a_page_that_is_overwritten_during_the_load_is_noticed(pair: Pair) -> None:
    """The same key is there again, so only the generation tells."""
    pair.save(1, [(3, 0)], KEYS[:1])
    pair.reader.start(PageCopies(1, [], [(0, 4)], "one", (KEYS[0],)))
    pair.save(2, [(8, 0)], KEYS[1:2])
    pair.save(3, [(3, 0)], KEYS[:1])
    assert finished(pair.reader) == [(1, NOT_THERE)]
    assert pair.load(2, [(0, 4)], KEYS[:1]) is None


@pytest.mark.parametrize(
    ("place", "key"), [(1, KEYS[0]), (0, KEYS[1]), (0, bytes(32)), (PLACES * 999, KEYS[0]), (-1, KEYS[0])]
)
def test_only_the_page_with_the_key_is_read(pair: Pair, place: int, key: bytes) -> None:
    pair.save(1, [(3, 0), (4, 1)], KEYS[:2])
    before = [cache.clone() for cache in pair.target]
    assert pair.load(1, [(place, 4)], [key]) == NOT_THERE
    assert all(map(torch.equal, pair.target, before))
    assert pair.load(2, [(0, 4)], KEYS[:1]) is None


def test_a_page_that_is_being_saved_or_failed_to_be_saved_is_not_there(pair: Pair) -> None:
    pair.save(1, [(3, 0)], KEYS[:1])
    pair.writer.start(PageCopies(2, [(5, 0)], [], keys=(KEYS[1],)))
    assert pair.load(1, [(0, 4)], KEYS[:1]) == pair.load(2, [(0, 4)], KEYS[1:2]) == NOT_THERE
    # a second save to the place begins before the first one is reported
    pair.writer.start(PageCopies(3, [(PAGES, 0)], [], keys=(KEYS[2],)))
    ended = dict(finished(pair.writer))
    while len(ended) < 2:
        ended |= dict(finished(pair.writer))
    assert ended[2] is None and ended[3]
    for key in KEYS[:3]:
        assert pair.load(4, [(0, 4)], [key]) == NOT_THERE


def test_pages_of_another_model_or_a_former_life_are_not_read(pair: Pair) -> None:
    pair.save(1, [(3, 0)], KEYS[:1])
    pair.reader.fingerprint = b"o" * 32
    assert pair.load(1, [(0, 4)], KEYS[:1]) == OTHER_MODEL
    pair.reader.fingerprint = MODEL
    pair.reader.start(PageCopies(2, [], [(0, 4)], "two", (KEYS[0],)))
    assert "no engine with the memory 'two'" in str(finished(pair.reader))
    pair.writer.start(PageCopies(2, [], [], erase=True))
    assert finished(pair.writer) == [(2, None)]
    assert pair.load(3, [(0, 4)], KEYS[:1]) == NOT_THERE
    pair.save(3, [(3, 0)], KEYS[:1])
    assert pair.load(4, [(0, 4)], KEYS[:1]) is None
    again = PageWriter(pair.source, pair.source[0].device, pair.path)
    assert pair.load(5, [(0, 4)], KEYS[:1]) == OTHER_MODEL
    again.fingerprint = MODEL
    assert pair.load(6, [(0, 4)], KEYS[:1]) == NOT_THERE


def test_a_memory_that_holds_no_page_is_refused() -> None:
    handle = os.memfd_create("pages")
    os.truncate(handle, 9000)
    with pytest.raises(CapacityError, match=r"holds no page of \d+ bytes; raise kv_host_gb"):
        PageWriter(caches("cpu"), torch.device("cpu"), f"/proc/self/fd/{handle}")
    os.close(handle)
