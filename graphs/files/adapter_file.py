"""One adapter's .safetensors file, read into memory once: in large pieces, hashed and checked on several threads.

The hash covers exactly the bytes that are used, even if the file changes at the same time. Reading, hashing and
checking a piece releases the GIL.
"""

import hashlib
import math
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from .safetensors_file import FLOATING, LARGEST, in_range, read_fully
from .safetensors_header import Layout, damaged, open_file
from .untrusted_files import name_of
from .update_file import UpdateFile

PIECE = 4 << 20
READERS = 8
_CHANGED = "it changed while it was read"


@cache
def readers() -> ThreadPoolExecutor:
    """Return the thread pool for reading, hashing and checking. The checks use numpy: torch would add own threads."""
    return ThreadPoolExecutor(READERS, "adapter-content")


def read_private(handle: int, nbytes: int) -> NDArray[np.uint8]:
    """Read the first bytes of an open file into new memory, on several threads. Raises EOFError and OSError."""
    memory = np.empty(nbytes, np.uint8)

    def read(start: int) -> None:
        read_fully(handle, memory[start : start + PIECE], start)

    list(readers().map(read, range(0, nbytes, PIECE)))
    return memory


class AdapterFile:
    """An open file with the tensors of `layout`; `read` loads its contents, but not the tensors in `left`.

    digest   hash of the loaded bytes (hex), after `read` with `hashed`

    `roots`: directories; the file must be inside one of them (None: anywhere). `update`: an open file, which is read in
    place of `path`, or its contents. Every failure is raised as `error`, with `remedy`.
    """

    def __init__(
        self,
        path: Path,
        error: type[ValueError],
        remedy: str,
        layout: Layout,
        roots: Sequence[Path] | None = None,
        left: Collection[str] = (),
        update: UpdateFile | None = None,
    ) -> None:
        self._path, self._error, self._remedy, self._layout = path, error, remedy, layout
        self.digest = ""
        self._memory = np.empty(0, np.uint8)
        self._pieces = _pieces(layout, left)
        self._left = left
        self._contents = None if update is None else update.contents
        opened = None if update is None else update.handle
        self._file = open(open_file(path, error, remedy, roots, opened), "rb", buffering=0)  # noqa: SIM115  see __exit__
        if os.fstat(self._file.fileno()).st_size != layout.size:
            self._file.close()
            raise self._damaged(_CHANGED)

    def __enter__(self) -> "AdapterFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, hashed: bool = True) -> None:
        """Read the file; with `hashed` set `digest`. Raises `error` if it cannot be read or has changed."""
        contents = self._contents
        # the kernel provides memory for the parts that are written
        memory = np.empty(self._layout.size, np.uint8) if contents is None else contents

        def digest(piece: slice) -> bytes:
            if contents is None:
                read_fully(self._file.fileno(), memory[piece], piece.start)
            return hashlib.sha256(memory[piece].data).digest() if hashed else b""

        try:
            digests = list(readers().map(digest, self._pieces if hashed or contents is None else ()))
        except (OSError, EOFError) as problem:
            raise self._damaged(problem) from None
        header = memory[: self._layout.header]
        if memory.size != self._layout.size or hashlib.sha256(header.data).hexdigest() != self._layout.header_sum:
            raise self._damaged(_CHANGED)
        self._memory = memory
        self.digest = hashlib.sha256(b"".join(digests)).hexdigest() if hashed else ""

    def check_values(self) -> None:
        """Raise `error` for NaN, infinity and magnitudes of at least LARGEST."""
        start = self._layout.header
        places = {name: place for name, place in self._layout.places.items() if name not in self._left}
        kinds = {place.dtype for place in places.values()}
        aligned = not start % 4 and not any(piece.start % 4 for piece in self._pieces)
        if len(kinds) == 1 and aligned:  # large pieces are faster than tensor by tensor
            dtype = FLOATING[kinds.pop()]
            if all(
                readers().map(
                    lambda piece: in_range(self._memory[max(start, piece.start) : piece.stop], dtype), self._pieces
                )
            ):
                return
        for name, place in places.items():
            if not in_range(self.data(name), FLOATING[place.dtype]):
                raise self._error(
                    f"{self._path.name}: tensor {name_of(name)} has NaN, infinity or magnitudes of {LARGEST} or more: "
                    "training diverged; use an earlier checkpoint of the adapter"
                )

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, after `read`."""
        dtype, _, first, last = self._layout.places[name]
        found = self._memory[first:last]
        return found.copy() if first % FLOATING[dtype].itemsize else found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._layout.places[name].shape

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Read some rows of a tensor that `read` leaves out. Raises `error`."""
        dtype, shape, start, _ = self._layout.places[name]
        row = FLOATING[dtype].itemsize * math.prod(shape[1:])
        memory = np.empty((end - first) * row, np.uint8)
        try:
            if self._contents is None:
                read_fully(self._file.fileno(), memory, start + first * row)
            else:
                memory[:] = self._contents[start + first * row : start + end * row]
        except (OSError, EOFError) as problem:
            raise self._damaged(problem) from None
        return torch.from_numpy(memory).view(FLOATING[dtype]).view(end - first, *shape[1:])

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, a view of the contents."""
        dtype, shape, *_ = self._layout.places[name]
        return torch.from_numpy(self.data(name)).view(FLOATING[dtype]).view(shape)

    def _damaged(self, problem: object) -> ValueError:
        return damaged(self._path, self._error, self._remedy, problem)


def _pieces(layout: Layout, left: Collection[str]) -> list[slice]:
    """Return the file's bytes in pieces of at most PIECE bytes, without the tensors in `left`."""
    pieces, begin = [], 0
    for first, last in (*sorted(layout.places[name][2:] for name in left), (layout.size, layout.size)):
        pieces += [slice(start, min(start + PIECE, first)) for start in range(begin, first, PIECE)]
        begin = last
    return pieces
