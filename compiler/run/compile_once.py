"""Compilation of each kernel by one of the processes that share Triton's cache, such as tensor-parallel ranks.

A process locks the byte at the hash of a kernel's cache key in a file of the cache. The others wait, and find the
kernel in the cache. The system releases the locks of a process that ends.
"""

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton import knobs

LOCK_FILE = "sidestream.lock"
POLL_SECONDS = 0.05
MAX_WAIT_SECONDS = 60.0
"""After this time a kernel is compiled even if another process holds its lock: it may be stopped."""


class CompileOnce(triton.AsyncCompileMode):
    """Triton's mode that compiles in an executor; it waits for other processes that compile the same kernel.

    Without a lock file that belongs to this user alone it does not wait.
    """

    def __init__(self, executor: Any, **options: Any) -> None:
        super().__init__(executor, **options)
        self._file: int | None = None

    def __enter__(self) -> Any:
        self._file = _open_private(Path(knobs.cache.dir) / LOCK_FILE)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def submit(self, key: str, compile_fn: Callable[[], Any], *rest: Any) -> Any:
        """Compile a kernel in the executor, locked by its key in Triton's cache."""
        return super().submit(key, partial(self.compile_locked, key, compile_fn), *rest)

    def compile_locked(self, key: str, compile_fn: Callable[[], Any]) -> Any:
        """Return `compile_fn()`, called when no other process compiles `key`."""
        if self._file is None:
            return compile_fn()
        with _locked(self._file, int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])):
            return compile_fn()


@contextmanager
def _locked(file: int, place: int) -> Iterator[None]:
    """Lock a byte of a file, if possible within MAX_WAIT_SECONDS. Threads of one process do not exclude each other."""
    latest = time.monotonic() + MAX_WAIT_SECONDS
    with suppress(OSError):  # a file system without locks
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                break
            except (BlockingIOError, PermissionError):  # POSIX allows either for a held lock
                if time.monotonic() > latest:
                    break
                time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def _open_private(path: Path) -> int | None:
    """Open a file, created if absent; None unless it is a regular file that only this user may write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError:
        return None
    found = os.fstat(file)
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not others:
        return file
    os.close(file)
    return None
