"""The .safetensors file of one adapter, read into memory once and whole: in large pieces, hashed on the way and checked
for NaN and overflow, on some threads.

What is hashed is what is used, whatever is written to the file meanwhile. While a piece is read, hashed or checked,
other threads run Python.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .quoting import name_of, value_of
from .regular_file import FileRefusedError, open_regular
from .safetensors_file import FLOATING

PIECE = 16 << 20
READERS = 8
_HEADER_BYTES = 64 << 10
_HEADER_BYTES_PER_TENSOR = 256  # some 170 in PEFT's files; JSON is parsed without giving the interpreter away
_MOST_DIMENSIONS = 8
_LARGEST_SIZE = 1 << 48
_DTYPES = ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "I32", "U32", "I64", "U64", "F64")
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
    """An open file. Its header is read, and proven to describe all of it, at once; the contents when `read` is called.

    shapes, dtypes  by tensor, the dtypes spelled as in the file
    digest          hash of the whole file (hex), after `read`

    `most`: tensors that it may have; its header is bounded by that before it is read. `roots`: directories under one
    of which it must lie. Every fault is raised as `error`, with `remedy`.
    """

    def __init__(
        self, path: Path, error: type[ValueError], remedy: str, most: int, roots: Sequence[Path] | None = None
    ) -> None:
        self._path, self._error, self._remedy = path, error, remedy
        self.digest = ""
        self._memory = np.empty(0, np.uint8)
        try:
            handle = open_regular(path, roots)
            self._file = open(handle, "rb", buffering=0)  # noqa: SIM115  closed by __exit__
        except FileNotFoundError:
            raise error(f"{path.name} is missing from {path.parent}: {remedy}") from None
        except FileRefusedError as problem:
            raise error(f"{path.name} {problem}: put the file itself there") from None
        except OSError as problem:
            raise error(f"{path.name} cannot be read ({problem.strerror}): check its permissions") from None
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._header, self._places = _parse(self._file.fileno(), self._size, most)
        except (OSError, EOFError, ValueError) as problem:
            self._file.close()
            raise self._damaged(problem) from None
        self.shapes: dict[str, tuple[int, ...]] = {name: shape for name, (_, shape, _, _) in self._places.items()}
        self.dtypes: dict[str, str] = {name: dtype for name, (dtype, _, _, _) in self._places.items()}

    def __enter__(self) -> "AdapterFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def check_floating(self, name: str) -> None:
        """Raises unless the tensor is bf16, fp16 or fp32."""
        if self.dtypes[name] not in FLOATING:
            raise self._error(
                f"{self._path.name}: tensor {name_of(name)} has dtype {value_of(self.dtypes[name], _DTYPES)}, expected "
                f"one of {', '.join(FLOATING)}: save it unquantized"
            )

    def read(self) -> None:
        """Read the contents, once every tensor has passed `check_floating`."""
        memory = np.empty(self._size, np.uint8)

        def digest(first: int) -> bytes:
            piece = memory[first : first + PIECE]
            read_fully(self._file.fileno(), piece, first)
            return hashlib.sha256(piece.data).digest()

        try:
            digests = list(readers().map(digest, range(0, self._size, PIECE)))
        except (OSError, EOFError) as problem:
            raise self._damaged(problem) from None
        if memory[: len(self._header)].tobytes() != self._header:
            raise self._damaged("it was written to meanwhile")
        self._memory = memory
        self.digest = hashlib.sha256(b"".join(digests)).hexdigest()

    def check_values(self) -> None:
        """Raises for NaN, infinity and values outside the range in what was read."""
        start, kinds = len(self._header), set(self.dtypes.values())
        if len(kinds) == 1 and not start % 4:  # in large pieces, whatever the tensors
            dtype = FLOATING[kinds.pop()]
            if all(
                readers().map(
                    lambda first: in_range(self._memory[max(start, first) : first + PIECE], dtype),
                    range(0, self._size, PIECE),
                )
            ):
                return
        for name in self.shapes:
            if not in_range(self.data(name), FLOATING[self.dtypes[name]]):
                raise self._error(
                    f"{self._path.name}: tensor {name_of(name)} holds NaN, infinity or values from {LARGEST} on: "
                    "training diverged; use an earlier checkpoint of the adapter"
                )

    def data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, once they are read."""
        dtype, _, first, last = self._places[name]
        found = self._memory[first:last]
        return found.copy() if first % FLOATING[dtype].itemsize else found

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, a view of the contents."""
        return torch.from_numpy(self.data(name)).view(FLOATING[self.dtypes[name]]).view(self.shapes[name])

    def _damaged(self, problem: object) -> ValueError:
        return self._error(f"{self._path.name} is damaged or truncated ({problem}): {self._remedy}")


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


def _parse(handle: int, size: int, most: int) -> tuple[bytes, dict[str, tuple[str, tuple[int, ...], int, int]]]:
    """(everything before the data, tensor -> dtype, shape, first and last byte in the file).

    Raises ValueError for what is no safetensors file.
    """
    start = np.empty(8, np.uint8)
    read_fully(handle, start, 0)
    length = int.from_bytes(start.tobytes(), "little")
    if length > min(size - 8, _HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * most):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = np.empty(8 + length, np.uint8)
    read_fully(handle, header, 0)
    try:
        entries = json.loads(header[8:].tobytes())
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError("its header is not JSON") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is no object")
    entries.pop("__metadata__", None)
    if len(entries) > most:
        raise ValueError(f"{len(entries)} tensors, where {most} are the most that this base allows")
    places = {name: _place(name, entry, header.size) for name, entry in entries.items()}
    end = header.size
    for _, _, first, last in sorted(places.values(), key=lambda place: place[2:]):
        if first != end or last < first:
            raise ValueError("its tensors overlap or leave gaps")
        end = last
    if end != size:
        raise ValueError(f"{size} bytes instead of {end}")
    return header.tobytes(), places


def _place(name: str, entry: Any, start: int) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tensor {name_of(name)} is not described") from None
    if len(shape) > _MOST_DIMENSIONS or not all(
        type(size) is int and 0 <= size < _LARGEST_SIZE for size in (*shape, first, last)
    ):
        raise ValueError(f"tensor {name_of(name)} has sizes that are no counts")
    if dtype in FLOATING and last - first != math.prod(shape) * FLOATING[dtype].itemsize:
        raise ValueError(f"tensor {name_of(name)} has {last - first} bytes")
    return dtype, shape, start + first, start + last
