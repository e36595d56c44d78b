"""Programs that forked processes build are those that this process would build; a process may die or stall."""

import os
import signal
import time
from pathlib import Path

import pytest
from sidestream.compiler.api import CompiledModel, compile_model
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pipeline import pass_names
from sidestream.compiler.program.cache import LIMIT, ProgramCache
from sidestream.compiler.program.cache_folder import CacheFolder
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from sidestream.runtime.worker import program_processes
from sidestream.runtime.worker.program_processes import ProgramProcesses, number_of_processes
from sidestream.tools.bench.random_model import TINY

BUCKETS = [Bucket(count, count, 7, 4, decode=True, lora=lora) for count in (1, 2, 4, 8) for lora in (False, True)]


def model(folder: Path) -> CompiledModel:
    options = CompileOptions(precision="int8")
    cache = ProgramCache(CacheFolder(folder, LIMIT), {"config": "tiny"}, options, pass_names())
    llama = Llama(LlamaConfig.from_dict(TINY), LoraShape(slots=2, rank=16), dtype=options.model_dtype, device="meta")
    return compile_model(llama, options, cache=cache, text=False)


def test_programs_of_processes_are_the_same(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    forked, own = model(tmp_path / "forked"), model(tmp_path / "own")
    forked.program(BUCKETS[0])
    missing = forked.missing_programs(BUCKETS)
    assert len(missing) == len(BUCKETS) - 1
    with ProgramProcesses(missing, forked.keep, 3) as processes:
        for bucket in missing:
            processes.wait(bucket)
            assert not forked.missing_programs([bucket])
    assert [forked.program(bucket).encoded() for bucket in BUCKETS] == [
        own.program(bucket).encoded() for bucket in BUCKETS
    ]
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_process_that_dies_or_stalls_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_processes, "STALL_SECONDS", 0.5)
    last = BUCKETS[-1]

    def build(bucket: Bucket) -> None:
        if bucket.tokens == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if bucket.tokens == 4:
            time.sleep(3600)
        if bucket.tokens == last.tokens:
            raise RuntimeError("no memory")

    for bucket in BUCKETS:
        with ProgramProcesses([bucket, bucket], build, 2) as processes:
            processes.wait(bucket)
    with pytest.raises(KeyError), ProgramProcesses([BUCKETS[4]] * 2, build, 2):
        raise KeyError("the start fails, and its processes are killed")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Also if the parent is killed in the middle of a start."""

    def build(bucket: Bucket) -> None:
        (tmp_path / "started").write_text(str(os.getpid()))
        time.sleep(3600)

    parent = os.fork()
    if parent == 0:
        with ProgramProcesses(BUCKETS[:1], build, 1) as processes:
            processes.wait(BUCKETS[0])
        os._exit(0)
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
        time.sleep(0.01)
    child = int((tmp_path / "started").read_text())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2]:
        time.sleep(0.01)


def test_few_programs_or_cores_need_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ((16, 150, 1, 8), (16, 150, 4, 0), (2, 150, 1, 0), (16, 8, 1, 0), (4, 20, 1, 2))
    for cores, programs, ranks, count in cases:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert number_of_processes(programs, ranks) == count
