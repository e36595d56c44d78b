"""The .safetensors file of one adapter, read into memory once and whole: in large pieces, hashed on the way and checked
for NaN and overflow, on some threads. Where its tensors lie is known before (`safetensors_header`).

What is hashed is what is used, whatever is written to the file meanwhile. While a piece is read, hashed or checked,
other threads run Python.
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

from .regular_file import name_of
from .safetensors_file import FLOATING
from .safetensors_header import Layout, damaged, open_file

PIECE = 16 << 20
READERS = 8
_CHANGED = "it was written to meanwhile"
LARGEST = 1 << 16
"""Magnitudes are below this, as in fp16: no trained weight comes near, and larger ones overflow in the model."""
_EXPONENT = {
    torch.bfloat16: (np.uint16, np.int16, 0x4780),
    torch.float16: (np.uint16, np.int16, 0x7C00),
    torch.float32: (np.uint32, np.int32, 0x47800000),
}


@cache
def readers() -> ThreadPoolExecutor:
    """Threads for what needs the interpreter only now and then: reading, hashing, checking. numpy's operations,
    unlike torch's, start none of their own.
    """
    return ThreadPoolExecutor(READERS, "adapter-content")


def read_fully(handle: int, target: NDArray[np.uint8], offset: int) -> None:
    """Fills `target` from a file descriptor's bytes at `offset`. Raises EOFError when the file ends before, OSError."""
    done = 0
    while done < target.size:
        count = os.preadv(handle, [target[done:].data], offset + done)
        if not count:
            raise EOFError("it has become shorter")
        done += count


class AdapterFile:
    """An open file whose tensors lie as `layout` says; the contents are there when `read` was called.

    digest   hash of the whole file (hex), after `read`

    `roots`: directories under one of which it must lie. Every fault is raised as `error`, with `remedy`.
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
        """Read the contents."""
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
        """Raises for NaN, infinity and values outside the range in what was read."""
        start, places = self._layout.header, self._layout.places
        kinds = {place.dtype for place in places.values()}
        if len(kinds) == 1 and not start % 4:  # in large pieces, whatever the tensors
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
                    f"{self._path.name}: tensor {name_of(name)} holds NaN, infinity or values from {LARGEST} on: "
                    "training diverged; use an earlier checkpoint of the adapter"
                )

    def data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, once they are read."""
        dtype, _, first, last = self._layout.places[name]
        found = self._memory[first:last]
        return found.copy() if first % FLOATING[dtype].itemsize else found

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, a view of the contents."""
        dtype, shape, *_ = self._layout.places[name]
        return torch.from_numpy(self.data(name)).view(FLOATING[dtype]).view(shape)

    def _damaged(self, problem: object) -> ValueError:
        return damaged(self._path, self._error, self._remedy, problem)


def in_range(data: NDArray[np.uint8], dtype: torch.dtype) -> bool:
    """Whether every value of `dtype` among these bytes is a number of a magnitude below LARGEST.

    As integers all others are the largest: from `exponent` on, and with a sign from there on in unsigned ones. So two
    maxima tell, and nothing is stored.
    """
    unsigned, signed, exponent = _EXPONENT[dtype]
    sign = 1 << (8 * dtype.itemsize - 1)
    return not data.size or (
        int(data.view(signed).max()) < exponent and int(data.view(unsigned).max()) < sign + exponent
    )
