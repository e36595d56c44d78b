"""Programs that forked processes build are those that one process would build; a process may die or stall.

Forks of a test's own process, which has threads of other tests, run nothing that takes locks.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sidestream.compiler.program.program import Bucket
from sidestream.runtime.worker.programs import program_processes
from sidestream.runtime.worker.programs.program_processes import ProgramProcesses, number_of_processes

BUCKETS = [Bucket(count, count, 7, 4, decode=True, lora=lora) for count in (1, 2, 4, 8) for lora in (False, True)]
SAME = """
import sys
from dataclasses import replace
from pathlib import Path
from sidestream.compiler.api import compile_model
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pipeline import pass_names
from sidestream.compiler.program.cache import LIMIT, ProgramCache
from sidestream.compiler.program.cache_folder import CacheFolder
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from sidestream.runtime.worker.programs.program_processes import ProgramProcesses
from sidestream.tools.bench.random_model import TINY

def model(folder):
    options = CompileOptions(precision="int8")
    cache = ProgramCache(CacheFolder(Path(folder), LIMIT), {"config": "tiny"}, options, pass_names())
    llama = Llama(LlamaConfig.from_dict(TINY), LoraShape(slots=2, rank=16), dtype=options.model_dtype, device="meta")
    return compile_model(llama, options, cache=cache, text=False)

buckets = [Bucket(count, count, 7, 4, decode=True, lora=lora) for count in (1, 2, 4, 8) for lora in (False, True)]
forked, own = model(sys.argv[1]), model(sys.argv[2])
forked.program(buckets[0])
missing = forked.missing_programs(buckets)
with ProgramProcesses(missing, forked.keep, 3) as processes:
    for bucket in missing:
        processes.wait(replace(bucket, pages=99))
        print(bucket.name, bool(forked.missing_programs([bucket])))
same = [forked.program(bucket).encoded() == own.program(bucket).encoded() for bucket in buckets]
print(len(missing), same, forked._from_cache == {*missing})
"""
HOLDS = """
import os, time
from sidestream.compiler.program.program import Bucket
from sidestream.runtime.worker.programs.program_processes import ProgramProcesses

def build(bucket):
    print(os.getpid(), flush=True)
    time.sleep(3600)

bucket = Bucket(1, 1, 7, 4)
with ProgramProcesses([bucket], build, 1) as processes:
    processes.wait(bucket)
"""


def test_programs_of_processes_are_the_same(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", SAME, str(tmp_path / "forked"), str(tmp_path / "own")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    *waited, last = done.stdout.splitlines() or [done.stderr]
    assert last == f"7 {[True] * 8} True", done.stderr
    assert len(waited) == 7 and all(line.endswith("False") for line in waited), "built when the wait ends"


def test_a_process_that_dies_or_stalls_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_processes, "STALL_SECONDS", 0.5)
    pids: list[int] = []

    def build(bucket: Bucket) -> None:
        if bucket.tokens == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if bucket.tokens == 4:
            time.sleep(3600)
        if bucket.tokens == 8:
            raise RuntimeError("no memory")

    for bucket in BUCKETS:
        with ProgramProcesses([bucket, bucket], build, 2) as processes:
            pids += [each.pid for each in processes._processes]
            processes.wait(bucket)
    with pytest.raises(KeyError), ProgramProcesses([BUCKETS[4]] * 2, build, 2) as processes:
        pids += [each.pid for each in processes._processes]
        raise KeyError("the start fails, and its processes are killed")
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


class DyingQueue:
    """A queue of kernels whose compiler crashes."""

    def __init__(self) -> None:
        self.buckets = [replace(bucket, pages=1) for bucket in BUCKETS[:2]]
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def add(self, bucket: Bucket, program: None) -> None:
        if bucket.lora:
            raise RuntimeError("a process that ends before it compiles")

    def close_input(self) -> None:
        pass

    def compile_all(self, report: Callable[[], object]) -> None:
        report()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_compiler_that_crashes_ends_the_wait_for_kernels() -> None:
    queue: Any = DyingQueue()
    with ProgramProcesses(BUCKETS, lambda bucket: None, 2, [queue]) as processes:
        assert processes.num_queues == 1 and queue.closed
        processes.wait_for_kernels(1)
        assert processes._processes == []
        processes.wait(BUCKETS[-1])


def test_a_process_ends_with_its_parent() -> None:
    """Also if the parent is killed in the middle of a start."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        assert parent.stdout.read() == "", "the child has closed it, too"
    assert child != parent.pid


def test_few_programs_or_cores_need_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        (64, 150, 1, 16),
        (16, 150, 1, 15),
        (16, 150, 4, 3),
        (64, 150, 2, 16),
        (4, 150, 4, 0),
        (2, 150, 1, 0),
        (16, 8, 1, 0),
        (4, 20, 1, 2),
    )
    for cores, programs, ranks, count in cases:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert number_of_processes(programs, ranks) == count
