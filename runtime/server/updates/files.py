"""Private copies of updates, in files of the server's directory. What is checked and packed is such a copy, whatever a
client still writes into its buffer, and the next GPU process reads it again.
"""

import contextlib
import os
import stat
from collections.abc import Generator, Iterable
from pathlib import Path

from ...api.adapter_versions import version_of
from ...api.errors import RequestError

COPY_BYTES = 1 << 24
_NEW = "new"  # no version has this name


class UpdateFiles:
    """The updates in a folder, by the names of their versions. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def copied(self, source: str, nbytes: int) -> Generator[int]:
        """Copy the first bytes of a file; return the copy's descriptor. It is deleted, unless `keep` gives it a name.

        Raises RequestError for a source that is no file or is too short, and OSError.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        new = self._folder / _NEW
        new.unlink(missing_ok=True)
        handle = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            _copy(source, handle, nbytes)
            yield handle
        finally:
            os.close(handle)
            new.unlink(missing_ok=True)

    def keep(self, name: str) -> None:
        """Give the current copy the name of its version. Raises OSError."""
        os.replace(self._folder / _NEW, self._folder / name)

    @contextlib.contextmanager
    def opened(self, name: str) -> Generator[int]:
        """Return the descriptor of a version's file. Raises OSError."""
        handle = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield handle
        finally:
            os.close(handle)

    def remove(self, names: Iterable[str]) -> None:
        """Delete the files of the versions in `names`, if there are any."""
        for name in filter(version_of, names):  # others may be `..`
            (self._folder / name).unlink(missing_ok=True)


def _copy(source: str, target: int, nbytes: int) -> None:
    handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RequestError("the buffer is not a regular file; open another one")
        done = 0
        while done < nbytes:
            count = os.sendfile(target, handle, done, min(COPY_BYTES, nbytes - done))
            if not count:
                raise RequestError(f"the buffer has {done} bytes instead of {nbytes}; open another one")
            done += count
    finally:
        os.close(handle)
