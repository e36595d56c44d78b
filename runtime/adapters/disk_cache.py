"""Adapters that were packed once, kept on disk as their slots' bytes, so that they come back without being read,
checked and packed again.

Two kinds of files lie next to the kept programs, in `adapters`. `<key>.slot` holds one adapter's slot of every stack: a
header, with the key and a sha256 of each piece, and the bytes. `<key>.hash` holds the content hash of a PEFT adapter
whose values were found good, and a digest of itself. The keys cover all that these follow from, the sources of the
modules that make them included.
$SIDESTREAM_ADAPTER_CACHE_GB bounds their size (32 unless given; 0: nothing is kept). Deleting them is always safe.
"""

import hashlib
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...compiler.graph.recipe import Recipe
from ...compiler.options import OptionError
from ...compiler.program.cache import source_hash
from ...compiler.program.cache_folder import CacheFolder, cache_directory, write_fully
from ...graphs.adapter import Adapter
from ...graphs.adapter_file import read_fully, readers
from ...graphs.config import LlamaConfig
from ...graphs.lora import LoraShape
from .background import Background, Stopped

VARIABLE = "SIDESTREAM_ADAPTER_CACHE_GB"
DEFAULT_GB = 32.0
FORMAT = 2
SOURCES = ("packing.py", "store.py", "disk_cache.py")
PIECES = 8  # as many as there are readers
LARGEST_PIECE = 32 << 20
WRITTEN_AT_ONCE = 4 << 20
WRITE_PAUSE = 0.004
_PAGE = 4096
_CONTENT_HASH = re.compile(rb"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a slot's file says of itself: whose bytes, how many, and the sha256 of each `piece` of them."""

    format: int
    key: str
    size: int
    piece: int
    sums: list[str]


class SlotCache:
    """What is kept of adapters on this machine. Reading never raises: what is damaged counts as absent and is removed
    (logged).

    background   does the writing, when nothing else was asked for in a while
    """

    def __init__(self, folder: CacheFolder) -> None:
        self.folder = folder
        self.background = Background("adapter-keeper")
        self._warned = False

    @classmethod
    def from_environment(cls) -> "SlotCache | None":
        """The cache next to the kept programs; None when it is switched off.

        Raises OptionError for a size that is no number.
        """
        given = os.environ.get(VARIABLE) or str(DEFAULT_GB)
        try:
            size = float(given)
        except ValueError:
            size = math.nan
        if not 0 <= size < 1e9:
            raise OptionError(
                f"{VARIABLE}={given!r} must be a number of gigabytes, such as {DEFAULT_GB:.0f}; 0 keeps nothing"
            )
        return cls(CacheFolder(cache_directory() / "adapters", int(size * 1e9))) if size else None

    # -- content hashes --------------------------------------------------------------------------------------------

    def recall(self, source: str) -> str | None:
        """The content hash that was found for an adapter's `source`."""
        content = self.folder.recall(_hash_name(source))
        if content is None:
            return None
        if not _CONTENT_HASH.fullmatch(content):
            self.forget(source)
            return None
        return content.decode("ascii")

    def remember(self, adapter: Adapter) -> None:
        """Keep an adapter's content hash, soon."""
        name, content = _hash_name(adapter.source), adapter.content_hash.encode("ascii")
        self.background.later(lambda stopped: self._attempt(lambda: self.folder.keep(name, content)))

    def forget(self, source: str) -> None:
        """A content hash turned out to be wrong."""
        self.folder.damaged(_hash_name(source), "it is not the adapter's content hash")

    # -- slots -----------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether there is a slot of this key, good or damaged."""
        return f"{key}.slot" in self.folder

    def load(self, key: str, memory: NDArray[np.uint8]) -> bool:
        """Fill `memory` with the slot's bytes; False, and anything in `memory`, when it is absent or damaged."""
        name, fault = f"{key}.slot", ""
        with self.folder.reading(name) as handle:
            if handle is None:
                return False
            try:
                fault = _read_slot(handle, key, memory)
            except (OSError, EOFError, ValueError) as error:  # msgspec's errors are ValueErrors
                fault = str(error)
        if fault:
            self.folder.damaged(name, fault)
        return not fault

    def save(self, key: str, memory: NDArray[np.uint8], stopped: threading.Event | None = None) -> None:
        """Keep a slot; a full or read-only disk only costs the next start its time (logged).

        Raises Stopped once `stopped` is set, and has kept nothing.
        """
        size, piece = memory.nbytes, _piece(memory.nbytes)

        def fill(handle: int) -> None:
            os.lseek(handle, _header_size(size), os.SEEK_SET)
            sums = [hashlib.sha256() for _ in range(0, size, piece)]
            for first in range(0, size, piece):
                for begin in range(first, min(first + piece, size), WRITTEN_AT_ONCE):
                    part = memory[begin : min(begin + WRITTEN_AT_ONCE, first + piece)].data
                    sums[first // piece].update(part)
                    write_fully(handle, part)
                    if stopped is not None and stopped.wait(WRITE_PAUSE):
                        raise Stopped
            header = msgspec.json.encode(Header(FORMAT, key, size, piece, [digest.hexdigest() for digest in sums]))
            os.pwrite(handle, header.ljust(_header_size(size), b" "), 0)

        self._attempt(lambda: self.folder.write(f"{key}.slot", size + _header_size(size), fill))

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "packed adapters are not kept for the next start: %s; free space there, or set SIDESTREAM_CACHE",
                    error,
                )
            self._warned = True


def packing_key(
    recipes: Mapping[str, Recipe],
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    dtype: torch.dtype,
    config: LlamaConfig,
    lora: LoraShape,
    constants: Mapping[str, torch.Tensor],
) -> str:
    """A hash of everything, but an adapter's content, that decides its slots' bytes: recipes and the constants that
    they name, shapes and dtypes, sources, releases, the processor's kind.
    """
    content = {
        "sources": _sources(),
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "config": asdict(config),
        "lora": [lora.rank, *lora.targets],
        "dtype": str(dtype),
        "slots": [[list(shape), str(kind)] for shape, kind in shapes],
        "constants": {
            name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() for name, value in constants.items()
        },
        "recipes": [f"{name}: {recipe}" for name, recipe in recipes.items()],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def slot_key(packing: str, content_hash: str) -> str:
    """Under which the slot of an adapter is kept."""
    return hashlib.sha256(f"{packing} {content_hash}".encode()).hexdigest()


def _hash_name(source: str) -> str:
    return hashlib.sha256(f"{_sources()} {source}".encode()).hexdigest() + ".hash"


@lru_cache(maxsize=1)
def _sources() -> str:
    digest = hashlib.sha256(f"{FORMAT} {source_hash()}".encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def _piece(size: int) -> int:
    """Bytes under one checksum: few pieces, as each asks for the interpreter, and yet several to read at a time."""
    return min(LARGEST_PIECE, max(1, -(-size // (PIECES * _PAGE))) * _PAGE)


def _header_size(size: int) -> int:
    """Bytes before the slot's own: whole pages, with room for every checksum."""
    return -(-(512 + 72 * -(-size // _piece(size))) // _PAGE) * _PAGE


def _read_slot(handle: int, key: str, memory: NDArray[np.uint8]) -> str:
    """What is wrong with a file; empty when `memory` holds its bytes."""
    size, piece, start = memory.nbytes, _piece(memory.nbytes), _header_size(memory.nbytes)
    if os.fstat(handle).st_size != start + size:
        return f"it has {os.fstat(handle).st_size} bytes instead of {start + size}"
    header = msgspec.json.decode(os.pread(handle, start, 0), type=Header)
    if header != Header(FORMAT, key, size, piece, header.sums) or len(header.sums) != -(-size // piece):
        return "its header is another's"

    def read(place: int) -> bool:
        part = memory[place * piece : (place + 1) * piece]
        read_fully(handle, part, start + place * piece)
        return hashlib.sha256(part.data).hexdigest() == header.sums[place]

    return "" if all(list(readers().map(read, range(len(header.sums))))) else "its checksum is wrong"
