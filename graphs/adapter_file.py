"""One adapter's .safetensors file, read into memory once: in large pieces, hashed and checked on several threads.

The hash covers exactly the bytes that are used, even if the file changes at the same time. Reading, hashing and
checking a piece releases the GIL.
"""

import hashlib
import os
from collections.abc import Sequence
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

PIECE = 16 << 20
READERS = 8
_CHANGED = "it changed while it was read"


@cache
def readers() -> ThreadPoolExecutor:
    """Return the thread pool for reading, hashing and checking. The checks use numpy: torch would add own threads."""
    return ThreadPoolExecutor(READERS, "adapter-content")


class AdapterFile:
    """An open file with the tensors of `layout`; `read` loads its contents.

    digest   hash of the whole file (hex), after `read`

    `roots`: directories; the file must be inside one of them (None: anywhere). Every failure is raised as `error`, with
    `remedy`.
    """

    def __init__(
        self, path: Path, error: type[ValueError], remedy: str, layout: Layout, roots: Sequence[Path] | None = None
    ) -> None:
        self._path, self._error, self._remedy, self._layout = path, error, remedy, layout
        self.digest = ""
        self._memory = np.empty(0, np.uint8)
        self._file = open(open_file(path, error, remedy, roots), "rb", buffering=0)  # noqa: SIM115  see __exit__
        if os.fstat(self._file.fileno()).st_size != layout.size:
            self._file.close()
            raise self._damaged(_CHANGED)

    def __enter__(self) -> "AdapterFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self) -> None:
        """Read the whole file and set `digest`. Raises `error` if it cannot be read or has changed."""
        size = self._layout.size
        memory = np.empty(size, np.uint8)

        def digest(first: int) -> bytes:
            piece = memory[first : first + PIECE]
            read_fully(self._file.fileno(), piece, first)
            return hashlib.sha256(piece.data).digest()

        try:
            digests = list(readers().map(digest, range(0, size, PIECE)))
        except (OSError, EOFError) as problem:
            raise self._damaged(problem) from None
        if hashlib.sha256(memory[: self._layout.header].data).hexdigest() != self._layout.header_sum:
            raise self._damaged(_CHANGED)
        self._memory = memory
        self.digest = hashlib.sha256(b"".join(digests)).hexdigest()

    def check_values(self) -> None:
        """Raise `error` for NaN, infinity and magnitudes of at least LARGEST."""
        start, places = self._layout.header, self._layout.places
        kinds = {place.dtype for place in places.values()}
        if len(kinds) == 1 and not start % 4:  # large pieces are faster than tensor by tensor
            dtype = FLOATING[kinds.pop()]
            if all(
                readers().map(
                    lambda first: in_range(self._memory[max(start, first) : first + PIECE], dtype),
                    range(0, self._layout.size, PIECE),
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

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, a view of the contents."""
        dtype, shape, *_ = self._layout.places[name]
        return torch.from_numpy(self.data(name)).view(FLOATING[dtype]).view(shape)

    def _damaged(self, problem: object) -> ValueError:
        return damaged(self._path, self._error, self._remedy, problem)
