"""A private, size-limited folder of files between runs; the least recently used files are removed first.

Writes are atomic. Content is used only if its stored digest matches, so damaged, renamed and outdated files count as
absent. A digest without a key detects damage, not attacks; the folder's permissions protect against other users.
"""

import errno
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SPARE_BYTES = 1 << 30
"""Nothing is written if the disk would have fewer free bytes than this afterwards."""
STALE_SECONDS = 3600.0
_TEMPORARY = ".tmp"
_MAGIC = b"sidestream-kept-1 "
_DIGITS = 2 * hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Return $SIDESTREAM_CACHE, else sidestream/ under $XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("SIDESTREAM_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sidestream"


class CacheFolder:
    """The folder `directory`, created with mode 0700 on the first write; at most `limit` bytes.

    Several processes may use it at the same time. Files that belong to another user, or to which others may write,
    count as absent and are not written to.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit

    @contextmanager
    def reading(self, name: str) -> Iterator[int | None]:
        """Open the file `name` and mark it as used; yield its descriptor, or None if it is absent."""
        handle = self._open(name)
        try:
            yield handle
            if handle is not None:
                with suppress(OSError):
                    os.utime(handle)
        finally:
            if handle is not None:
                os.close(handle)

    def __contains__(self, name: str) -> bool:
        with suppress(OSError):
            return self._trusted(self.directory.stat()) and self._trusted((self.directory / name).lstat())
        return False

    def write(self, name: str, size: int, fill: Callable[[int], None]) -> None:
        """Write a file of `size` bytes atomically; `fill` writes to a file descriptor. Raises OSError."""
        if size > self.limit:
            raise OSError(errno.EFBIG, f"{size} bytes are more than the {self.limit} that the cache may have")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._trusted(self.directory.stat()):
            raise OSError(
                errno.EPERM, "the folder belongs to another user, or others may write to it", str(self.directory)
            )
        room = os.statvfs(self.directory)
        if room.f_bavail * room.f_frsize < size + SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
        handle, temporary = tempfile.mkstemp(dir=self.directory, suffix=_TEMPORARY)
        try:
            try:
                fill(handle)
            finally:
                os.close(handle)
            os.replace(temporary, self.directory / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._trim(name)

    def keep(self, name: str, content: bytes) -> None:
        """Write `content` with its digest, for `recall`. Raises OSError."""
        whole = b"%s%s\n%s" % (_MAGIC, _digest(name, content), content)
        self.write(name, len(whole), lambda handle: write_fully(handle, whole))

    def recall(self, name: str) -> bytes | None:
        """Return the content written by `keep`, or None. A damaged file is removed (logged)."""
        with self.reading(name) as handle:
            if handle is None:
                return None
            try:
                with open(handle, "rb", closefd=False) as file:
                    whole = file.read()
            except OSError as error:
                self.damaged(name, error)
                return None
        start = len(_MAGIC) + _DIGITS + 1
        head, content = whole[:start], whole[start:]
        if head != b"%s%s\n" % (_MAGIC, _digest(name, content)):
            self.damaged(name, "its digest is wrong")
            return None
        return content

    def damaged(self, name: str, fault: object) -> None:
        """Log and remove a file that cannot be used."""
        _log.warning("a damaged cache file is deleted and will be rebuilt: %s: %s", name, fault)
        self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(OSError):
            (self.directory / name).unlink()

    def _open(self, name: str) -> int | None:
        if name not in self:
            return None
        try:
            handle = os.open(self.directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _log.warning("a cache file is ignored: %s", error)
            return None
        if self._trusted(os.fstat(handle)):
            return handle
        os.close(handle)
        return None

    @staticmethod
    def _trusted(found: os.stat_result) -> bool:
        return (
            found.st_uid == os.geteuid()
            and not found.st_mode & _OTHERS_MAY_WRITE
            and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode))
        )

    def _trim(self, newest: str) -> None:
        """Remove the least recently used files above the limit, and temporary files of writers that died."""
        files: list[tuple[float, int, str]] = []
        with suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(OSError):  # another process may have removed it
                    found = entry.stat(follow_symlinks=False)
                    if not entry.name.endswith(_TEMPORARY):
                        files.append((found.st_mtime, found.st_size, entry.name))
                    elif time.time() - found.st_mtime > STALE_SECONDS:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if total <= self.limit:
                return
            if name != newest:
                self.remove(name)
                total -= size


def write_fully(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data` to a file descriptor. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(handle, view) :]


def _digest(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(b"%s%s\n" % (_MAGIC, name.encode()))
    digest.update(content)
    return digest.hexdigest().encode()
