"""A hash of the base model's files, computed once and remembered while they do not change."""

import hashlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from ...compiler.program.cache_folder import CacheFolder, cache_directory
from ..processes.threads import start_thread

READERS = 8
READ_BYTES = 4 << 20
FOLDER_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def base_hash(directory: Path, stopped: threading.Event | None = None) -> str:
    """Return the sha256 over config.json and the sha256 of each file of weights; "" once `stopped` is set.

    The result is remembered by the files' inodes, sizes and times. Raises OSError.
    """
    paths = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    states = [path.stat() for path in paths]
    stamp = repr([(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in states])
    name = hashlib.sha256(stamp.encode()).hexdigest()
    folder = CacheFolder(cache_directory() / "base_hashes", FOLDER_BYTES)
    known = folder.recall(name)
    if known is not None:
        return known.decode("ascii", "replace")
    stopped = stopped or threading.Event()
    with ThreadPoolExecutor(READERS) as pool:
        hashes = list(pool.map(partial(_file_hash, stopped), paths))
    if stopped.is_set():
        return ""
    lines = [f"{path.name} {found}\n" for path, found in zip(paths, hashes, strict=True)]
    result = hashlib.sha256("".join(lines).encode()).hexdigest()
    with suppress(OSError):  # computed again at the next start
        folder.keep(name, result.encode())
    return result


def _file_hash(stopped: threading.Event, path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while not stopped.is_set() and (block := file.read(READ_BYTES)):
            digest.update(block)
    return digest.hexdigest()


def start_base_hash(directory: Path, report: Callable[[str], None]) -> None:
    """Compute `base_hash` in a thread, and pass it to `report`."""
    stopped = threading.Event()

    def run() -> None:
        try:
            report(base_hash(directory, stopped))
        except OSError as problem:
            _log.warning("receipts do not name the base, whose files cannot be read: %s", problem.strerror)

    start_thread(run, name="base-hash", stop=stopped.set)
