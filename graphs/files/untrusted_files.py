"""Open files from untrusted users, and limit the text that errors quote from them.

Only regular files in allowed directories are opened: a path may link to an endless device, a pipe that blocks, or a
private file. Kind and location are checked before and after opening. Errors quote plausible names, numbers, and values
from a fixed list; everything else is only described, so that no message leaks a file's text.
"""

import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,159}")
_LARGEST = 10**12
_LFS = b"version https://git-lfs.github.com/spec/"
LFS_POINTER = "is a pointer of Git LFS, not the file itself: run `git lfs pull` there, or download the file"
"""Error text for `is_lfs_pointer`."""


class FileRefusedError(ValueError):
    """A file is not regular, or not in an allowed directory. The message does not contain the path."""


def open_regular(path: Path, roots: Sequence[Path] | None = None) -> int:
    """Return a file descriptor for reading the regular file `path`; never blocks.

    `roots`: resolved directories; after all links, the file must be inside one of them (None: anywhere). Raises
    FileRefusedError and OSError.
    """
    real = os.path.realpath(path)
    _check_place(real, roots)
    _check_kind(os.stat(real))
    handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_kind(os.fstat(handle))
        if roots is not None:  # a directory in the path may have been replaced after the first check
            _check_place(os.readlink(f"/proc/self/fd/{handle}"), roots)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_bounded(path: Path, max_bytes: int, roots: Sequence[Path] | None = None) -> bytes | None:
    """Return the content of a regular file; None if it is larger than `max_bytes`. Raises like `open_regular`."""
    with open(open_regular(path, roots), "rb") as file:
        content = file.read(max_bytes + 1)
    return content if len(content) <= max_bytes else None


def is_lfs_pointer(path: Path, roots: Sequence[Path] | None = None) -> bool:
    """Return whether the file is a placeholder for a file that Git LFS has not fetched."""
    try:
        with open(open_regular(path, roots), "rb") as file:
            return file.read(len(_LFS)) == _LFS
    except (OSError, FileRefusedError):
        return False


def read_start(path: Path, max_bytes: int, roots: Sequence[Path] | None = None) -> bytes:
    """Return the first `max_bytes` bytes of a regular file; b"" if it does not exist. Raises like `open_regular`."""
    if not path.exists():
        return b""
    with open(open_regular(path, roots), "rb") as file:
        return file.read(max_bytes)


def _check_place(real: str, roots: Sequence[Path] | None) -> None:
    if roots is not None and not any(Path(real).is_relative_to(root) for root in roots):
        raise FileRefusedError("is outside the directories from which adapters may be loaded")


def _check_kind(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise FileRefusedError("is not a regular file")


def name_of(text: str) -> str:
    """Return the name of a field or tensor in quotes if it is a plausible one, else only its length."""
    return repr(text) if _NAME.fullmatch(text) else f"(a name of {len(text)} characters)"


def value_of(value: object, known: Collection[str] = ()) -> str:
    """Return a field's value if it is None, a number or one of the words in `known`; else a description of its type."""
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < _LARGEST):
        return repr(value)
    if isinstance(value, str) and value in known:
        return repr(value)
    kinds = {str: "another string", list: "a list", dict: "an object", int: "a larger integer"}
    return kinds.get(type(value), "something else")
