"""Header of an adapter's .safetensors file, validated to describe the whole file."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .untrusted_files import LFS_POINTER, FileRefusedError, is_lfs_pointer, name_of, open_regular

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Of the dtypes that adapters may have, spelled as in the file."""
_HEADER_BYTES = 64 << 10
_HEADER_BYTES_PER_TENSOR = 256  # some 170 in PEFT's files
_MOST_DIMENSIONS = 8
_LARGEST_SIZE = 1 << 48


class Place(NamedTuple):
    """One tensor; its bytes are `first` to `last` (exclusive) of the file."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of `size` bytes with `header` bytes before the data; `header_sum` is their sha256 (hex)."""

    size: int
    header: int
    header_sum: str
    places: dict[str, Place]

    def lies_inside(self, name: str) -> bool:
        """Whether the tensor has a floating dtype and the right number of bytes inside the file's data.

        True after `read_layout`; for layouts from another process.
        """
        dtype, shape, first, last = self.places[name]
        return (
            dtype in ITEM_BYTES
            and min(shape, default=0) >= 0
            and 8 <= self.header <= first <= last <= self.size
            and last - first == math.prod(shape) * ITEM_BYTES[dtype]
        )


def open_file(path: Path, error: type[ValueError], remedy: str, roots: Sequence[Path] | None = None) -> int:
    """Return a file descriptor for reading. `roots`: directories, one of which must contain the file.

    Every fault is raised as `error`, with `remedy`.
    """
    try:
        return open_regular(path, roots)
    except FileNotFoundError:
        raise error(f"{path.name} is missing from {path.parent}: {remedy}") from None
    except FileRefusedError as problem:
        raise error(f"{path.name} {problem}: put the file itself there") from None
    except OSError as problem:
        raise error(f"{path.name} cannot be read ({problem.strerror}): check its permissions") from None


def damaged(path: Path, error: type[ValueError], remedy: str, problem: object) -> ValueError:
    """Return the error for a file that contradicts its header."""
    return error(f"{path.name} is damaged or truncated ({problem}): {remedy}")


class _TooManyTensorsError(ValueError):
    """A header with more tensors than allowed."""


def read_layout(
    path: Path, error: type[ValueError], remedy: str, most: int, roots: Sequence[Path] | None = None, *, foreign: str
) -> Layout:
    """Read the header. `most`: allowed number of tensors, which limits the header's size.

    Faults are raised as `error`: too many tensors with the text `foreign`, all others with `remedy`.
    """
    handle = open_file(path, error, remedy, roots)
    try:
        return _parse(handle, os.fstat(handle).st_size, most)
    except _TooManyTensorsError as problem:
        raise error(f"{path.name} has {problem}: {foreign}") from None
    except (OSError, EOFError, ValueError) as problem:
        if is_lfs_pointer(path, roots):
            raise error(f"{path.name} {LFS_POINTER}") from None
        raise damaged(path, error, remedy, problem) from None
    finally:
        os.close(handle)


def _parse(handle: int, size: int, most: int) -> Layout:
    """Raise ValueError for other files, _TooManyTensorsError for more than `most` tensors."""
    length = int.from_bytes(_read(handle, 8, 0), "little")
    longest = _HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * most
    if length > size - 8 or (length > longest and _read(handle, 1, 8) != b"{"):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    if length > longest:
        raise _TooManyTensorsError(f"a header of {length} bytes, and {longest} are the most for {most} tensors")
    header = _read(handle, 8 + length, 0)
    try:
        entries = json.loads(header[8:])
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError("its header is not JSON") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is no object")
    entries.pop("__metadata__", None)
    if len(entries) > most:
        raise _TooManyTensorsError(f"{len(entries)} tensors, and {most} are the most")
    places = {name: _place(name, entry, len(header)) for name, entry in entries.items()}
    end = len(header)
    for place in sorted(places.values(), key=lambda place: place[2:]):
        if place.first != end or place.last < place.first:
            raise ValueError("its tensors overlap or leave gaps")
        end = place.last
    if end != size:
        raise ValueError(f"{size} bytes instead of {end}")
    return Layout(size, len(header), hashlib.sha256(header).hexdigest(), places)


def _read(handle: int, count: int, offset: int) -> bytes:
    found = b""
    while len(found) < count:
        part = os.pread(handle, count - len(found), offset + len(found))
        if not part:
            raise EOFError("it has become shorter")
        found += part
    return found


def _place(name: str, entry: Any, start: int) -> Place:
    try:
        dtype, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tensor {name_of(name)} is not described") from None
    if len(shape) > _MOST_DIMENSIONS or not all(
        type(size) is int and 0 <= size < _LARGEST_SIZE for size in (*shape, first, last)
    ):
        raise ValueError(f"tensor {name_of(name)} has sizes that are no counts")
    if dtype in ITEM_BYTES and last - first != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name_of(name)} has {last - first} bytes")
    return Place(dtype, shape, start + first, start + last)
