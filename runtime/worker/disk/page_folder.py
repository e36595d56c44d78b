"""Files of KV pages, one a page: atomic writes, checked reads, and a bound for all files below a directory.

The directory has a folder for each fingerprint, the hash of everything that a page's bytes depend on besides its key.
Engines with one fingerprint share its files, also at the same time; a file that another one has deleted is absent.
"""

import errno
import hashlib
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....compiler.options import OptionError
from ....compiler.program.cache_folder import SPARE_BYTES, STALE_SECONDS, CacheFolder, write_fully
from ....graphs.files.safetensors_file import read_fully
from ...scheduler.disk.disk_pages import PAGE_ABSENT, PAGE_DAMAGED, SUFFIX, file_name

MAGIC = b"sidestream-kv-page-1 "
HEADER_BYTES = len(MAGIC) + 2 * hashlib.sha256().digest_size
MAX_FILES = 1 << 18
"""Files of all fingerprints: with small pages they end before the bytes do."""
RESCAN_SHARE = 16
"""The directory is scanned again, for files of other engines, when this part of its limit has been written."""
_FOLDER = re.compile(r"[0-9a-f]{40}")


class PageFolder(CacheFolder):
    """The files of one `fingerprint` (hex) below `root`, whose files of all fingerprints have at most `limit` bytes.

    Raises OptionError if `root` is not a private directory of this user.
    """

    def __init__(self, root: Path, fingerprint: str, limit: int) -> None:
        super().__init__(root / fingerprint[:40], limit)
        self._root, self._fingerprint = root, fingerprint
        self._lock = threading.Lock()
        self._files: OrderedDict[str, tuple[int, float]] = OrderedDict()  # path -> bytes and last use, oldest first
        self._bytes = self._unscanned = 0
        self._allowed = -1  # the limit, or what the disk has space for; -1: not scanned
        try:
            for folder in (root, self.directory):
                folder.mkdir(mode=0o700, parents=folder is root, exist_ok=True)
                _check_private(folder)
        except OSError as error:
            raise OptionError(
                f"kv_disk={str(root)!r} cannot be used: {error.strerror}; name another directory"
            ) from None

    def save(self, key: bytes, content: NDArray[np.uint8]) -> None:
        """Write a page unless it has a file. Raises OSError."""
        name = file_name(key)
        if name in self:
            return
        if not self._root.is_dir():  # an unmounted disk is not replaced by a directory
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._root))
        header = MAGIC + self._digest(key, content)

        def fill(handle: int) -> None:
            write_fully(handle, header)
            write_fully(handle, content.data)

        try:
            self.write(name, HEADER_BYTES + content.nbytes, fill)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                with self._lock:
                    self._scan()
                    self._evict()
            raise

    def load(self, key: bytes, into: NDArray[np.uint8]) -> str | None:
        """Fill `into` with a page. Return None, or PAGE_ABSENT or PAGE_DAMAGED with `into` undefined.

        A file that is damaged, or that others may have written, is deleted. Raises OSError if the disk fails.
        """
        name = file_name(key)
        with self.reading(name) as handle:
            if handle is None:
                fault = "others may have written it" if os.path.lexists(self.directory / name) else PAGE_ABSENT
            else:
                fault = self._read(handle, key, into)
        if fault == PAGE_ABSENT:
            return PAGE_ABSENT
        if fault:
            self.damaged(name, fault)
            return PAGE_DAMAGED
        self._note(name, HEADER_BYTES + into.nbytes)
        return None

    def _read(self, handle: int, key: bytes, into: NDArray[np.uint8]) -> str:
        """Fill `into` from an open file. Return a description of the fault, or ""."""
        size, found = HEADER_BYTES + into.nbytes, os.fstat(handle).st_size
        if found != size:
            return f"it has {found} bytes instead of {size}"
        header = os.pread(handle, HEADER_BYTES, 0)
        try:
            read_fully(handle, into, HEADER_BYTES)
        except EOFError as error:
            return str(error)
        return "" if header == MAGIC + self._digest(key, into) else "its digest is wrong"

    def delete_all(self) -> None:
        """Delete the files of this fingerprint."""
        with suppress(OSError):
            for name in os.listdir(self.directory):
                if name.endswith(SUFFIX):
                    self.remove(name)

    def _digest(self, key: bytes, content: NDArray[np.uint8]) -> bytes:
        digest = hashlib.sha256(b"%s%s %s\n" % (MAGIC, self._fingerprint.encode(), key))
        digest.update(content.data)
        return digest.hexdigest().encode()

    def _trim(self, newest: str) -> None:
        """Delete the least recently used files above the bound."""
        path = self.directory / newest
        with suppress(OSError):  # another engine may have deleted it
            self._note(newest, path.stat().st_size)

    def _note(self, name: str, size: int) -> None:
        """Note a use of a file, and keep the bound."""
        path = str(self.directory / name)
        with self._lock:
            known = self._files.pop(path, (0, 0.0))[0]
            self._files[path] = size, time.time()
            self._bytes += size - known
            self._unscanned += size - known
            if self._allowed < 0 or self._unscanned > self.limit // RESCAN_SHARE:
                self._scan()
            self._evict()

    def _scan(self) -> None:
        """Read the sizes and times of all files, and delete temporary files of writers that died."""
        files = []
        with suppress(OSError), os.scandir(self._root) as folders:
            for folder in [
                each for each in folders if _FOLDER.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
            ]:
                with suppress(OSError), os.scandir(folder.path) as entries:
                    for entry in entries:
                        with suppress(OSError):
                            found = entry.stat(follow_symlinks=False)
                            if entry.name.endswith(SUFFIX):
                                files.append((found.st_mtime, found.st_size, entry.path))
                            elif time.time() - found.st_mtime > STALE_SECONDS:
                                os.unlink(entry.path)
        self._files = OrderedDict((path, (size, used)) for used, size, path in sorted(files))
        self._bytes, self._unscanned, self._allowed = sum(size for _, size, _ in files), 0, self.limit
        with suppress(OSError):
            space = os.statvfs(self._root)
            self._allowed = min(self.limit, max(0, self._bytes + space.f_bavail * space.f_frsize - 2 * SPARE_BYTES))

    def _evict(self) -> None:
        while self._files and (self._bytes > self._allowed or len(self._files) > MAX_FILES):
            path, (size, used) = self._files.popitem(last=False)
            self._bytes -= size
            with suppress(OSError):
                found = os.lstat(path).st_mtime
                if found > used + 1:  # another engine has used it
                    self._files[path] = size, found
                    self._bytes += size
                else:
                    os.unlink(path)


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OptionError(f"kv_disk: {folder} is not a directory of this user; name another one")
    if found.st_mode & 0o077:
        raise OptionError(
            f"kv_disk: other users may read or write {folder}; run `chmod 700 {folder}`, or name another directory"
        )
