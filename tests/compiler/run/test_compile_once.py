"""Processes that share Triton's cache compile a kernel one after the other; a lock that others may hold is not used."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from pathlib import Path
from threading import Barrier

import pytest
from sidestream.compiler.run import compile_once
from sidestream.compiler.run.compile_once import LOCK_FILE, CompileOnce
from triton import knobs

OTHER = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sidestream.compiler.run.compile_once import CompileOnce

def compile_kernel():
    print("compiling", flush=True)
    sys.stdin.readline()
    Path(sys.argv[1]).write_text("in the cache")

with ThreadPoolExecutor(1) as threads, CompileOnce(threads) as mode:
    mode.compile_locked("kernel", compile_kernel)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert knobs.cache.dir == str(tmp_path / "triton")
    return tmp_path / "triton"


@pytest.mark.parametrize("ends", ["compiles", "is killed"])
def test_a_kernel_waits_for_the_process_that_compiles_it(cache: Path, ends: str) -> None:
    kernel = cache.parent / "kernel"
    command = [sys.executable, "-c", OTHER, str(kernel)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
        ThreadPoolExecutor(2) as threads,
        CompileOnce(threads) as mode,
    ):
        assert other.stdout is not None and other.stdout.readline() == "compiling\n"
        found = threads.submit(mode.compile_locked, "kernel", kernel.exists)
        assert mode.compile_locked("another kernel", lambda: "at once") == "at once"
        with pytest.raises(StillRunning):
            found.result(0.3)
        if ends == "is killed":
            other.kill()
        else:
            other.communicate("\n")
        assert found.result() == (ends == "compiles")


def test_threads_wait_for_each_other(cache: Path) -> None:
    running: set[str] = set()
    met, together = [], Barrier(2)

    def compile_kernel(key: str) -> None:
        met.append(key in running)
        running.add(key)
        if key == "another":
            together.wait()
        else:
            time.sleep(0.01)
        running.discard(key)

    with ThreadPoolExecutor(4) as threads, CompileOnce(threads) as mode:
        other = threads.submit(mode.compile_locked, "another", lambda: compile_kernel("another"))
        equal = [threads.submit(mode.compile_locked, "kernel", lambda: compile_kernel("kernel")) for _ in range(6)]
        for future in equal:
            future.result()
        assert not other.done(), "other kernels do not wait"
        together.wait()
    assert met == [False] * 7


def test_it_does_not_wait_forever(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_once, "MAX_WAIT_SECONDS", 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(cache.parent / "kernel")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "compiling\n"
        with ThreadPoolExecutor(1) as threads, CompileOnce(threads) as mode:
            assert mode.compile_locked("kernel", lambda: "compiled") == "compiled"
        other.kill()


@pytest.mark.parametrize("hostile", ["writable by others", "link", "pipe", "folder"])
def test_a_lock_file_of_others_is_not_used(cache: Path, hostile: str) -> None:
    cache.mkdir()
    file = cache / LOCK_FILE
    if hostile == "link":
        file.symlink_to(cache.parent / "elsewhere")
    elif hostile == "pipe":
        os.mkfifo(file)
    elif hostile == "folder":
        file.mkdir()
    else:
        file.touch()
        file.chmod(0o666)
    with ThreadPoolExecutor(1) as threads, CompileOnce(threads) as mode:
        assert mode._file is None
        assert mode.compile_locked("kernel", lambda: "compiled") == "compiled"
    assert not (cache.parent / "elsewhere").exists()
