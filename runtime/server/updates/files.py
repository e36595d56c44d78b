"""Private copies of updates, in memory and in files of the server's directory. What is checked and packed is such a
copy, whatever a client still writes into its buffer, and the next GPU process reads its file.
"""

import contextlib
import os
import stat
from collections.abc import Generator, Iterable
from concurrent.futures import wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....graphs.files.update_file import UpdateFile
from ...api.adapter_versions import version_of
from ...api.errors import RequestError

_NEW, _SPARE = "new", "spare"  # no version has these names


class UpdateFiles:
    """The updates in a folder, by the names of their versions. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def copied(self, source: str, nbytes: int) -> Generator[UpdateFile]:
        """Copy the first bytes of a file into memory, and from there into a file, which is deleted unless `keep` gives
        it a name. Another thread completes the file meanwhile.

        Raises RequestError for a source that is no file or is too short, and OSError.
        """
        from ....graphs.files.adapter_file import readers  # imports torch

        self._folder.mkdir(mode=0o700, exist_ok=True)
        new = self._folder / _NEW
        new.unlink(missing_ok=True)
        contents = _read(source, nbytes)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._folder / _SPARE, new)
        handle = os.open(new, os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            file = UpdateFile(handle, contents)
            completed = readers().submit(file.complete)
            try:
                yield file
            finally:
                wait([completed])  # its errors are those of the caller's `complete`
        finally:
            os.close(handle)
            new.unlink(missing_ok=True)

    def keep(self, name: str) -> None:
        """Give the current copy, which is complete, the name of its version. Raises OSError."""
        os.replace(self._folder / _NEW, self._folder / name)

    @contextlib.contextmanager
    def opened(self, name: str) -> Generator[UpdateFile]:
        """Open a version's file. Raises OSError."""
        handle = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield UpdateFile(handle)
        finally:
            os.close(handle)

    def remove(self, names: Iterable[str]) -> None:
        """Delete the files of the versions in `names`, if there are any.

        One stays for the next update: memory that is allocated already is written several times faster.
        """
        for name in filter(version_of, names):  # others may be `..`
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._folder / name, self._folder / _SPARE)


def _read(source: str, nbytes: int) -> NDArray[np.uint8]:
    from ....graphs.files.adapter_file import read_private  # imports torch

    handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise RequestError("the buffer is not a regular file; open another one")
        if state.st_size < nbytes:
            raise RequestError(f"the buffer has {state.st_size} bytes instead of {nbytes}; open another one")
        return read_private(handle, nbytes)
    except EOFError as problem:
        raise RequestError(f"the buffer was truncated ({problem}); open another one") from None
    finally:
        os.close(handle)
