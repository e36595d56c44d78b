"""Cache packed adapters on disk as their slots' bytes, so that a later start skips reading, checking and packing.

The folder `adapters` of the cache directory has two kinds of files. `<key>.slot` is one adapter's slot of every stack:
a header with the key and a sha256 per chunk, and the bytes. `<key>.hash` is the content hash of a checked PEFT adapter.
The keys cover all inputs, including the sources of the modules that make the files.

$SIDESTREAM_ADAPTER_CACHE_GB bounds their size (default 32; 0 disables the cache). Deleting files is always safe.
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
from ...graphs.config import LlamaConfig
from ...graphs.files.adapter_file import read_fully, readers
from ...graphs.lora import LoraShape
from .background_jobs import BackgroundJobs, JobCancelled

SIZE_VARIABLE = "SIDESTREAM_ADAPTER_CACHE_GB"
DEFAULT_GB = 32.0
FORMAT = 2
SOURCES = ("packing.py", "host_memory.py", "host_store.py", "disk_cache.py")
NUM_CHUNKS = 8  # as many as there are readers
MAX_CHUNK_BYTES = 32 << 20
WRITE_BYTES = 4 << 20
WRITE_PAUSE = 0.004
_ALIGNMENT = 4096
_CONTENT_HASH = re.compile(rb"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header of a slot's file. `sums`: the sha256 of each `chunk` bytes."""

    format: int
    key: str
    size: int
    chunk: int
    sums: list[str]


_decode_header = msgspec.json.Decoder(Header).decode


class AdapterDiskCache:
    """Cached adapters of this machine. Reading never raises: damaged files are logged and removed."""

    def __init__(self, folder: CacheFolder) -> None:
        self.folder = folder
        self.jobs = BackgroundJobs("adapter-keeper")
        self._warned = False

    @classmethod
    def from_environment(cls) -> "AdapterDiskCache | None":
        """Return the cache, or None if it is disabled. Raises OptionError for a size that is not a number."""
        text = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_GB)
        try:
            size = float(text)
        except ValueError:
            size = math.nan
        if not 0 <= size < 1e9:
            raise OptionError(
                f"{SIZE_VARIABLE}={text!r} must be a number of gigabytes, such as {DEFAULT_GB:.0f}; 0 disables it"
            )
        return cls(CacheFolder(cache_directory() / "adapters", int(size * 1e9))) if size else None

    def find_hash(self, source: str) -> str | None:
        """Return the content hash of an adapter by its `source`, or None."""
        content = self.folder.recall(_hash_name(source))
        if content is None:
            return None
        if not _CONTENT_HASH.fullmatch(content):
            self.remove_hash(source)
            return None
        return content.decode("ascii")

    def save_hash_later(self, adapter: Adapter) -> None:
        """Write an adapter's content hash in the background."""
        name, content = _hash_name(adapter.source), adapter.content_hash.encode("ascii")
        self.jobs.submit(lambda stopped: self._try_to_write(lambda: self.folder.keep(name, content)))

    def remove_hash(self, source: str) -> None:
        """Remove a content hash that is wrong."""
        self.folder.damaged(_hash_name(source), "it is not the adapter's content hash")

    def has(self, key: str) -> bool:
        """Return whether there is a slot of this key, intact or damaged."""
        return f"{key}.slot" in self.folder

    def load(self, key: str, memory: NDArray[np.uint8]) -> bool:
        """Fill `memory` with the slot's bytes. Returns False, with undefined `memory`, if absent or damaged."""
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
        """Write a slot; log write errors. Raises JobCancelled, having written nothing, once `stopped` is set."""
        size, chunk = memory.nbytes, _chunk_size(memory.nbytes)

        def fill(handle: int) -> None:
            os.lseek(handle, _header_size(size), os.SEEK_SET)
            sums = [hashlib.sha256() for _ in range(0, size, chunk)]
            for first in range(0, size, chunk):
                for begin in range(first, min(first + chunk, size), WRITE_BYTES):
                    part = memory[begin : min(begin + WRITE_BYTES, first + chunk)].data
                    sums[first // chunk].update(part)
                    write_fully(handle, part)
                    if stopped is not None and stopped.wait(WRITE_PAUSE):
                        raise JobCancelled
            header = msgspec.json.encode(Header(FORMAT, key, size, chunk, [digest.hexdigest() for digest in sums]))
            os.pwrite(handle, header.ljust(_header_size(size), b" "), 0)

        self._try_to_write(lambda: self.folder.write(f"{key}.slot", size + _header_size(size), fill))

    def _try_to_write(self, write: Callable[[], None]) -> None:
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
    base: str = "",
    processor: str = "",
) -> str:
    """Return a hash of all inputs of a slot's bytes except the adapter's content. `base`: stamp of the base's weights,
    on which adapters' parts depend. `processor`: the GPU that packs; default: this CPU.
    """
    content = {
        "sources": _sources(),
        "torch": torch.__version__,
        "processor": processor or torch.backends.cpu.get_cpu_capability(),
        "config": asdict(config),
        "lora": [lora.rank, *lora.targets],
        "dtype": str(dtype),
        "slots": [[list(shape), str(kind)] for shape, kind in shapes],
        "constants": {
            name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() for name, value in constants.items()
        },
        "recipes": [f"{name}: {recipe}" for name, recipe in recipes.items()],
    }
    if base:
        content["base"] = base
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def slot_key(packing: str, content_hash: str) -> str:
    """Return the key of an adapter's slot."""
    return hashlib.sha256(f"{packing} {content_hash}".encode()).hexdigest()


def _hash_name(source: str) -> str:
    return hashlib.sha256(f"{_sources()} {source}".encode()).hexdigest() + ".hash"


@lru_cache(maxsize=1)
def _sources() -> str:
    digest = hashlib.sha256(f"{FORMAT} {source_hash()}".encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def _chunk_size(size: int) -> int:
    """Return the bytes per checksum. Chunks are read in parallel, but each one acquires the GIL, so there are few."""
    return min(MAX_CHUNK_BYTES, max(1, -(-size // (NUM_CHUNKS * _ALIGNMENT))) * _ALIGNMENT)


def _header_size(size: int) -> int:
    """Return the header's bytes, a multiple of 4096, for a slot of `size` bytes."""
    return -(-(512 + 72 * -(-size // _chunk_size(size))) // _ALIGNMENT) * _ALIGNMENT


def _read_slot(handle: int, key: str, memory: NDArray[np.uint8]) -> str:
    """Fill `memory` from a slot's file. Return a description of the fault, or "" on success."""
    size, chunk, start = memory.nbytes, _chunk_size(memory.nbytes), _header_size(memory.nbytes)
    if os.fstat(handle).st_size != start + size:
        return f"it has {os.fstat(handle).st_size} bytes instead of {start + size}"
    header = _decode_header(os.pread(handle, start, 0))
    if header != Header(FORMAT, key, size, chunk, header.sums) or len(header.sums) != -(-size // chunk):
        return "its header belongs to another slot"

    def read(index: int) -> bool:
        part = memory[index * chunk : (index + 1) * chunk]
        read_fully(handle, part, start + index * chunk)
        return hashlib.sha256(part.data).hexdigest() == header.sums[index]

    return "" if all(list(readers().map(read, range(len(header.sums))))) else "its checksum is wrong"
