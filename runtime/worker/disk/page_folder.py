"""Files of KV pages, one a page, in a private folder that engines share: atomic writes, checked reads, a bound."""

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....compiler.options import OptionError
from ....compiler.program.cache_folder import CacheFolder, write_fully
from ....graphs.files.safetensors_file import read_fully
from ...scheduler.disk.disk_pages import PAGE_ABSENT, PAGE_DAMAGED, SUFFIX

MAGIC = b"sidestream-kv-page-1 "
HEADER_BYTES = len(MAGIC) + 2 * hashlib.sha256().digest_size
TRIM_SHARE = 16
"""The folder is listed, and its oldest files are deleted, each time this part of the limit has been written."""
FOLDER = "sidestream-kv-pages"


class PageFolder(CacheFolder):
    """The files in FOLDER below `root` of one `fingerprint`: a hash (hex) of all that a page's bytes depend on besides
    its key. `prefix`: path of the files up to their keys.

    `limit`: most bytes of the files of all fingerprints. Each further engine may exceed it by a TRIM_SHARE.

    Raises OptionError if the folder is not a private directory of this user.
    """

    def __init__(self, root: Path, fingerprint: str, limit: int) -> None:
        super().__init__(root / FOLDER, limit - limit // TRIM_SHARE)
        self.prefix = f"{root / FOLDER}/{fingerprint[:40]}-"
        self._fingerprint, self._untrimmed = fingerprint, limit
        folder = self.directory
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise OptionError(f"kv_disk={str(root)!r} cannot be used: {error}; name another directory") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise OptionError(f"kv_disk: {folder} is not a directory of this user; name another one with kv_disk")
        if found.st_mode & 0o077:
            raise OptionError(f"kv_disk: other users may read or write {folder}; run `chmod 700 {folder}`")

    def name(self, key: bytes) -> str:
        """Return the name of a page's file."""
        return f"{self._fingerprint[:40]}-{key.hex()}{SUFFIX}"

    def save(self, key: bytes, content: NDArray[np.uint8]) -> None:
        """Write a page unless it has a file. Raises OSError."""
        name = self.name(key)
        if name in self:
            return
        if not self.directory.is_dir():  # an unmounted disk is not replaced by a directory
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.directory))
        header = MAGIC + self._digest(key, content)

        def fill(handle: int) -> None:
            write_fully(handle, header)
            write_fully(handle, content.data)

        try:
            self.write(name, HEADER_BYTES + content.nbytes, fill)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                self.limit -= self.limit // TRIM_SHARE  # until the disk has space for what others write
                super()._trim(name)
            raise

    def load(self, key: bytes, into: NDArray[np.uint8]) -> str | None:
        """Fill `into` with a page. Return None, or PAGE_ABSENT or PAGE_DAMAGED with `into` undefined.

        A file that is damaged, or that others may have written, is deleted. Raises OSError if the disk fails.
        """
        name = self.name(key)
        with self.reading(name) as handle:
            if handle is None and not os.path.lexists(self.directory / name):
                return PAGE_ABSENT
            fault = "others may have written it" if handle is None else self._read(handle, key, into)
        if fault:
            self.damaged(name, fault)
            return PAGE_DAMAGED
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
                if name.startswith(self._fingerprint[:40]):
                    self.remove(name)

    def _digest(self, key: bytes, content: NDArray[np.uint8]) -> bytes:
        digest = hashlib.sha256(b"%s%s %s\n" % (MAGIC, self._fingerprint.encode(), key))
        digest.update(content.data)
        return digest.hexdigest().encode()

    def _trim(self, newest: str) -> None:
        """Delete the least recently used files now and then: reading a large directory takes a while."""
        with suppress(OSError):  # another engine may have deleted it
            self._untrimmed += (self.directory / newest).stat().st_size
        if self._untrimmed > self.limit // TRIM_SHARE:
            self._untrimmed = 0
            super()._trim(newest)
