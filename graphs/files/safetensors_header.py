"""Header of an adapter's .safetensors file; validated, so that its tensors cover the whole file without gaps."""

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
"""Dtype of an adapter's tensors, spelled as in the file -> bytes of an element."""
_HEADER_BYTES = 64 << 10
_HEADER_BYTES_PER_TENSOR = 256  # PEFT's files have about 170
_MOST_DIMENSIONS = 8
_LARGEST_SIZE = 1 << 48


class Place(NamedTuple):
    """Dtype, shape and location of one tensor: bytes `first` to `last` (exclusive) of the file."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes and tensors of a file.

    size        bytes of the file
    header      bytes before the data
    header_sum  sha256 (hex) of these
    places      tensor name -> location
    """

    size: int
    header: int
    header_sum: str
    places: dict[str, Place]

    def is_inside_file(self, name: str) -> bool:
        """Return whether the tensor has a floating dtype and the right number of bytes within the file's data.

        `read_layout` checks this; call it on layouts from another process.
        """
        dtype, shape, first, last = self.places[name]
        return (
            dtype in ITEM_BYTES
            and min(shape, default=0) >= 0
            and 8 <= self.header <= first <= last <= self.size
            and last - first == math.prod(shape) * ITEM_BYTES[dtype]
        )


def open_file(
    path: Path,
    error: type[ValueError],
    remedy: str,
    roots: Sequence[Path] | None = None,
    opened: int | None = None,
) -> int:
    """Return a file descriptor for reading. `roots`: directories; the file must be inside one of them (None: anywhere).

    `opened`: descriptor of an open file, which is read in place of `path`. Every failure is raised as `error`, with
    `remedy`.
    """
    if opened is not None:
        return os.dup(opened)
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
    """A header describes more tensors than allowed."""


def read_layout(
    path: Path,
    error: type[ValueError],
    remedy: str,
    max_tensors: int,
    roots: Sequence[Path] | None = None,
    *,
    foreign: str,
    opened: int | None = None,
) -> Layout:
    """Read and validate the header. `max_tensors` also limits the header's size. `opened`: see `open_file`.

    Failures are raised as `error`: too many tensors with the remedy `foreign`, all others with `remedy`.
    """
    handle = open_file(path, error, remedy, roots, opened)
    try:
        return _parse(handle, os.fstat(handle).st_size, max_tensors)
    except _TooManyTensorsError as problem:
        raise error(f"{path.name} has {problem}: {foreign}") from None
    except (OSError, EOFError, ValueError) as problem:
        if opened is None and is_lfs_pointer(path, roots):
            raise error(f"{path.name} {LFS_POINTER}") from None
        raise damaged(path, error, remedy, problem) from None
    finally:
        os.close(handle)


def read_config(handle: int, layout: Layout) -> dict[str, Any]:
    """Return the fields of an adapter's config in an open file with this layout. Raises ValueError.

    The config is JSON in the header's `__metadata__`, under `adapter_config`.
    """
    try:
        entries = json.loads(_read(handle, layout.header - 8, 8))
        fields = json.loads(entries["__metadata__"]["adapter_config"])
    except (EOFError, KeyError, TypeError, ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError("__metadata__ of its header has no adapter_config with a JSON object")
    return fields


def _parse(handle: int, size: int, max_tensors: int) -> Layout:
    """Return the layout. Raises ValueError for an invalid header, _TooManyTensorsError for too many tensors."""
    length = int.from_bytes(_read(handle, 8, 0), "little")
    longest = _HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * max_tensors
    if length > size - 8 or (length > longest and _read(handle, 1, 8) != b"{"):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    if length > longest:
        raise _TooManyTensorsError(
            f"a header of {length} bytes; at most {longest} are allowed for {max_tensors} tensors"
        )
    header = _read(handle, 8 + length, 0)
    try:
        entries = json.loads(header[8:])
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError("its header is not JSON") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    entries.pop("__metadata__", None)
    if len(entries) > max_tensors:
        raise _TooManyTensorsError(f"{len(entries)} tensors; at most {max_tensors} are allowed")
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
            raise EOFError("it became shorter while it was read")
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
        raise ValueError(f"tensor {name_of(name)} has invalid sizes")
    if dtype in ITEM_BYTES and last - first != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name_of(name)} has {last - first} bytes")
    return Place(dtype, shape, start + first, start + last)
