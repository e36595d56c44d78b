"""Saves KV pages of a prefill engine to memory that decode engines read."""

import torch

from ...api.errors import CapacityError
from ...scheduler.step_plan import PageCopies
from .page_copier import PageCopier, page_bytes
from .shared_memory import SharedMemory


class PageWriter(PageCopier):
    """A `PageCopier` whose host memory is the `SharedMemory` at `path`. Other engines find a page once it is saved.

    num_pages    number of host pages
    fingerprint  of the pages' model and format; until it is set, no engine reads them

    Raises CapacityError if the memory holds no page.
    """

    def __init__(self, stacks: list[torch.Tensor], device: torch.device, path: str) -> None:
        self.page_bytes = page_bytes(stacks)
        self._memory = SharedMemory(path, self.page_bytes, writable=True)
        self._memory.fingerprint = bytes(len(self._memory.fingerprint))
        self._memory.erase()
        self.num_pages = self._memory.num_pages
        if not self.num_pages:
            raise CapacityError(f"the memory for KV pages holds no page of {self.page_bytes} bytes; raise kv_host_gb")
        super().__init__(stacks, self.num_pages, device, self._memory.pages)
        self._writers: dict[int, int] = {}  # place -> ticket of the last save to it
        self._saving: dict[int, PageCopies] = {}

    @property
    def fingerprint(self) -> bytes:
        return self._memory.fingerprint

    @fingerprint.setter
    def fingerprint(self, value: bytes) -> None:
        self._memory.fingerprint = value

    def start(self, copies: PageCopies) -> None:
        if copies.erase:
            self._writers.clear()
            self._memory.erase()
        for _, place in copies.saves:
            self._memory.begin(place)
            self._writers[place] = copies.ticket
        if copies.saves:
            self._saving[copies.ticket] = copies
        super().start(copies)

    def finished(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        ended = super().finished(timeout)
        for ticket, problem in ended:
            copies = self._saving.pop(ticket, None)
            if copies is None:
                continue
            for (_, place), key in zip(copies.saves, copies.keys, strict=True):
                if self._writers.get(place) == ticket:  # else a later save writes to it, or it was erased
                    del self._writers[place]
                    if problem is None:
                        self._memory.end(place, key)
        return ended
