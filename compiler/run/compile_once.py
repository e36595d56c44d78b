"""Compilation of each kernel by one of the processes that share Triton's cache, such as tensor-parallel ranks.

A process locks the byte at the hash of a kernel's cache key in a file of the cache. The others wait, and find the
kernel in the cache. The system releases the locks of a process that ends.
"""

import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton import knobs

LOCK_FILE = "sidestream.lock"
POLL_SECONDS = 0.05
MAX_WAIT_SECONDS = 60.0
"""A process that holds a lock for longer may be stopped."""


class CompileOnce(triton.AsyncCompileMode):
    """Triton's mode that compiles in an executor; it waits for other processes that compile the same kernel.

    Without a lock file that belongs to this user alone it does not wait.
    """

    def __init__(self, executor: Any, **options: Any) -> None:
        super().__init__(executor, **options)
        self._file: int | None = None
        self._threads: dict[str, threading.Lock] = {}

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
        """Return `compile_fn()`, called while `key` is locked."""
        with self.locked(key):
            return compile_fn()

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Wait until no other thread and no other process has `key`; for a process at most MAX_WAIT_SECONDS."""
        with self._threads.setdefault(key, threading.Lock()):
            if self._file is None:
                yield
                return
            latest = time.monotonic() + MAX_WAIT_SECONDS
            while not lock_byte(self._file, key) and time.monotonic() < latest:
                time.sleep(POLL_SECONDS)
            try:
                yield
            finally:
                lock_byte(self._file, key, fcntl.LOCK_UN)


def lock_byte(file: int, key: str, lock: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
    """Lock or unlock the byte of a file at the hash of `key`; return False if another process holds it.

    Threads of one process do not exclude each other. Return True if the file system has no locks.
    """
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
    try:
        fcntl.lockf(file, lock, 1, place)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)  # POSIX allows either
    return True


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
